"""Where in a block each rank has its part of the sequence, and where it has all of it.

Knows names and shapes, computes nothing. Inside of a block with sequence parallelism each rank has a part, but for *regions*
around layers that are cut. A region that is *divided* computes parts of sums: its input is gathered, and its last layer
leaves each rank's part of the sum. One that is not computes what is whole, as without sequence parallelism.
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
    """A module inside of a block; the block itself where layers directly inside of it gather for themselves.

    Attributes:
        name: inside of the block.
        divided: see above.
    """

    name: str
    divided: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceBlock:
    """A block inside of which ranks have parts of the sequence.

    Attributes:
        regions: none inside of another, but for the block itself.
    """

    block: CheckedBlock
    regions: tuple[ModuleRegion, ...]

    def region_of(self, name: str) -> ModuleRegion | None:
        """The innermost region around a module, given by its name in the block; None: it has parts."""
        around = [each for each in self.regions if is_in(name, each.name)]
        return max(around, key=lambda each: len(each.name), default=None)

    def uncut(self, cut: Sequence[Place]) -> Iterator[Place]:
        """Modules with parameters whose gradients are of a part of the sequence, or of what a divided region computes."""
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
"""Rules that say what becomes of all parameters of a module."""


def sequence_block(block: CheckedBlock) -> SequenceBlock | None:
    """How ranks divide the sequence in a block; None: there is nothing in it between layers that are cut."""
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
    # What is inside of another, or has another inside, is whole with it; the block itself has all inside.
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


def whole_because_of(block: CheckedBlock) -> str:
    """Which layers keep ranks from having parts of a sequence around pairs of ColwiseParallel() and
    RowwiseParallel(); "" without such pairs."""
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
    """Whether a module is another, or inside of it, by their names."""
    return not around or name == around or name.startswith(f"{around}.")


def _called(modules: dict[str, nn.Module], name: str) -> str:
    """The innermost module around, or itself, that can be called."""
    while name and type(modules[name]).forward is nn.Module.forward:
        name = _parent(name)
    return name
