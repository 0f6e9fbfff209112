"""View operations that can be applied to each part of a divided tensor: reshape, slice, permute.

A view qualifies if it leaves the divided dimension as it is. Knows shapes and arguments of torch's functions, no values. The
divided dimension is called the vocabulary, as in logits.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A view that can be applied to a part and to the whole.

    Attributes:
        of: applies the view to a tensor.
        vocabulary: the divided dimension of the result; -1: its last.
    """

    of: Callable[[Tensor], Tensor]
    vocabulary: int


Shape = tuple[int, ...]


def view_of(function: Any, shape: Shape, vocabulary: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    """Returns the view that a call of a torch function makes; None if it cannot be made on parts.

    Args:
        function: the function of torch.
        shape: shape of the whole tensor.
        vocabulary: the divided dimension.
        args, kwargs: arguments after the tensor.
    """
    known = _KNOWN.get(function)
    return None if known is None else known(shape, vocabulary, *args, **kwargs)


def _reshaped(way: Callable[..., Tensor]) -> Callable[..., View | None]:
    def reshaped(shape: Shape, vocabulary: int, *sizes: Any, **kwargs: Any) -> View | None:
        wanted = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)
        if kwargs or not wanted or not all(type(each) is int for each in wanted) or vocabulary != len(shape) - 1:
            return None
        numel, known = math.prod(shape), math.prod(each for each in wanted if each >= 0)
        if wanted.count(-1) == 1 and known:
            wanted[wanted.index(-1)] = numel // known
        if wanted[-1] != shape[-1] or min(wanted) < 0 or math.prod(wanted) != numel:
            return None
        return View(lambda each: way(each, (*wanted[:-1], each.shape[-1])), -1)

    return reshaped


def _flattened(shape: Shape, vocabulary: int, start_dim: int = 0, end_dim: int = -1) -> View | None:
    last = len(shape) - 1
    start, end = start_dim % len(shape), end_dim % len(shape)
    if vocabulary != last or not start <= end < last:
        return None
    return View(lambda each: each.flatten(start, end), -1)


def _items(shape: Shape, vocabulary: int, index: Any) -> View | None:
    """Indexing and slicing of the dimensions before the vocabulary."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is ... or type(each) in (int, slice) or _is_index(each) for each in entries):
        return None
    left = len(shape) - sum(_dimensions(each) for each in entries)
    places = [at for at, each in enumerate(entries) if each is ...] or [len(entries)]
    if left < 0 or len(places) > 1:
        return None
    entries[places[0] : places[0] + 1] = [slice(None)] * left
    last = entries[-1]
    if vocabulary != len(shape) - 1 or type(last) is not slice or last != slice(None):
        return None
    found = tuple(entries)
    return View(lambda each: each[found], -1)


def _is_index(value: Any) -> bool:
    return type(value) is Tensor and value.dtype in (torch.int64, torch.bool)


def _dimensions(entry: Any) -> int:
    if entry is None or entry is ...:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype is torch.bool else 1


def _permuted(shape: Shape, vocabulary: int, *dims: Any) -> View | None:
    order = [each % len(shape) for each in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    return View(lambda each: each.permute(order), order.index(vocabulary))


def _transposed(shape: Shape, vocabulary: int, dim0: int, dim1: int) -> View | None:
    order = list(range(len(shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(shape, vocabulary, order)


def _same(way: Callable[[Tensor], Tensor]) -> Callable[..., View | None]:
    return lambda shape, vocabulary, **kwargs: None if kwargs else View(way, vocabulary)


_KNOWN: Mapping[Any, Callable[..., View | None]] = {
    Tensor.view: _reshaped(Tensor.view),
    **dict.fromkeys((Tensor.reshape, torch.reshape), _reshaped(Tensor.reshape)),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    Tensor.__getitem__: _items,
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((Tensor.transpose, torch.transpose), _transposed),
    Tensor.contiguous: _same(Tensor.contiguous),
    **dict.fromkeys((Tensor.detach, torch.detach), _same(Tensor.detach)),
}
