"""Side effects of a training step on its module (attributes, buffers, containers, objects), undone and compared by checks.

Checks call a training step more often than the Trainer does. Owns nothing. Which objects are searched:
runtime/tensors/user_objects.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ptm.runtime.autograd.stage_cut import AbsentOutput
from lightning_ptm.runtime.tensors.user_objects import OF_EVERY_MODULE, ObjectsOf
from lightning_ptm.torch_internals import CAPTURES_OUTPUTS, buffers_in

_LOGS = ("log", "log_dict", "print")
_MOST = 10_000
"""Containers of more elements are not searched for others; nor are more objects."""
_MOST_COMPARED = 1000
"""Most elements of a container that are compared; longer ones are compared by their length."""
_OF_STATE = 1e-5
"""Largest difference of an attribute or a buffer after a step, relative to the sum of its absolute values."""
_OF_LIGHTNING = OF_EVERY_MODULE | vars(LightningModule()).keys()


def arguments_of_step(module: LightningModule, batch: Any, index: int) -> tuple[Any, ...]:
    """Returns the arguments with which Lightning calls the training step of a module.

    Args:
        index: number of the batch in the epoch.
    """
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, index) if numbered else (batch,)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Context of a step that logs nothing, and after which attributes, containers, buffers and objects of modules are as
    before."""
    objects = ObjectsOf(module)
    attributes = [
        (vars(each), {name: value for name, value in vars(each).items() if name not in OF_EVERY_MODULE})
        for each in module.modules()
    ]
    buffers = [(buffers_in(each), dict(buffers_in(each))) for each in module.modules()]
    containers: list[tuple[Any, Any]] = []
    changed: list[tuple[Any, dict[str, Any]]] = []
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    generators: list[tuple[torch.Generator, Tensor]] = []
    seen: set[int] = set()
    todo: list[Any] = [value for _, kept in (*attributes, *buffers) for value in kept.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            if not isinstance(value, (nn.Parameter, AbsentOutput)) and not value.is_meta:
                tensors[id(value)] = value, value.detach().clone()
        elif isinstance(value, torch.Generator):
            generators.append((value, value.get_state()))
        elif id(value) in seen:
            continue
        elif isinstance(value, (list, dict, set, deque)):
            seen.add(id(value))
            containers.append((value, value.copy()))
            if len(value) <= _MOST:
                todo += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            todo += value
        elif len(changed) < _MOST and (inside := objects.attributes(value)) is not None:
            seen.add(id(value))
            changed.append((value, inside))
            todo += inside.values()
    for name in _LOGS:
        if hasattr(module, name):
            vars(module)[name] = _nothing
    try:
        yield
    finally:
        for current, kept in attributes:
            for name in current.keys() - kept.keys() - OF_EVERY_MODULE - {CAPTURES_OUTPUTS}:  # hooks stay
                del current[name]
            current.update(kept)
        for current, kept in (*buffers, *containers):
            current.clear()
            (current.extend if isinstance(current, (list, deque)) else current.update)(kept)
        for value, kept in changed:
            objects.put(value, kept)
        for generator, state in generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, before in tensors.values():
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


@dataclasses.dataclass(frozen=True, slots=True)
class LeftState:
    """An attribute or a buffer of a module, or an attribute of an object in it, in numbers.

    Attributes:
        counts: whether later steps may depend on it: a buffer, or an integer.
        numbers: of a number, itself; of a tensor, its sum and that of its absolute values; of a container, those of its
            elements.
        kind: shape or length; of integers, their exact sum; of a generator, a digest of its state.
    """

    counts: bool
    numbers: tuple[float, ...]
    kind: str


def left_in(module: nn.Module, without: Collection[nn.Module] = ()) -> dict[str, LeftState]:
    """Returns the attributes and buffers of all modules that are numbers, or consist of numbers. Metrics are left out,
    since they may be updated in parts.

    Args:
        without: modules that are left out, with all that they contain.
    """
    found: dict[str, LeftState] = {}
    objects, seen = ObjectsOf(module), set[int]()
    others = {id(each) for one in without for each in one.modules()}
    metrics = tuple(f"{name}." for name, each in module.named_modules() if isinstance(each, Metric))

    def record(name: str, value: Any, *, buffer: bool) -> None:
        todo = [(name, value)]
        while todo:
            name, value = todo.pop()
            if isinstance(value, (Tensor, int, float, list, tuple, dict, set, deque)):
                if not isinstance(value, (nn.Parameter, AbsentOutput)):
                    counts = buffer or isinstance(value, int)
                    found[name] = LeftState(counts, tuple(_numbers_in(value, frozenset())), _kind_of(value))
            elif isinstance(value, torch.Generator):
                state = value.get_state().numpy().tobytes()
                found[name] = LeftState(False, (), hashlib.blake2b(state, digest_size=8).hexdigest())
            elif id(value) not in seen and len(seen) < _MOST and (inside := objects.attributes(value)) is not None:
                seen.add(id(value))
                todo += [(f"{name}.{attribute}", each) for attribute, each in reversed(inside.items())]

    for prefix, each in module.named_modules():
        if f"{prefix}.".startswith(metrics) or id(each) in others:
            continue
        named = {name: value for name, value in vars(each).items() if name not in _OF_LIGHTNING and name != "log"}
        for name, value in (*buffers_in(each).items(), *named.items()):
            record(f"{prefix}.{name}".lstrip("."), value, buffer=name not in named)
    return found


def _numbers_in(value: Any, around: frozenset[int]) -> Iterator[float]:
    """Yields the numbers of a value.

    Args:
        around: ids of the containers that it is in; one of them is not entered again.
    """
    if isinstance(value, AbsentOutput):
        return
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.is_meta:
            wide = value.detach().double()
            yield from torch.stack([wide.sum(), wide.abs().sum()]).tolist()
        elif not value.is_complex() and not value.is_meta:
            yield float(value.sum())
    elif isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, (list, tuple, dict, deque)) and len(value) <= _MOST_COMPARED and id(value) not in around:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(each, around | {id(value)})


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        total = "" if value.is_floating_point() or value.is_complex() or value.is_meta else f" {int(value.sum())}"
        return f"{value.dtype} {tuple(value.shape)}{total}"
    if isinstance(value, (int, float)):
        return str(value) if isinstance(value, int) else ""
    return f"{len(value)}"


def same(one: LeftState, other: LeftState | None) -> bool:
    """Returns whether two states are equal but for rounding."""
    if other is None or one.kind != other.kind or len(one.numbers) != len(other.numbers):
        return False
    return all(
        abs(here - there) <= _OF_STATE * max(abs(here), abs(there))
        or here == there
        or (here != here and there != there)
        for here, there in zip(one.numbers, other.numbers, strict=True)
    )
