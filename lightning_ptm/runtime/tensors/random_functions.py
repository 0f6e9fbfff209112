"""torch's functions that draw random numbers, replaced for comparisons of two computations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class NoDropout(TorchFunctionMode):
    """Context in which torch's dropout functions drop nothing."""

    _DROPOUTS = (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


class NoRandomNumbers(NoDropout):
    """Context in which, in addition, torch's most frequent random functions return constants."""

    _UNIFORM = (torch.rand, torch.rand_like)
    _NORMAL = (torch.randn, torch.randn_like)
    _INTEGERS = (torch.randint, torch.randint_like, torch.Tensor.random_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._UNIFORM or func in self._NORMAL:
            kwargs.pop("generator", None)
            like = func in (torch.rand_like, torch.randn_like)
            zeros = (torch.zeros_like if like else torch.zeros)(*args, **kwargs)
            return zeros.add_(0.75) if func in self._UNIFORM else zeros
        if func in self._INTEGERS:
            bounds = [each for each in args if isinstance(each, int)]
            return func(*args, **kwargs).fill_(kwargs.get("low", kwargs.get("from", bounds[0] if bounds[1:] else 0)))
        if func is torch.bernoulli:
            return (args[0] > 0.25).to(args[0].dtype)
        if func is torch.Tensor.bernoulli_:
            return args[0].fill_(1)
        if func is torch.Tensor.uniform_:
            given = dict(zip(("from", "to"), args[1:3], strict=False)) | kwargs
            low, high = given.get("from", 0), given.get("to", 1)
            return args[0].fill_(low + 0.75 * (high - low))
        if func is torch.Tensor.normal_:
            return args[0].fill_(kwargs.get("mean", args[1] if len(args) > 1 else 0))
        return super().__torch_function__(func, types, args, kwargs)
