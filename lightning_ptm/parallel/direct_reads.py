"""Guard against reads of cut parameters by code other than their layer's.

In a step, such a read would get this rank's part where the user expects the whole parameter; it raises a UsageError. Outside
of steps the part may be read (`gathered`, `state_dict()`, a callback's norms). Knows tensors and the group, never pages.

I1: a guarded parameter is the same object, its class a subclass of its former class.
I2: a layer's own forward reads the parameter as any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter, is_about_values


class CutParameter:
    """Base of the classes of cut parameters; see `watch`."""

    is_whole: type[nn.Parameter]
    """Class of the parameter when it is whole."""


def watch(parameters: Iterable[tuple[str, nn.Parameter]], group: TensorGroup) -> None:
    """Makes reads of these named parameters in a step, by code other than their layers', raise a UsageError."""
    known = {id(parameter): name for name, parameter in parameters}
    classes: dict[type[nn.Parameter], type[nn.Parameter]] = {}
    for _, parameter in parameters:
        kind = type(parameter)
        if not isinstance(parameter, GuardedParameter | CutParameter):  # GuardedParameter refuses more reads already
            parameter.__class__ = classes.setdefault(kind, _part_class(kind, known, group))


def forget(parameter: nn.Parameter) -> None:
    """Gives a parameter that is whole again its former class."""
    kind: type = type(parameter)
    if issubclass(kind, GuardedParameter):
        if issubclass(kind.opens_to, CutParameter):
            kind.opens_to = kind.opens_to.is_whole
    elif issubclass(kind, CutParameter):
        parameter.__class__ = kind.is_whole


def _part_class(kind: type[nn.Parameter], known: dict[int, str], group: TensorGroup) -> type[nn.Parameter]:
    def torch_function(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if group.in_step and not group.layer and is_about_values(function):
            raise _refusal((*args, *kwargs.values()), known)
        with torch.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    members = {
        "is_whole": kind,
        "__torch_function__": classmethod(torch_function),
        "__doc__": "A parameter of which this rank has a part.",
    }
    return type(kind.__name__, (kind, CutParameter), members)


def _refusal(given: tuple[Any, ...], known: dict[int, str]) -> UsageError:
    inside = (each for item in given for each in (item if isinstance(item, (list, tuple)) else (item,)))
    name = next((known[id(each)] for each in inside if id(each) in known), "a parameter")
    return UsageError(
        f"{name} was read in a step by code other than its layer's, and tensor_parallel_size has cut it, so that code would "
        f"compute with this rank's part alone; call the layer, or leave it out of tensor_parallel's plan: it is then whole "
        f"on every rank"
    )
