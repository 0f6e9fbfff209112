"""Autocast rules for operators that refuse tensors of different dtypes: they compute in the widest one.

With other strategies parameters are fp32 under mixed precision, so a norm of fp32 features (`x + layer(x)` with fp32 `x`)
computes in fp32. Here compute parameters are 16-bit copies, and torch's CPU kernels of these operators do not accept them
together with an fp32 input. Autocast handles such cases by lists of operators, and these operators are on none of them.

I1: where all dtypes are equal, and without autocast, nothing changes: the rules only apply where torch would raise, or
would return NaN in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.torch_internals import dispatch_key_of_device, keys_behind

_PROMOTED = {
    "cpu": (
        *(
            "layer_norm",
            "group_norm",
            "instance_norm",
            "bilinear",
            "mv",
            "addmv",
            "addr",
            "dot",
            "vdot",
            "inner",
            "tensordot",
        ),
        *("linalg_cross", "lerp.Tensor", "lerp.Scalar", "index_put", "index_add", "index_reduce", "put", "scatter.src"),
        *("scatter_add", "scatter_reduce.two", "masked_scatter"),
    ),
}
"""Operators promoted to the widest dtype, by device type."""

_PROMOTED_ELSEWHERE = ("lerp.Tensor", "lerp.Scalar")
"""Operators promoted on all other device types, where torch's own lists have most of them."""

_INTO_ITS_OWN = ("index_put_",)
"""Operators that write to a tensor, which keeps its dtype: narrower values are cast (`x[mask] = parameter`)."""

_NOT_IN_HALVES = ("linalg_matrix_exp",)
"""Operators that return NaN in 16 bits; plain mixed precision has an fp32 parameter there."""


@cache
def promote_operators(device_type: str) -> torch.library.Library:
    """Registers the rules, once per process; they take effect under autocast of this device type only."""
    library = torch.library.Library("aten", "IMPL")
    names = _PROMOTED.get(device_type, _PROMOTED_ELSEWHERE)
    key = f"Autocast{dispatch_key_of_device(device_type)}"
    for dtype_of, those in ((_widest, names), (_of_the_first, _INTO_ITS_OWN), (_fp32_at_least, _NOT_IN_HALVES)):
        for name in those:
            call = _promoting(_overload(name), dtype_of, getattr(torch.DispatchKey, key))
            library.impl(name, call, key, with_keyset=True)
    return library


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)


def _of_the_first(dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    return dtypes[0] if _widest(dtypes) is dtypes[0] else None


def _fp32_at_least(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return _widest((*dtypes, torch.float32))


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _promoting(
    operator: Any, dtype_of: Callable[[Sequence[torch.dtype]], torch.dtype | None], key: Any
) -> Callable[..., Any]:
    """A rule that casts an operator's tensors to `dtype_of` their dtypes, in order; None leaves them as they are."""
    behind = keys_behind(key)

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        dtypes = [each.dtype for each in given if isinstance(each, Tensor) and each.is_floating_point()]
        dtype = dtype_of(dtypes) if dtypes else None
        if dtype is not None:
            args = tuple(_to(each, dtype) for each in args)
            kwargs = {name: _to(each, dtype) for name, each in kwargs.items()}
        # Skips this key only: the operators that this one decomposes into are subject to autocast as usual.
        return operator.redispatch(keys & behind, *args, **kwargs)

    return call


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
