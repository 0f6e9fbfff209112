"""Parameters that are cut, read by code that is not their layer's: a class that each of them has while a module is cut.

In a step such a read finds this rank's part, where the user means the whole: it is refused. Outside of steps a part is what a
run's module has, and may be read (`gathered`, `state_dict()`, a callback's norms). Knows tensors and the group, never pages.

I1: it is the same object, of a subclass of its own class. I2: a layer's own forward reads it as any parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter, is_about_values


class CutParameter:
    """Base of the classes of parameters that are cut; see `watch`."""

    is_whole: type[nn.Parameter]
    """The class that the parameter has when it is whole."""


def watch(parameters: Iterable[tuple[str, nn.Parameter]], group: TensorGroup) -> None:
    """From now on these parameters, by name, refuse to be read in a step by other code than their layers'."""
    known = {id(parameter): name for name, parameter in parameters}
    classes: dict[type[nn.Parameter], type[nn.Parameter]] = {}
    for _, parameter in parameters:
        kind = type(parameter)
        if not isinstance(parameter, GuardedParameter | CutParameter):  # closed ones are watched more closely already
            parameter.__class__ = classes.setdefault(kind, _part_class(kind, known, group))


def forget(parameter: nn.Parameter) -> None:
    """A parameter is whole again, and of its own class."""
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
        f"{name} was read in a step by code that is not its layer's, and tensor_parallel_size has cut it, so that code would "
        f"compute with this rank's part alone; call the layer, or leave it out of tensor_parallel_plan: it is then whole on "
        f"every rank"
    )
