"""Which modules around the layers of a plan are proven in one piece, and which of them prove each other.

Knows names, shapes and attributes, computes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.rules import Columns, Place, Rows, Rule, Vocabulary

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
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
        shapes = [(name, tuple(each.shape)) for name, each in self.module.named_parameters()]
        modules = [(name, type(each)) for name, each in self.module.named_modules()]
        return hashlib.blake2b(repr((modules, shapes, sorted(map(repr, self.plan.items())))).encode()).hexdigest()


def blocks_of(root: nn.Module, places: Sequence[Place]) -> tuple[Block, ...]:
    """The blocks in which layers that need others to be whole again lie: elements of a container, or what is around the rest.

    Raises:
        ConfigError: nothing but the whole model is around some.
    """
    modules = dict(root.named_modules())
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
        around = _around(others)
        if not around:
            names = ", ".join(place.name for place in others[:3])
            raise ConfigError(
                f"tensor_parallel_plan names {names}, which nothing is around but the {type(root).__name__} itself, and a "
                f"plan is proven on a module that can be called by itself; put these layers into a module of their own, with "
                f"the forward that calls them"
            )
        inside = {place.name.removeprefix(f"{around}."): place.rule for place in others}
        found.setdefault(around, {}).update(inside)
    return tuple(Block(name, modules[name], plan) for name, plan in found.items())


def _alone(rule: Rule) -> bool:
    """Whether what the rule leaves behind is whole, whatever is around it."""
    gathers = isinstance(rule, Columns) and rule.gather
    return gathers or isinstance(rule, Vocabulary) or (isinstance(rule, Rows) and rule.split)


def _element(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The outermost element of a container around something, or None."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(modules[".".join(parts[: end - 1])], _CONTAINERS):
            return ".".join(parts[:end])
    return None


def _around(places: Sequence[Place]) -> str:
    """The name of the innermost module around all of them."""
    paths = [place.name.split(".")[:-1] for place in places]
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


__all__ = ["Block", "blocks_of"]
