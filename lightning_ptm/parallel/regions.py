"""Where in a block each rank has its part of the sequence, and where it has all of it.

Knows names and shapes, computes nothing. Inside of a block with sequence parallelism each rank has a part, but for *regions*
around layers that are cut. A region that is *divided* computes parts of sums: its input is gathered, and its last layer
leaves each rank's part of the sum. One that is not computes what is whole, as without sequence parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.between import Between
from lightning_ptm.parallel.blocks import Block
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.parts import Forward, InBlock, InRegion, Parts
from lightning_ptm.parallel.rules import Columns, Partial, Place, Rows, Rule, Summed, Vocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
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

    block: Block
    regions: tuple[Region, ...]

    def region_of(self, name: str) -> Region | None:
        """The innermost region around a module, given by its name in the block; None: it has parts."""
        around = [each for each in self.regions if _is_in(name, each.name)]
        return max(around, key=lambda each: len(each.name), default=None)

    def uncut(self, cut: Sequence[Place]) -> Iterator[Place]:
        """Modules with parameters whose gradients are of a part of the sequence, or of what a divided region computes."""
        ruled = {
            id(place.module) for place in cut if place.parameter is None and isinstance(place.rule, _OF_PARAMETERS)
        }
        modules = dict(self.block.module.named_modules())
        for name, module in modules.items():
            region = self.region_of(name)
            if id(module) in ruled or not module._parameters or (region is not None and not region.divided):
                continue
            yield Place(f"{self.block.name}.{name}".strip("."), module, None, modules[_parent(name)], Partial())


_OF_PARAMETERS = (Columns, Rows, Partial, Vocabulary)
"""Rules that say what becomes of all parameters of a module."""


def sequence_block(block: Block) -> SequenceBlock | None:
    """How ranks divide the sequence in a block; None: there is nothing in it between layers that are cut."""
    modules = dict(block.module.named_modules())
    rules = {name: rule for name, rule in block.plan.items() if name in modules}
    columns = [name for name, rule in rules.items() if isinstance(rule, Columns) and not rule.gather]
    found: dict[str, bool] = {}
    for name, rule in rules.items():
        if _computes_whole(rule):
            around = _called(modules, _parent(name))
            if not around:
                return None
            found[around] = False
        elif isinstance(rule, Rows):
            around = _called(modules, name)
            while around and not any(_is_in(each, around) for each in columns):
                around = _called(modules, _parent(around))
            if not any(_is_in(each, around) for each in columns):
                return None
            found.setdefault(around, True)
    # What is inside of another, or has another inside, is whole with it; the block itself has all inside.
    outermost = [
        name for name in found if name and not any(_is_in(name, other) for other in found if other not in ("", name))
    ]
    regions = [
        Region(name, divided=all(found[each] and each == name for each in found if _is_in(each, name)))
        for name in outermost
    ]
    if "" in found:
        regions.append(Region("", divided=True))
    return SequenceBlock(block, tuple(regions)) if any(each.divided for each in regions) else None


def _computes_whole(rule: Rule) -> bool:
    gathers = isinstance(rule, Columns) and rule.gather
    return gathers or isinstance(rule, (Summed, Vocabulary)) or (isinstance(rule, Rows) and rule.split)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_in(name: str, around: str) -> bool:
    return not around or name == around or name.startswith(f"{around}.")


def _called(modules: dict[str, nn.Module], name: str) -> str:
    """The innermost module around, or itself, that can be called."""
    while name and type(modules[name]).forward is nn.Module.forward:
        name = _parent(name)
    return name


class Sequences:
    """Sequence parallelism of one module: what is between its layers, and the forwards of its blocks and regions.

    Args:
        cut: where rules apply.

    Raises:
        ConfigError: in no block there is anything between layers that are cut; or statistics of a batch would be of a part.
    """

    def __init__(self, blocks: Sequence[Block], group: TensorGroup, cut: Sequence[Place]) -> None:
        self.parts = Parts(group)
        self._whole = Between(group)
        self._blocks = [made for block in blocks if (made := sequence_block(block)) is not None]
        if not self._blocks and blocks:
            names = ", ".join(block.name for block in blocks[:3])
            raise ConfigError(
                f"sequence_parallel=True and no block ({names}) has layers with Columns() and, behind them, Rows() that "
                f"are in modules of their own, so that there is nothing that ranks could have parts of the sequence of; "
                f"use sequence_parallel=False, or a tensor_parallel_plan with such pairs"
            )
        for each in self._blocks:
            _refuse_statistics(each)
        self.uncut = tuple(place for each in self._blocks for place in each.uncut(cut))
        """Modules that every rank has whole, and of whose parameters it has parts of the gradients."""

    def between(self, name: str) -> Between:
        """What is around a layer."""
        for each in self._blocks:
            if _is_in(name, each.block.name):
                region = each.region_of(name.removeprefix(f"{each.block.name}.") if each.block.name else name)
                if region is not None:
                    if not region.divided:
                        return self._whole
                    return (InRegion if region.name else InBlock)(self.parts, name)
                return InBlock(self.parts, name)
        return self._whole

    def forwards(self) -> Iterator[tuple[nn.Module, Forward]]:
        """Modules, and forwards in the place of their own; to be asked when layers have theirs."""
        for each in self._blocks:
            for region in each.regions:
                if region.name:
                    module, name = each.block.module.get_submodule(region.name), f"{each.block.name}.{region.name}"
                    make = self.parts.divided_region if region.divided else self.parts.whole_region
                    yield module, make(module, name)
            yield each.block.module, self.parts.block(each.block.module, each.block.name)


def _refuse_statistics(each: SequenceBlock) -> None:
    for name, module in each.block.module.named_modules():
        region = each.region_of(name)
        if isinstance(module, _BatchNorm) and (region is None or region.divided):
            raise ConfigError(
                f"sequence_parallel=True and {each.block.name}.{name} is a {type(module).__name__}, whose statistics would "
                f"be of each rank's part of the sequence; use sequence_parallel=False, or a norm that takes tokens one by one"
            )


__all__ = ["Region", "SequenceBlock", "Sequences", "sequence_block"]
