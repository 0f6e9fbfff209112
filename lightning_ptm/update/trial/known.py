"""States that torch's own optimizers keep; these classes need no trial.

Knows their classes and settings, and runs nothing: whatever counts or replaces their `step` sees the steps of training alone.
`tests/update/test_known_optimizers.py` compares each entry with a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from lightning_ptm.torch_internals import devices_of_captured_steps
from lightning_ptm.update.trial.traits import GroupTraits, Initial, SlotTraits

_Values = Mapping[str, Any]


def _adam(values: _Values) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if values["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _sgd(values: _Values) -> tuple[str, ...]:
    return ("momentum_buffer",) if values["momentum"] else ()


def _rmsprop(values: _Values) -> tuple[str, ...]:
    found = ["square_avg"]
    if values["momentum"] > 0:
        found.append("momentum_buffer")
    if values["centered"]:
        found.append("grad_avg")
    return tuple(found)


def _always(*names: str) -> Callable[[_Values], tuple[str, ...]]:
    return lambda values: names


_SLOTS: Mapping[type[Optimizer], Callable[[_Values], tuple[str, ...]]] = {
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.SGD: _sgd,
    optim.RMSprop: _rmsprop,
    optim.Adagrad: _always("sum"),
    optim.Adadelta: _always("square_avg", "acc_delta"),
    optim.Adamax: _always("exp_avg", "exp_inf"),
    optim.NAdam: _always("exp_avg", "exp_avg_sq"),
    optim.RAdam: _always("exp_avg", "exp_avg_sq"),
    optim.ASGD: _always("ax"),
    optim.Rprop: _always("prev", "step_size"),
}
_SCALARS: Mapping[type[Optimizer], tuple[str, ...]] = {
    optim.SGD: (),
    optim.NAdam: ("step", "mu_product"),
    optim.ASGD: ("step", "eta", "mu"),
}


def is_known(optimizer: Optimizer, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Whether the optimizer is of one of torch's own element-wise classes, whose kernels are right for the dtype and
    exist on the device. torch 2.13's fused SGD stores wrong 16-bit momentum, so a trial decides about kernels of 16
    bit.
    """
    graphs = any(group.get("capturable") for group in optimizer.param_groups)
    if graphs and device is not None and device.type not in devices_of_captured_steps():
        return False
    return type(optimizer) in _SLOTS and dtype.itemsize >= 4


def has_wrong_kernel(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Whether torch's kernel for the dtype computes something else than its other kernels do (see `is_known`)."""
    fused = (group for group in optimizer.param_groups if group.get("fused") and group.get("momentum"))
    return type(optimizer) is optim.SGD and dtype.itemsize < 4 and any(fused)


def known_group(optimizer: Optimizer, values: _Values, dtype: torch.dtype, *, may_fuse: bool) -> GroupTraits:
    """Returns the traits of one of torch's own classes for a parameter of a group with these hyper-parameters."""
    cls = type(optimizer)
    slots = tuple(SlotTraits(name, dtype) for name in _SLOTS[cls](values))
    scalars = _SCALARS.get(cls, ("step",))
    beside = may_fuse or values.get("fused") or values.get("capturable") or cls is optim.ASGD
    return GroupTraits(slots, scalars, may_fuse, scalars_beside=frozenset(scalars if beside else ()))


def known_initial(optimizer: Optimizer) -> Initial:
    """Returns how one of torch's own classes makes a parameter's first state."""
    return Initial.CONSTRUCTED if isinstance(optimizer, optim.Adagrad) else Initial.LAZY
