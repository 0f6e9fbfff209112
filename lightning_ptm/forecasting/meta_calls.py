"""Torch mode that reports operations and bytes of each call on the meta device, and caches results of equal calls.

The layers of a model make the same calls, and torch computes shapes of results on the meta device in Python: for some
functions that takes milliseconds.

I1: reports and results are the same as without the cache. Cached are only calls on the meta device that return new tensors
    whose shapes and dtypes follow from shapes and dtypes of their tensor arguments and from their other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_ptm.torch_internals import (
    SOFTMAX_NAMES,
    VIEW_NAMES,
    TorchDispatchMode,
    packet_of,
    schema_of,
    storage_id,
    tree_leaves,
)

_CURVED = ("gelu", "silu", "tanh", "sigmoid", "exp", "erf", *SOFTMAX_NAMES, "elu", "mish", "softplus")
"""Names of calls that take an exponential function of each element."""
_NO_WORK = ("empty", "empty_like", "new_empty", "detach", *VIEW_NAMES)
_NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Call:
    """Work of one call.

    Attributes:
        flops: operations by torch's formula; 0 for functions without one.
        moved_bytes: bytes read and written.
        curved_numel: elements of exponential functions.
    """

    flops: int = 0
    moved_bytes: int = 0
    curved_numel: int = 0


@dataclass(frozen=True, slots=True)
class _Result:
    """Shape, strides and dtype of a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _NotComparedError(Exception):
    """Raised for an argument whose equality does not imply equal results."""


class MetaCalls(TorchDispatchMode):
    """Mode in which `tell` gets the `Call` of each operation, in order."""

    def __init__(self, tell: Callable[[Call], None]) -> None:
        super().__init__()
        self._tell = tell
        self._known: dict[Hashable, tuple[Call, list[_Result], type | None]] = {}
        """By function and arguments: the work, the results, and the type of their container (None: a single tensor)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = _key(func, args, kwargs)
        if key in self._known:
            call, results, container = self._known[key]
            self._tell(call)
            made = [result.make() for result in results]
            return made[0] if container is None else container(made)
        out = func(*args, **kwargs)
        call = _call(func, args, kwargs, out)
        self._tell(call)
        if key is not None and (results := _results(out, args, kwargs)):
            self._known[key] = call, results, None if isinstance(out, Tensor) else type(out)
        return out


_NOTHING = Call()


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties of a function: what its operations and bytes depend on.

    Attributes:
        formula: torch's formula for its operations, if there is one.
        moves_nothing: whether it reads and writes no elements.
        is_curved: whether it takes an exponential function of each element.
        is_cached: whether results of equal calls are equal, and new.
    """

    formula: Callable[..., Any] | None
    moves_nothing: bool
    is_curved: bool
    is_cached: bool


@cache
def _kind_of(func: Any) -> _Kind:
    name, schema = packet_of(func).__name__, schema_of(func)
    returns = schema.returns
    is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return _Kind(
        formula=flop_registry.get(packet_of(func)),
        moves_nothing=is_view or name in _NO_WORK,
        is_curved=name.rstrip("_") in _CURVED,
        is_cached=not schema.is_mutable and all(each.alias_info is None for each in returns),
    )


def _call(func: Any, args: Any, kwargs: Any, out: Any) -> Call:
    kind = _kind_of(func)
    flops = 0 if kind.formula is None else int(kind.formula(*args, **kwargs, out_val=out))
    if kind.moves_nothing:
        return Call(flops) if flops else _NOTHING
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    size = sum(leaf.numel() * leaf.itemsize for leaf in (*results, *inputs))
    return Call(flops, size, results[0].numel() if results and kind.is_curved else 0)


def _key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
    """Cache key, equal for calls with equal results; None if the call cannot be cached."""
    if not _kind_of(func).is_cached:
        return None
    try:
        return func, tuple(map(_compared, args)), tuple((name, _compared(value)) for name, value in kwargs.items())
    except _NotComparedError:
        return None


def _compared(value: Any) -> Hashable:
    kind = type(value)
    if kind in _TENSORS and value.is_meta:
        return kind, tuple(value.shape), value.stride(), value.dtype
    if kind in (list, tuple):
        return tuple(map(_compared, value))
    if kind in _NUMBERS:
        return kind, value  # with the type, as 1, 1.0 and True are equal
    raise _NotComparedError


def _results(out: Any, args: Any, kwargs: Any) -> list[_Result]:
    """The results of a call; empty if they are not new tensors, or have more memory than their elements need."""
    made = [out] if isinstance(out, Tensor) else list(out) if type(out) in (list, tuple) else []
    if not all(type(each) is Tensor and each.is_meta for each in made):
        return []
    given = {storage_id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    own = [each.untyped_storage() for each in made]
    results = [_Result(tuple(each.shape), each.stride(), each.dtype) for each in made]
    alike = (
        result.make().untyped_storage().nbytes() == held.nbytes() for result, held in zip(results, own, strict=True)
    )
    apart = len({storage_id(held) for held in own} - given) == len(own)
    return results if apart and all(alike) else []
