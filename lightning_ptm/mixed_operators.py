"""Operators that refuse tensors of different dtypes, under mixed precision: they compute in the widest of them.

With other strategies parameters are fp32 under mixed precision, so a norm of fp32 features (`x + layer(x)` with fp32 `x`)
computes in fp32. Here parameters that compute are 16-bit copies, and torch's CPU kernels of these operators take no fp32
input beside them. Autocast is where torch settles such cases, by lists of operators; these are on none of them.

I1: where all dtypes are equal, and without autocast, nothing is different: what is registered here only answers where torch
would raise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

_PROMOTED = {
    "CPU": ("layer_norm", "group_norm", "instance_norm", "bilinear", "mv", "addmv", "dot", "vdot", "lerp.Tensor"),
    "CUDA": ("lerp.Tensor",),  # the others are on lists of torch's there
}


@cache
def promote_operators() -> torch.library.Library:
    """Has an effect under autocast alone; once in a process."""
    library = torch.library.Library("aten", "IMPL")
    for device, names in _PROMOTED.items():
        key = f"Autocast{device}"
        for name in names:
            call = _promoting(_overload(name), getattr(torch._C.DispatchKey, key))
            library.impl(name, call, key, with_keyset=True)
    return library


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _promoting(operator: Any, key: Any) -> Callable[..., Any]:
    behind = torch._C._dispatch_keyset_full_after(key)

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        dtypes = {each.dtype for each in given if isinstance(each, Tensor) and each.is_floating_point()}
        if len(dtypes) > 1:
            widest = reduce(torch.promote_types, dtypes)
            args = tuple(_to(each, widest) for each in args)
            kwargs = {name: _to(each, widest) for name, each in kwargs.items()}
        # As if nobody stood at this key: what the operator is made of meets autocast as ever.
        return operator.redispatch(keys & behind, *args, **kwargs)

    return call


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


__all__ = ["promote_operators"]
