"""Regions of a block: where each rank has its part of the sequence, and where it has the whole sequence.

Knows names and shapes, computes nothing. Inside of a block with sequence parallelism each rank has a part of the sequence,
except in *regions* around cut layers. In a *divided* region the input is gathered, ranks compute summands, and the last layer
reduce-scatters the sum. In a region that is not divided, ranks compute whole values, as without sequence parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from lightning_ptm.errors import some
from lightning_ptm.parallel.checked_blocks import CheckedBlock
from lightning_ptm.parallel.rules import ColwiseParallel, Partial, Place, RowwiseParallel, Rule, Summed, VocabParallel
from lightning_ptm.torch_internals import parameters_in


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleRegion:
    """A region: a module inside of a block, or the block itself if layers directly inside of it gather their inputs.

    Attributes:
        name: name of the module relative to the block.
        divided: whether ranks compute summands in it (see the module's docstring).
    """

    name: str
    divided: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceBlock:
    """A block inside of which ranks have parts of the sequence.

    Attributes:
        block: the block.
        regions: its regions; none is inside of another, except the block itself around the others.
    """

    block: CheckedBlock
    regions: tuple[ModuleRegion, ...]

    def region_of(self, name: str) -> ModuleRegion | None:
        """The innermost region around a module, named relative to the block; None: ranks have parts of the sequence there."""
        around = [each for each in self.regions if is_in(name, each.name)]
        return max(around, key=lambda each: len(each.name), default=None)

    def uncut(self, cut: Sequence[Place]) -> Iterator[Place]:
        """Yields the uncut modules whose parameters get a part of the gradient on each rank."""
        ruled = {
            id(place.module) for place in cut if place.parameter is None and isinstance(place.rule, _OF_PARAMETERS)
        }
        modules = dict(self.block.module.named_modules())
        for name, module in modules.items():
            region = self.region_of(name)
            if id(module) in ruled or not parameters_in(module) or (region is not None and not region.divided):
                continue
            yield Place(f"{self.block.name}.{name}".strip("."), module, None, modules[_parent(name)], Partial())


_OF_PARAMETERS = (ColwiseParallel, RowwiseParallel, Partial, VocabParallel)
"""Rules that cover all parameters of a module."""


def sequence_block(block: CheckedBlock) -> SequenceBlock | None:
    """Returns the regions of a block; None if sequence parallelism has no effect in it."""
    modules = dict(block.module.named_modules())
    rules = {name: rule for name, rule in block.plan.items() if name in modules}
    columns = [name for name, rule in rules.items() if isinstance(rule, ColwiseParallel) and not rule.gather]
    found: dict[str, bool] = {}
    for name, rule in rules.items():
        if _computes_whole(rule):
            around = _called(modules, _parent(name))
            if not around:
                return None
            found[around] = False
        elif isinstance(rule, RowwiseParallel):
            around = _called(modules, name)
            while around and not any(is_in(each, around) for each in columns):
                around = _called(modules, _parent(around))
            if not any(is_in(each, around) for each in columns):
                return None
            found.setdefault(around, True)
    # Nested regions become one region that is not divided; the block itself, around all, does not count.
    outermost = [
        name for name in found if name and not any(is_in(name, other) for other in found if other not in ("", name))
    ]
    regions = [
        ModuleRegion(name, divided=all(found[each] and each == name for each in found if is_in(each, name)))
        for name in outermost
    ]
    if "" in found:
        regions.append(ModuleRegion("", divided=True))
    return SequenceBlock(block, tuple(regions)) if any(each.divided for each in regions) else None


def layers_computing_whole(block: CheckedBlock) -> str:
    """Names of the layers that prevent sequence parallelism around pairs of ColwiseParallel() and RowwiseParallel().

    Empty if the block has no such pairs.
    """
    rules = block.plan.values()
    columns = any(isinstance(rule, ColwiseParallel) and not rule.gather for rule in rules)
    if not columns or not any(isinstance(rule, RowwiseParallel) and not rule.split for rule in rules):
        return ""
    return some([f"{block.name}.{name}".strip(".") for name, rule in block.plan.items() if _computes_whole(rule)], 3)


def _computes_whole(rule: Rule) -> bool:
    gathers = isinstance(rule, ColwiseParallel) and rule.gather
    return gathers or isinstance(rule, (Summed, VocabParallel)) or (isinstance(rule, RowwiseParallel) and rule.split)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def is_in(name: str, around: str) -> bool:
    """Whether the module `name` is the module `around` or inside of it."""
    return not around or name == around or name.startswith(f"{around}.")


def _called(modules: dict[str, nn.Module], name: str) -> str:
    """Name of the innermost callable module that is or contains the module."""
    while name and type(modules[name]).forward is nn.Module.forward:
        name = _parent(name)
    return name
