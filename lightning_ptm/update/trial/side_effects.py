"""Detection of what an optimizer's step uses outside of its object: parameters that it does not get from its groups,
and variables of its class or module.

Pages are updated by clones of the optimizer (update/clone.py), once per page. So a class that reaches parameters through
something else, or keeps counts on the class or in its module, cannot be updated in pages.

I1: data that code of the class's package can write by name is found: class attributes, module variables, variables that
    functions close over. What tables of more than 4096 items and C extensions hold is not.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import deque
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.update.clone import (
    LIBRARIES,
    attributes_of,
    copy_plain,
    is_container,
    is_large,
    parts_of,
    same_plain,
    walk,
)

_MISSING = object()


def reached_parameters(optimizer: Optimizer) -> tuple[str, Any] | None:
    """Finds a way from the optimizer to parameters other than its groups: an attribute or group value that holds
    another optimizer, a module, a parameter, or a function that closes over one of these or over the optimizer itself.
    Returns where, and what."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def reaches(value: Any) -> bool:
        return (
            id(value) in parameters
            or (type(value) is int and value in parameters)
            or isinstance(value, Optimizer | torch.nn.Module)
        )

    places = {f"attribute {name!r}": value for name, value in attributes_of(optimizer).items()}
    for group in optimizer.param_groups:
        places.update({f"group value {key!r}": value for key, value in group.items() if key != "params"})
    for place, value in places.items():
        for each in walk(value, tables=True):
            # A clone has bound methods of its own; a function that holds the optimizer would change the user's.
            if (reaches(each) and each is not optimizer) or any(map(reaches, map(_content, _cells(each)))):
                return place, each
    return None


# -- shared data ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class DataPlace:
    """A name under which code keeps data, of a module, a class or a closure's cell."""

    label: str
    owner: Any
    name: str

    def read(self) -> Any:
        if isinstance(self.owner, types.CellType):
            return _content(self.owner)
        return vars(self.owner).get(self.name, _MISSING)

    def write(self, value: Any) -> None:
        setattr(self.owner, self.name, value) if value is not _MISSING else delattr(self.owner, self.name)


class SharedData:
    """The plain data that objects of an optimizer's class share, as it is when this is made."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._values = [(place, place.read()) for place in _places(optimizer)]
        self._copies = copy_plain({str(index): value for index, (_, value) in enumerate(self._values)})
        held = [each for each in walk(tuple(value for _, value in self._values)) if not is_large(each)]
        self._containers = [(each, parts_of(each)) for each in held if is_container(each)]
        self._tensors = [(each, each.detach().clone()) for each in held if type(each) is torch.Tensor]

    def changed(self) -> set[str]:
        """Labels of the places that have other data now."""
        pairs = zip(self._values, self._copies.values(), strict=True)
        return {place.label for (place, _), before in pairs if not same_plain(place.read(), before)}

    @torch.no_grad()
    def restore(self) -> None:
        """Put the data back, into the objects that held it."""
        for place, value in self._values:
            if place.read() is not value:
                place.write(value)
        for container, parts in self._containers:
            if isinstance(container, dict):
                half = len(parts) // 2
                container.clear()
                container.update(zip(parts[:half], parts[half:], strict=True))
            elif isinstance(container, list | deque):
                container.clear()
                container.extend(parts)
            elif isinstance(container, set):
                container.clear()
                container.update(parts)
        for tensor, value in self._tensors:
            tensor.copy_(value)


def _places(optimizer: Optimizer) -> list[DataPlace]:
    """Names by which code of an optimizer's class writes data that all objects of the class share (I1)."""
    classes = [each for each in type(optimizer).__mro__ if _package(each.__module__) not in LIBRARIES]
    packages = {_package(each.__module__) for each in classes}
    places: list[DataPlace] = []
    names: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [value for each in classes for value in vars(each).values()]
    todo += walk(tuple(attributes_of(optimizer).values()))
    while todo:
        value = todo.pop()
        if isinstance(value, property):
            todo += (value.fget, value.fset)
        value = getattr(value, "__func__", value)  # of static, class and bound methods
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        for name, cell in zip(value.__code__.co_freevars, _cells(value), strict=True):
            places.append(DataPlace(f"{name} (around {value.__qualname__})", cell, "cell_contents"))
            todo.append(_content(cell))
        module = sys.modules.get(value.__globals__.get("__name__", ""))
        if module is None or _package(module.__name__) not in packages:
            continue  # a decorator of torch's, for one, around a function of the class
        used = _names_in(value.__code__)
        places += [DataPlace(f"{module.__name__}.{name}", module, name) for name in sorted(used)]
        todo += [vars(module).get(name) for name in used]
        names |= used
    for each in classes:
        data = {name for name in {*vars(each), *names} if not name.startswith("__")}
        places += [DataPlace(f"{each.__qualname__}.{name}", each, name) for name in sorted(data)]
    return places


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function and those defined in it use."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _cells(value: Any) -> tuple[types.CellType, ...]:
    return (isinstance(value, types.FunctionType) and value.__closure__) or ()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _MISSING
