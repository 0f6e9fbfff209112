"""Sequence parallelism of one module: which forwards its blocks and their regions get, and what its layers find around them.

Where ranks have parts, sequence_regions.py decides; what they compute there, sequence_parts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.between_layers import BetweenLayers
from lightning_ptm.parallel.checked_blocks import CheckedBlock
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.rules import Place
from lightning_ptm.parallel.sequence_parts import InBlock, InRegion, SequenceParts
from lightning_ptm.parallel.sequence_regions import SequenceBlock, is_in, sequence_block, whole_because_of
from lightning_ptm.runtime.autograd.forward_wrappers import Forward
from lightning_ptm.torch_internals import BatchNorm, parameters_in


class SequenceParallel:
    """Sequence parallelism of one module: what is between its layers, and the forwards of its blocks and regions.

    Args:
        cut: where rules apply.

    Raises:
        ConfigError: statistics of a batch would be of a part.
    """

    def __init__(self, blocks: Sequence[CheckedBlock], group: TensorGroup, cut: Sequence[Place]) -> None:
        self.parts = SequenceParts(group)
        self._whole = BetweenLayers(group)
        self._all_blocks = tuple(blocks)
        self._blocks = [made for block in blocks if (made := sequence_block(block)) is not None]
        for each in self._blocks:
            _refuse_statistics(each)
        self.uncut = tuple(place for each in self._blocks for place in each.uncut(cut))
        """Modules that every rank has whole, and of whose parameters it has parts of the gradients."""

    def refuse_idle(self) -> None:
        """Of a whole model; a block of one may be without.

        Raises:
            ConfigError: in no block there is anything between layers that are cut.
        """
        if self._blocks:
            return
        names = [each for each in map(whole_because_of, self._all_blocks) if each]
        if names:
            raise ConfigError(
                f"sequence_parallel=True and {names[0]} compute, beside pairs of ColwiseParallel() and "
                f"RowwiseParallel() in the same module, "
                f"what is whole, so that there is nothing that ranks could have parts of the sequence of; use "
                f"sequence_parallel=False, or leave these layers out of tensor_parallel's plan, or have each pair "
                f"in a module "
                f"of its own"
            )
        raise ConfigError(
            "sequence_parallel=True and no block has layers with ColwiseParallel() and, behind them, "
            "RowwiseParallel() in modules that are "
            "called with a sequence, so that there is nothing that ranks could have parts of the sequence of; use "
            "sequence_parallel=False, or a plan of tensor_parallel with such pairs"
        )

    def refuse_elsewhere(self, root: nn.Module) -> None:
        """What blocks have in common with code around them, where its gradients are whole.

        Raises:
            ConfigError: a parameter would have parts of gradients and whole ones.
        """
        of_parts = {
            id(parameter): place.name
            for place in self.uncut
            for parameter in parameters_in(place.module).values()
            if parameter is not None
        }
        for name, parameter in root.named_parameters(remove_duplicate=False):
            if id(parameter) in of_parts and not self.between(name.rpartition(".")[0]).partial:
                raise ConfigError(
                    f"sequence_parallel=True and {name} is a parameter of {of_parts[id(parameter)]}, too: one has gradients "
                    f"of the whole sequence, the other of each rank's part; give each a parameter of its own, or use "
                    f"sequence_parallel=False"
                )

    def between(self, name: str) -> BetweenLayers:
        """What is around a layer."""
        for each in self._blocks:
            if is_in(name, each.block.name):
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
        with_forwards = {id(each.block.module) for each in self._blocks} | {
            id(each.block.module.get_submodule(region.name)) for each in self._blocks for region in each.regions
        }
        for place in self.uncut:
            if id(place.module) not in with_forwards:
                yield place.module, self.parts.within(place.module, place.name)


def _refuse_statistics(each: SequenceBlock) -> None:
    for name, module in each.block.module.named_modules():
        region = each.region_of(name)
        if isinstance(module, BatchNorm) and (region is None or region.divided):
            raise ConfigError(
                f"sequence_parallel=True and {each.block.name}.{name} is a {type(module).__name__}, whose statistics would "
                f"be of each rank's part of the sequence; use "
                f"tensor_parallel=TensorParallel(sequence_parallel=False), or a norm that takes tokens one by one"
            )
