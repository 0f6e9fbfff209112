"""Choice of the blocks that a tensor-parallel plan is checked on: one of each kind, as identical blocks need one check.

A check of one block holds for all blocks of its kind. Knows names, shapes and attributes, computes nothing.
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
from lightning_ptm.runtime.tensors.user_objects import OF_EVERY_MODULE

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


_OWN = "a function of its own:"
"""Marker in the description of a block with a function that may differ between blocks: it is a kind of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedBlock:
    """A module that is checked as a whole.

    Attributes:
        plan: the rules of the layers inside, by their names relative to the block.
    """

    name: str
    module: nn.Module
    plan: Mapping[str, Rule]

    @property
    def kind(self) -> str:
        """Digest of the block's description; a check of one block holds for all blocks with the same digest."""
        index = next((int(part) for part in reversed(self.name.split(".")) if part.isdecimal()), -1)
        shapes = [(name, tuple(each.shape)) for name, each in self.module.named_parameters()]
        buffers = [(name, tuple(each.shape)) for name, each in self.module.named_buffers()]
        modules = [(name, type(each), _attributes(each, index)) for name, each in self.module.named_modules()]
        text = repr((modules, shapes, buffers, sorted(map(repr, self.plan.items()))))
        if _OWN in text:
            text += self.name
        return hashlib.blake2b(text.encode()).hexdigest()


def _attributes(module: nn.Module, index: int) -> list[tuple[str, str]]:
    """Describes the attributes by which a module's computation may differ from another's, such as flags and counts.

    Args:
        index: index of the module's block, which many modules keep as an attribute; it is left out.
    """
    return sorted(
        (name, _description(value, index)) for name, value in vars(module).items() if name not in OF_EVERY_MODULE
    )


_FLAGS = (bool, str, float, Enum, type(None), torch.dtype, FunctionType, BuiltinFunctionType)


def _description(value: Any, index: int) -> str:
    if type(value) is int and value == index:
        return "its number"
    if isinstance(value, str):  # it may be a name that contains the block's index
        return re.sub(rf"\b{index}\b", "its number", value)
    if value is None or isinstance(value, (bool, int, float, complex, Enum, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_description(each, index) for each in value)})"
    if isinstance(value, Mapping):
        return (
            f"({', '.join(f'{_description(key, index)}: {_description(each, index)}' for key, each in value.items())})"
        )
    if callable(value) and not isinstance(value, (nn.Module, torch.Tensor)):
        return _function(value, index)
    # The flags of a configuration; not its counts, as one may equal the block's index by chance.
    flags = vars(value) if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor)) else {}
    text = sorted((name, _description(each, index)) for name, each in flags.items() if isinstance(each, _FLAGS))
    return f"{type(value).__qualname__}{text}"


def _function(value: Any, index: int) -> str:
    """Describes a function by its name and its bound arguments.

    A function that cannot be found by its name (a lambda, a closure, a callable object) may differ between blocks: its
    description contains `_OWN`.
    """
    if isinstance(value, partial):
        bound = f"{_description(value.args, index)}, {_description(value.keywords, index)}"
        return f"partial({_function(value.func, index)}, {bound})"
    if isinstance(value, MethodType):
        return f"{_function(value.__func__, index)} of {_description(value.__self__, index)}"
    name = getattr(value, "__qualname__", "")
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    known = isinstance(value, BuiltinFunctionType) or (found is value and bool(name))
    return f"{value.__module__}.{name}" if known else f"{_OWN} {name or type(value).__qualname__}"


def blocks_of(root: nn.Module, places: Sequence[Place]) -> tuple[CheckedBlock, ...]:
    """Returns the blocks around layers whose outputs only other layers make whole again.

    A block is an element of a container (ModuleList, ...), or the innermost module around the layers that are in none.

    Raises:
        ConfigError: only the whole model is around some layers, or a layer is in two blocks.
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
                f"tensor_parallel's plan names {names}, which belong to the {type(root).__name__} itself, and plans "
                "are checked on submodules, by calling them; put these layers into a module of their own, with the "
                "forward that calls them"
            )
        inside = {place.name.removeprefix(f"{around}."): place.rule for place in others}
        found.setdefault(around, {}).update(inside)
    for place in places:  # layers whose outputs are whole are checked, too, if they are inside a block
        inner = next((name for name in found if place.name.startswith(f"{name}.")), None)
        if inner is not None:
            found[inner][place.name.removeprefix(f"{inner}.")] = place.rule
    return tuple(CheckedBlock(name, modules[name], plan) for name, plan in found.items())


def _refuse_layers_of_two(root: nn.Module, places: Sequence[Place]) -> None:
    """Refuses a layer that two modules contain: it is cut together with the module around it, and has one name in a plan."""
    found = {id(place.module): place for place in places if place.parameter is None and not _alone(place.rule)}
    for name, module in root.named_modules(remove_duplicate=False):
        place = found.get(id(module))
        around = name.rpartition(".")[0]
        if place is not None and root.get_submodule(around) is not place.around:
            raise ConfigError(
                f"{name} is the same module as {place.name}, in another {type(root.get_submodule(around)).__name__}, "
                f"and tensor_parallel's plan cuts a layer together with the module around it, so {around} would use "
                f"only this rank's part; let both places share all of {place.name.rpartition('.')[0]}, or have a "
                "layer each with one weight (`b.weight = a.weight`), or leave this layer, and those that compute "
                "with its part, out of the plan"
            )


def _alone(rule: Rule) -> bool:
    """Whether a layer with the rule gives a whole output, independent of the layers around it."""
    gathers = isinstance(rule, ColwiseParallel) and rule.gather
    return gathers or isinstance(rule, VocabParallel) or (isinstance(rule, RowwiseParallel) and rule.split)


def _element(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """Name of the outermost container element around a module that can be called, or None."""
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
    """Name of the innermost module around all places that can be called."""
    paths = [place.name.split(".")[:-1] for place in places]
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    while isinstance(modules[".".join(common)], _NEVER_CALLED):
        common.pop()
    return ".".join(common)
