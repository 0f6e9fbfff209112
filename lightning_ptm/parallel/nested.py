"""Tensors in the arguments and results of a block, wherever they are in these."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Each of mappings, sequences and data classes, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for each in _elements(value):
            yield from tensors_in(each)


def results_in(value: Any) -> Iterator[Tensor]:
    """Each that is a floating one, in order; of other objects, those in their attributes that have a gradient."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    elements = _elements(value)
    for each in elements:
        yield from results_in(each)
    if not elements and hasattr(value, "__dict__") and not _keeps_what_was_read(value):
        yield from (each for each in tensors_in(vars(value)) if each.is_floating_point() and each.grad_fn is not None)


def copied(value: Any, tracked: Collection[int]) -> Any:
    """The same arguments for another call: numbers in fp32, everything else a copy.

    Args:
        tracked: ids of tensors that become leaves with a gradient.
    """
    if isinstance(value, Tensor):
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return value.detach().to(dtype, copy=True).requires_grad_(id(value) in tracked)
    if isinstance(value, dict):
        return {key: copied(each, tracked) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(each, tracked) for each in value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(copied(each, tracked) for each in value)
    if _keeps_what_was_read(value):
        return None  # nothing that a block needs
    if _is_data(value):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, copied(getattr(value, field.name, None), tracked))
        return made
    return copy.deepcopy(value)


def told(value: Any) -> str:
    """What arguments say but for numbers: flags, names, and which tensors there are. Equal on ranks that call alike."""
    if isinstance(value, Tensor):
        return f"{'floating' if value.is_floating_point() else 'other'} tensor of {value.dim()}"
    if value is None or isinstance(value, (bool, str, Enum, torch.dtype)):
        return repr(value)
    if _keeps_what_was_read(value):
        return "None"  # as `copied`
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {told(each)}' for key, each in value.items())}}}"
    return f"{type(value).__qualname__}({', '.join(map(told, _elements(value)))})"


def _elements(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if _is_data(value) and not _keeps_what_was_read(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return []


def _is_data(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping))


def _keeps_what_was_read(value: Any) -> bool:
    """Whether it is one of Transformers' objects for keys and values, which ranks have for their own heads."""
    return type(value).__name__.endswith("Cache")


__all__ = ["copied", "results_in", "tensors_in", "told"]
