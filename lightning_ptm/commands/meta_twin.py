"""A twin of a module on the meta device: the same structure, without the values of tensors, and without metrics' arithmetic.

I1: the module stays as it is: nothing of it is changed, and no tensor of it is copied. What its modules keep besides
parameters, buffers and modules is copied for the twin, except data sets, arrays, and objects that cannot be copied, which
both share.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_ptm.errors import ConfigError
from lightning_ptm.torch_internals import uncompiled

_SHARED = (Dataset, DataLoader, LightningDataModule)
"""Classes of attributes that a forward only reads, and that may be large."""


def meta_twin(module: nn.Module) -> nn.Module:
    """Returns a twin of a module, which may be on any device.

    Raises:
        ConfigError: the module has parameters without a shape, or is of a kind that cannot be rebuilt (TorchScript).
    """
    module = uncompiled(module)
    memo: dict[int, Any] = {}
    modules = [each for each in module.modules() if uncompiled(each) is each]
    for each in modules:
        if isinstance(each, torch.jit.ScriptModule):
            raise ConfigError(
                f"{type(module).__name__} contains a module of TorchScript ({type(each).__name__}), which cannot be planned; "
                f"give the module that it was made from"
            )
        memo[id(each)] = type(each).__new__(type(each))
    for each in module.modules():
        memo[id(each)] = memo[id(uncompiled(each))]
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = _empty_parameter(name, parameter)
    with _WithoutValues():
        for each in modules:
            memo[id(each)].__setstate__({name: _copied(value, memo) for name, value in _state_of(each).items()})
    twin: nn.Module = memo[id(module)]
    for metric in twin.modules():
        if isinstance(metric, Metric):  # it reads values, and is no part of training
            vars(metric).update(update=_nothing, forward=_unknown, compute=_unknown)
    if isinstance(twin, LightningModule):
        twin.trainer = None
        twin.to("meta")  # its `device`
    return twin


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _unknown(*_: Any, **__: Any) -> Tensor:
    return torch.zeros((), device="meta")


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, without those that its class leaves out of copies (metrics: wrapped methods)."""
    try:
        return dict(module.__getstate__())  # type: ignore[no-untyped-call, unused-ignore]
    except RuntimeError:  # parametrized modules refuse to be pickled
        return dict(vars(module))


def _empty_parameter(name: str, parameter: nn.Parameter) -> nn.Parameter:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"{name} has no shape before the first forward (a lazy module), so nothing can be planned; call the module once, "
            f"or give its size"
        )
    made = nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))  # such as a mark for configure_optimizers
    return made


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


class _WithoutValues(TorchFunctionMode):
    """Mode in which copies of tensors are on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            made = _empty(args[0]).requires_grad_(args[0].requires_grad)
            args[1][id(args[0])] = made
            return made
        if func is Tensor.clone:  # called by Parameter.__deepcopy__
            return _empty(args[0])
        return func(*args, **(kwargs or {}))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, (*_SHARED, Trainer)) or type(value).__module__.partition(".")[0] == "numpy":
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a class of the user's may raise anything
        return value
