"""Which modules around the layers of a plan are proven in one piece, and which of them prove each other.

Knows names, shapes and attributes, computes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.rules import ColwiseParallel, Place, RowwiseParallel, Rule, VocabParallel

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


_OWN = "a function of its own:"
"""In what is told of a block that only itself proves."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedBlock:
    """What is proven in one piece.

    Attributes:
        plan: the rules inside, by names inside of it.
    """

    name: str
    module: nn.Module
    plan: Mapping[str, Rule]

    @property
    def kind(self) -> str:
        """Equal for blocks of which one proves the other."""
        index = next((int(part) for part in reversed(self.name.split(".")) if part.isdecimal()), -1)
        shapes = [(name, tuple(each.shape)) for name, each in self.module.named_parameters()]
        buffers = [(name, tuple(each.shape)) for name, each in self.module.named_buffers()]
        modules = [(name, type(each), _attributes(each, index)) for name, each in self.module.named_modules()]
        told = repr((modules, shapes, buffers, sorted(map(repr, self.plan.items()))))
        if _OWN in told:
            told += self.name
        return hashlib.blake2b(told.encode()).hexdigest()


OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of attributes that torch gives each module."""


def _attributes(module: nn.Module, index: int) -> list[tuple[str, str]]:
    """What a module's own attributes say of what it computes, such as flags and counts.

    Args:
        index: of its block among others, which many know; it is left out.
    """
    return sorted((name, _told(value, index)) for name, value in vars(module).items() if name not in OF_EVERY_MODULE)


_FLAGS = (bool, str, float, Enum, type(None), torch.dtype, FunctionType, BuiltinFunctionType)


def _told(value: Any, index: int) -> str:
    if type(value) is int and value == index:
        return "its number"
    if isinstance(value, str):  # it may be a name with the number in it
        return re.sub(rf"\b{index}\b", "its number", value)
    if value is None or isinstance(value, (bool, int, float, complex, Enum, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_told(each, index) for each in value)})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{_told(key, index)}: {_told(each, index)}' for key, each in value.items())})"
    if callable(value) and not isinstance(value, (nn.Module, torch.Tensor)):
        return _function(value, index)
    # Flags of a configuration; not its counts, of which one may be equal to the number of a block by chance.
    flags = vars(value) if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor)) else {}
    told = sorted((name, _told(each, index)) for name, each in flags.items() if isinstance(each, _FLAGS))
    return f"{type(value).__qualname__}{told}"


def _function(value: Any, index: int) -> str:
    """A function by its name, and by what is bound to it. One that no name leads to (a lambda, a function of a function, an
    object that is called) may be another in each block, and says so."""
    if isinstance(value, partial):
        return f"partial({_function(value.func, index)}, {_told(value.args, index)}, {_told(value.keywords, index)})"
    if isinstance(value, MethodType):
        return f"{_function(value.__func__, index)} of {_told(value.__self__, index)}"
    name = getattr(value, "__qualname__", "")
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    known = isinstance(value, BuiltinFunctionType) or (found is value and bool(name))
    return f"{value.__module__}.{name}" if known else f"{_OWN} {name or type(value).__qualname__}"


def blocks_of(root: nn.Module, places: Sequence[Place]) -> tuple[CheckedBlock, ...]:
    """The blocks in which layers that need others to be whole again lie: elements of a container, or what is around the rest.

    Raises:
        ConfigError: nothing but the whole model is around some, or a layer is in two of them.
    """
    modules = dict(root.named_modules())
    _refuse_layers_of_two(root, places)
    found: dict[str, dict[str, Rule]] = {}
    others: list[Place] = []
    for place in places:
        if not _alone(place.rule):
            around = _element(modules, place.name)
            if around is None:
                others.append(place)
            else:
                found.setdefault(around, {})[place.name.removeprefix(f"{around}.")] = place.rule
    if others:
        around = _around(modules, others)
        if not around:
            names = ", ".join(place.name for place in others[:3])
            raise ConfigError(
                f"tensor_parallel_plan names {names}, which nothing is around but the {type(root).__name__} itself, and a "
                f"plan is proven on a module that can be called by itself; put these layers into a module of their own, with "
                f"the forward that calls them"
            )
        inside = {place.name.removeprefix(f"{around}."): place.rule for place in others}
        found.setdefault(around, {}).update(inside)
    for place in places:  # what is whole again by itself is proven, too, where it is inside
        inner = next((name for name in found if place.name.startswith(f"{name}.")), None)
        if inner is not None:
            found[inner][place.name.removeprefix(f"{inner}.")] = place.rule
    return tuple(CheckedBlock(name, modules[name], plan) for name, plan in found.items())


def _refuse_layers_of_two(root: nn.Module, places: Sequence[Place]) -> None:
    """A layer is cut together with what is around it, and has one name in a plan, that of the first of two modules."""
    found = {id(place.module): place for place in places if place.parameter is None and not _alone(place.rule)}
    for name, module in root.named_modules(remove_duplicate=False):
        place = found.get(id(module))
        around = name.rpartition(".")[0]
        if place is not None and root.get_submodule(around) is not place.around:
            raise ConfigError(
                f"{name} is the module {place.name} once more, in another {type(root.get_submodule(around)).__name__}, and "
                f"tensor_parallel_plan cuts a layer together with what is around it, which of {around} it does not know; let "
                f"both have all of {place.name.rpartition('.')[0]} in common, or a layer each with one weight (`b.weight = "
                f"a.weight`), or leave out of the plan this layer and those that compute with its part"
            )


def _alone(rule: Rule) -> bool:
    """Whether what the rule leaves behind is whole, whatever is around it."""
    gathers = isinstance(rule, ColwiseParallel) and rule.gather
    return gathers or isinstance(rule, VocabParallel) or (isinstance(rule, RowwiseParallel) and rule.split)


def _element(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The outermost element of a container around something that can be called, or None."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        element = ".".join(parts[:end])
        # An element may be a container itself, such as a pair of attention and feed-forward.
        if isinstance(modules[".".join(parts[: end - 1])], _CONTAINERS) and not isinstance(
            modules[element], _NEVER_CALLED
        ):
            return element
    return None


def _around(modules: Mapping[str, nn.Module], places: Sequence[Place]) -> str:
    """The name of the innermost module around all of them that can be called."""
    paths = [place.name.split(".")[:-1] for place in places]
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    while isinstance(modules[".".join(common)], _NEVER_CALLED):
        common.pop()
    return ".".join(common)
