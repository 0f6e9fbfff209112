"""Sequence parallelism of one module: the forwards of its blocks and regions, and the interfaces of its layers.

sequence_regions.py decides where ranks have parts of the sequence; sequence_parts.py has the forwards.
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
from lightning_ptm.parallel.sequence_regions import SequenceBlock, is_in, layers_computing_whole, sequence_block
from lightning_ptm.runtime.autograd.recompute import Forward
from lightning_ptm.torch_internals import BatchNorm, parameters_in


class SequenceParallel:
    """Sequence parallelism of one module: the interfaces between its layers, and the forwards of its blocks and regions.

    Args:
        blocks: the blocks of the plan.
        group: the tensor group.
        cut: modules and parameters with rules.

    Raises:
        ConfigError: a batch norm would compute statistics of a part of the sequence.
    """

    def __init__(self, blocks: Sequence[CheckedBlock], group: TensorGroup, cut: Sequence[Place]) -> None:
        self.parts = SequenceParts(group)
        self._whole = BetweenLayers(group)
        self._all_blocks = tuple(blocks)
        self._blocks = [made for block in blocks if (made := sequence_block(block)) is not None]
        for each in self._blocks:
            _refuse_statistics(each)
        self.uncut = tuple(place for each in self._blocks for place in each.uncut(cut))
        """Whole modules whose parameters' gradients are the sum of the ranks' gradients."""

    def refuse_idle(self) -> None:
        """Checks that sequence parallelism has an effect. For whole models; a single block may be without.

        Raises:
            ConfigError: no block has anything between layers that are cut.
        """
        if self._blocks:
            return
        names = [each for each in map(layers_computing_whole, self._all_blocks) if each]
        if names:
            raise ConfigError(
                f"TensorParallel(sequence_parallel=True) and {names[0]} compute whole values in the same "
                "module as pairs of ColwiseParallel() and RowwiseParallel(), so that ranks cannot have "
                "parts of the sequence anywhere; use "
                "tensor_parallel=TensorParallel(sequence_parallel=False), or leave these layers out of "
                "tensor_parallel's plan, or put each pair into a module of its own"
            )
        raise ConfigError(
            "TensorParallel(sequence_parallel=True) and no block has layers with ColwiseParallel() "
            "followed by RowwiseParallel() in modules that are called with a sequence, so that ranks "
            "cannot have parts of the sequence anywhere; use "
            "tensor_parallel=TensorParallel(sequence_parallel=False), or a plan of tensor_parallel "
            "with such pairs"
        )

    def refuse_shared_parameters(self, root: nn.Module) -> None:
        """Refuses parameters that code inside and outside of the blocks shares.

        Raises:
            ConfigError: a parameter would get partial gradients inside and whole gradients outside.
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
                    f"TensorParallel(sequence_parallel=True) and {name} is a parameter of "
                    f"{of_parts[id(parameter)]}, too: one gets gradients of the whole sequence, the other of "
                    "each rank's part; give each a parameter of its own, or use "
                    "tensor_parallel=TensorParallel(sequence_parallel=False)"
                )

    def between(self, name: str) -> BetweenLayers:
        """Returns the interface of a layer to the activations around it."""
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
        """Yields modules and the forwards that replace theirs; call it after layers have got theirs."""
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
                f"TensorParallel(sequence_parallel=True) and {each.block.name}.{name} is a "
                f"{type(module).__name__}, whose statistics would be of each rank's part of the sequence; "
                "use tensor_parallel=TensorParallel(sequence_parallel=False), or a norm that takes tokens "
                "one by one"
            )
