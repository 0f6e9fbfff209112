"""Search and copy of tensors in nested arguments and results of a module: containers, data classes and objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any, around: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yields the tensors in nested mappings, sequences and data classes, in order.

    Args:
        around: ids of the enclosing objects, which are not entered again.
    """
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in around:
        for each in _elements(value):
            yield from tensors_in(each, around | {id(value)})


def results_in(value: Any, around: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yields the floating-point tensors in nested results, in order, and those with a graph in attributes of other objects.

    Args:
        around: as in `tensors_in`.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    if id(value) in around:
        return
    elements = _elements(value)
    for each in elements:
        yield from results_in(each, around | {id(value)})
    if not elements and hasattr(value, "__dict__") and not _keeps_what_was_read(value):
        yield from (each for each in tensors_in(vars(value)) if each.is_floating_point() and each.grad_fn is not None)


def copied(value: Any, tracked: Collection[int], dtype: torch.dtype, known: dict[int, Any] | None = None) -> Any:
    """Returns a deep copy of arguments for another call.

    Args:
        tracked: ids of tensors whose copies are leaves that require a gradient.
        dtype: of the copies of floating-point tensors.
        known: by id, copies of the enclosing data classes.
    """
    known = {} if known is None else known
    if isinstance(value, Tensor):
        wanted = dtype if value.is_floating_point() else value.dtype
        return value.detach().to(wanted, copy=True).requires_grad_(id(value) in tracked)
    if isinstance(value, dict):
        return {key: copied(each, tracked, dtype, known) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(each, tracked, dtype, known) for each in value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(copied(each, tracked, dtype, known) for each in value)
    if _keeps_what_was_read(value):
        return None  # a cache is not needed for the check
    if id(value) in known:
        return known[id(value)]
    if _is_data(value) and any(True for _ in tensors_in(value)):
        known[id(value)] = made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, copied(getattr(value, field.name, None), tracked, dtype, known))
        return made
    return copy.deepcopy(value)


def structure_of(value: Any, around: frozenset[int] = frozenset()) -> str:
    """Describes arguments without their numbers: flags, names, and kinds of tensors. Equal on ranks that call alike.

    Args:
        around: as in `tensors_in`.
    """
    if isinstance(value, Tensor):
        return f"{'floating' if value.is_floating_point() else 'other'} tensor of {value.dim()}"
    if value is None or isinstance(value, (bool, str, Enum, torch.dtype)):
        return repr(value)
    if _keeps_what_was_read(value):
        return "None"  # as `copied`
    elements = [] if id(value) in around else _elements(value)
    names = [str(key) for key in value] if isinstance(value, Mapping) and elements else []
    inside = [*names, *(structure_of(each, around | {id(value)}) for each in elements)]
    return f"{type(value).__qualname__}({', '.join(inside)})"


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
    """Whether a value is one of Transformers' caches of keys and values, which ranks have for their own heads."""
    return type(value).__name__.endswith("Cache")
