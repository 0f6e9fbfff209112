"""Inspection of calls and autograd graphs: tensors in arguments, walks over graph nodes, hooks on gradients.

Owns nothing. Changes only the order of our own hooks (`run_before_output_hooks`).
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.torch_internals import (
    TransformType,
    base_of,
    graph_task,
    hooks_of,
    is_wrapped_by_transform,
    number_of_node,
    transform_level,
    transforms,
    unwrapped,
)

not_compiled = partial(
    torch.compiler.disable, reason="angel_ptm fetches weights here; compile units (a transformer's blocks) one by one"
)
"""Decorator of hooks, which torch.compile must not trace: it makes a graph break around each call."""

_OPAQUE = (str, int, float, type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, partial)
"""Types of arguments that contain no tensors of a call."""

DERIVATIVES = "a derivative of torch.func (grad, vjp, jvp, jacrev, hessian...)"


@torch.compiler.disable
def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass."""
    return bool(graph_task() != -1)


_APPLY = cast("types.MethodType", torch.autograd.Function.apply).__func__.__code__


@torch.compiler.disable
def in_function() -> bool:
    """Whether the caller runs inside the forward of an autograd Function, as that of a reentrant checkpoint is."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@torch.compiler.disable
def in_transform() -> bool:
    """Whether this thread is inside a transform of torch.func, such as vmap."""
    return bool(transform_level() is not None)


def in_derivative() -> bool:
    """Whether this thread is inside a derivative of torch.func, which does not call autograd hooks. Must not be called while
    torch.compile traces."""
    stack = transforms() if transform_level() else None
    kinds = (TransformType.Grad, TransformType.Jvp)
    return stack is not None and any(each.key() in kinds for each in stack)


def refuse_derivative(unit: str) -> NoReturn:
    """Raises UsageError: the unit of that name is called inside a derivative of torch.func."""
    raise UsageError(
        f"{unit or 'the root'} is called inside of {DERIVATIVES}, which uses its weights after its pages are "
        f"released; use torch.autograd.grad(output, inputs), or keep everything in RAM, in a true "
        f"precision on one rank"
    )


def double_backward() -> UsageError:
    """Returns the error for a backward pass with `create_graph=True`: its hooks run with grad mode on, which is off in other
    passes (a recomputed forward turns it on for itself)."""
    return UsageError(
        "backward with create_graph=True (double backward) was started; in models with units this is refused, since a "
        "unit's parameters may be released before the second pass reads them; use torch.autograd.grad without "
        "create_graph, or another strategy, such as 'ddp'"
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Returns all tensors in nested lists, tuples, dicts, dataclasses and other objects except modules; unwraps functorch
    tensors."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that their ids are not reused
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            while is_wrapped_by_transform(value):
                value = unwrapped(value)
            found.append(value)
            continue
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen[id(value)] = value
        items: Iterable[Any] = ()
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, (list, tuple)):
            items = value
        elif dataclasses.is_dataclass(value):
            items = [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif hasattr(value, "__dict__"):
            items = vars(value).values()
        left.extend(reversed(tuple(items)))
    return found


class OwnHook(partial[Any]):
    """Hook on a tensor that the runtime has registered, not the user."""


class InputHook(partial[Any]):
    """Hook that the runtime has registered on an input of a unit: it changes no gradient."""


def user_receives_gradient(tensor: Tensor) -> bool:
    """Whether the user receives a tensor's gradient (`register_hook`, `retain_grad`). Hooks over several tensors do not
    count, since they change no gradient, nor do ours."""
    hooks = (hooks_of(tensor) or {}).values()
    return tensor.retains_grad or any(
        not isinstance(each, (OwnHook, InputHook)) and getattr(each, "__module__", "") != torch.autograd.graph.__name__
        for each in hooks
    )


def run_before_output_hooks(tensor: Tensor, key: int) -> None:
    """Moves the hook `key`, on a unit's input, before our hooks on the same tensor as another unit's output, which were
    registered earlier."""
    hooks = hooks_of(tensor)
    assert hooks is not None
    ids = list(hooks)
    first = next((place for place, each in enumerate(ids) if isinstance(hooks[each], OwnHook)), len(ids))
    for each in ids[first:]:
        if each != key:
            hooks[each] = hooks.pop(each)


def nodes_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Returns the graph nodes of non-leaf tensors and of their bases."""
    found = []
    for each in (*tensors, *map(base_of, tensors)):
        if each is not None and each.grad_fn is not None:
            found.append(each.grad_fn)
    return tuple(found)


def exit_nodes(outputs: Sequence[Tensor], began: int, known: Sequence[Any], inside: frozenset[int]) -> tuple[Any, ...]:
    """Returns the nodes of a call's graph that pass gradients out of it: to nodes from before the call other than `known`, or
    to leaves other than `inside`.

    Args:
        outputs: outputs of the call.
        began: sequence number of the call's first node; nodes with lower numbers are from before the call.
        known: nodes at which the walk stops.
        inside: ids of the unit's parameters.
    """
    found: dict[Any, None] = {}
    ours = [node for node in nodes_of(outputs) if number_of_node(node) >= began]
    met = {*known, *ours}
    while ours:
        node = ours.pop()
        for following, _ in node.next_functions:
            if type(following).__name__ == "AccumulateGrad":
                if id(following.variable) not in inside:
                    found[node] = None
            elif following is not None and following not in met:
                if number_of_node(following) >= began:
                    met.add(following)
                    ours.append(following)
                else:
                    found[node] = None
    return tuple(found)


def reads_others(results: Sequence[Tensor], known: Sequence[Any], inside: Iterable[Tensor]) -> bool:
    """Whether a call's results have gradients with respect to leaves that its arguments do not lead to.

    Nodes are not told by their numbers: autocast may have cast a parameter before the call.

    Args:
        known: nodes of its arguments.
        inside: leaves that may be read.
    """
    ids, met = frozenset(map(id, inside)), {*known}
    if any(each.requires_grad and each.is_leaf and id(each) not in ids for each in results):
        return True
    left = [node for node in nodes_of(results) if node not in met]
    while left:
        node = left.pop()
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in ids:
            return True
        following = {each for each, _ in node.next_functions if each is not None} - met
        met |= following
        left += following
    return False


@contextmanager
def without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which hooks on the parameters' gradients do nothing, for gradients that are not those of a backward pass."""
    taken = [(hooks, dict(hooks)) for each in parameters if (hooks := hooks_of(each))]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in taken:
            hooks.update(kept)
