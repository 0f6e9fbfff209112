"""What torch tells of calls and of their graphs: tensors in arguments, ways from node to node, who listens to a gradient.

Owns nothing. Changes the order of hooks of ours only (`before_outputs`).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

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
"""torch.compile must neither trace a hook nor remember what it did: the compiled code is cut in two around it."""

_OPAQUE = (str, int, float, type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, partial)
"""Kinds of arguments that hold no tensors of a call."""

DERIVATIVES = "a derivative of torch.func (grad, vjp, jvp, jacrev, hessian...)"


@torch.compiler.disable
def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass."""
    return bool(graph_task() != -1)


@torch.compiler.disable
def in_transform() -> bool:
    """Whether this is computed inside of a transform of torch.func, such as vmap."""
    return bool(transform_level() is not None)


def in_derivative() -> bool:
    """Whether this is computed inside of a derivative of torch.func, which autograd's hooks hear nothing of. Not to be asked
    where torch.compile traces."""
    stack = transforms() if transform_level() else None
    kinds = (TransformType.Grad, TransformType.Jvp)
    return stack is not None and any(each.key() in kinds for each in stack)


def refuse_derivative(unit: str) -> NoReturn:
    """Raises UsageError: a unit of that name is called inside of a derivative of torch.func."""
    raise UsageError(
        f"{unit or 'the root'} is called inside of {DERIVATIVES}, which keeps its weights for longer "
        f"than its pages are there; use torch.autograd.grad(output, inputs), or keep everything in RAM, in a true "
        f"precision on one rank"
    )


def double_backward() -> UsageError:
    """The error of a backward pass that is to be differentiated in its turn."""
    return UsageError(
        "backward with create_graph=True (double backward) was started; a unit's parameters may be released "
        "before the second pass reads them, so this is refused; compute that loss in a module outside this "
        "strategy, or use a strategy that keeps all parameters in place"
    )


def refuse_double_backward() -> None:
    """Raises UsageError: a gradient is computed so that it can be differentiated in its turn."""
    # Gradients run with grad mode off unless create_graph is set (a recomputed forward turns it on for itself).
    if torch.is_grad_enabled():
        raise double_backward()


def tensors_in(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples, dicts, dataclasses and other objects, but modules; out of vmap's wrappers."""
    if isinstance(value, Tensor):
        while is_wrapped_by_transform(value):
            value = unwrapped(value)
        yield value
        return
    seen = {} if seen is None else seen
    if isinstance(value, _OPAQUE) or id(value) in seen:
        return
    seen[id(value)] = value  # which keeps its id from others
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__"):
        items = tuple(vars(value).values())
    for item in items:
        yield from tensors_in(item, seen)


class OwnHook(partial[Any]):
    """A hook of ours on a tensor."""


def others_hear_of(tensor: Tensor) -> bool:
    """Whether somebody else is to get a tensor's gradient (`register_hook`, `retain_grad`). Hooks over several tensors, ours
    among them, change no gradient and do not count."""
    hooks = (hooks_of(tensor) or {}).values()
    return tensor.retains_grad or any(
        not isinstance(each, OwnHook) and getattr(each, "__module__", "") != torch.autograd.graph.__name__
        for each in hooks
    )


def before_outputs(tensor: Tensor, key: int) -> None:
    """A hook on what a unit takes is called before those on it as what another unit gave, which were there first."""
    hooks = hooks_of(tensor)
    assert hooks is not None
    ids = list(hooks)
    first = next((place for place, each in enumerate(ids) if isinstance(hooks[each], OwnHook)), len(ids))
    for each in ids[first:]:
        if each != key:
            hooks[each] = hooks.pop(each)


def nodes_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Of tensors that are no leaves, and of what they are views of."""
    bases = (base_of(tensor) for tensor in tensors)
    return tuple(each.grad_fn for each in (*tensors, *bases) if each is not None and each.grad_fn is not None)


def ways_out(outputs: Sequence[Tensor], began: int, known: Sequence[Any], inside: frozenset[int]) -> tuple[Any, ...]:
    """The nodes of a call's graph that hand gradients to others than `known` and the parameters `inside`, by id.

    Args:
        began: nodes with a lower number are of before the call.
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
