"""What a training step leaves in its module: attributes, buffers and containers, which checks undo and compare.

Checks call a training step more often than the Trainer does. Owns nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ptm.parallel.checked_blocks import OF_EVERY_MODULE
from lightning_ptm.torch_internals import buffers_in

_LOGS = ("log", "log_dict", "print")
_MOST = 10_000
"""Containers of more elements are not searched for others."""
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
    """Context of a step that logs nothing, and after which attributes, containers and buffers of modules are as before."""
    attributes = [
        (vars(each), {name: value for name, value in vars(each).items() if name not in OF_EVERY_MODULE})
        for each in module.modules()
    ]
    buffers = [(buffers_in(each), dict(buffers_in(each))) for each in module.modules()]
    containers: list[tuple[Any, Any]] = []
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    generators: list[tuple[torch.Generator, Tensor]] = []
    seen: set[int] = set()
    todo: list[Any] = [value for _, kept in (*attributes, *buffers) for value in kept.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_meta:
                tensors[id(value)] = value, value.detach().clone()
        elif isinstance(value, torch.Generator):
            generators.append((value, value.get_state()))
        elif isinstance(value, (list, dict, set, deque)) and id(value) not in seen:
            seen.add(id(value))
            containers.append((value, value.copy()))
            if len(value) <= _MOST:
                todo += value.values() if isinstance(value, dict) else value
    for name in _LOGS:
        if hasattr(module, name):
            vars(module)[name] = _nothing
    try:
        yield
    finally:
        for current, kept in attributes:
            for name in current.keys() - kept.keys() - OF_EVERY_MODULE:
                del current[name]
            current.update(kept)
        for current, kept in (*buffers, *containers):
            current.clear()
            (current.extend if isinstance(current, (list, deque)) else current.update)(kept)
        for generator, state in generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, before in tensors.values():
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


@dataclasses.dataclass(frozen=True, slots=True)
class LeftState:
    """An attribute or a buffer of a module, in numbers.

    Attributes:
        counts: whether later steps may depend on it: a buffer, or an integer.
        numbers: of a number, itself; of a tensor, its sum and that of its absolute values; of a container, those of its
            elements.
        kind: class, shape or length.
    """

    counts: bool
    numbers: tuple[float, ...]
    kind: str


def left_in(module: nn.Module) -> dict[str, LeftState]:
def left_in(module: nn.Module) -> dict[str, LeftState]:
    """Returns the attributes and buffers of all modules that are numbers, or consist of numbers. Metrics are left out,
    since they may be updated in parts."""
    found: dict[str, LeftState] = {}
    metrics = tuple(f"{name}." for name, each in module.named_modules() if isinstance(each, Metric))
    for prefix, each in module.named_modules():
        if f"{prefix}.".startswith(metrics):
            continue
        named = {name: value for name, value in vars(each).items() if name not in _OF_LIGHTNING and name != "log"}
        for name, value in (*buffers_in(each).items(), *named.items()):
            if isinstance(value, (Tensor, int, float, list, dict, set, deque)) and not isinstance(value, nn.Parameter):
                counts = name not in named or isinstance(value, int)
                numbers = tuple(_numbers_in(value))
                found[f"{prefix}.{name}".lstrip(".")] = LeftState(counts, numbers, _kind_of(value))
    return found


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.is_meta:
            wide = value.detach().double()
            yield from torch.stack([wide.sum(), wide.abs().sum()]).tolist()
        elif not value.is_complex() and not value.is_meta:
            yield float(value.sum())
    elif isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, (list, dict, deque)) and len(value) <= _MOST_COMPARED:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(each)


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "" if isinstance(value, (int, float)) else f"{len(value)}"


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
