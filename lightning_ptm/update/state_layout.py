"""Layout of a flat's optimizer states in paged tensors.

Each state name has one paged tensor. For an element-wise optimizer it is as long as the shard. Where parameters are updated
whole, it has the states of the parameters that the rank owns, one after the other, each in its own shape. state_encoding.py
defines the format of encoded states.
I1: a state with its own shape begins at a multiple of BLOCK_BYTES elements, so at a disk block whatever its dtype; the states
    of neighbouring parameters are therefore one stretch that begins and ends at a disk block.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.layout import round_up
from lightning_ptm.terms import BLOCK_BYTES, chunk_numel
from lightning_ptm.update.state_encoding import Encoding
from lightning_ptm.update.trial.traits import OptimizerTraits, Shape, SlotTraits

if TYPE_CHECKING:
    import torch

    from lightning_ptm.planning.layout import FlatLayout


@dataclasses.dataclass(frozen=True, slots=True)
class OwnShapes:
    """Layout of the states of one name with shapes that are not the parameters' shapes (e.g. factored moments).

    The states of the first rank's parameters come first, then the second rank's, and so on. Each rank stores its share.

    Attributes:
        shapes: by parameter, the shape of its state; None if it has no such state.
        starts: by parameter, the first element of its state (counted without storage if it has none); then the end of all.
        shares: by rank, the first element of its share; then the end of the last share.
        first: first element of this rank's share.
        parameter_starts: by parameter, its first element in this rank's shard; outside of the shard if another rank owns it.
    """

    shapes: tuple[Shape | None, ...]
    starts: tuple[int, ...]
    shares: tuple[int, ...]
    first: int
    parameter_starts: tuple[int, ...]

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, number) in the rank's share of the states of the parameters that begin in [start, start + numel) of
        the shard."""
        first = self.starts[bisect.bisect_left(self.parameter_starts, start)]
        last = self.starts[bisect.bisect_left(self.parameter_starts, start + numel)]
        return first - self.first, last - first

    def view(self, tensor: torch.Tensor, parameter: int, first: int = 0) -> torch.Tensor:
        """A parameter's state in its shape, as a view of `tensor`, which has all ranks' states from element `first` on."""
        shape = self.shapes[parameter]
        if shape is None:
            raise InternalError(f"parameter {parameter} has no state in this layout of states with shapes of their own")
        return tensor.narrow(0, self.starts[parameter] - first, math.prod(shape)).view(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of one paged tensor of states; `dtype` and `numel` are those of the stored elements.

    Attributes:
        own: the shapes, where they are not the shapes of the parameters.
        encoding: the encoding, where the stored elements are not the optimizer's.
    """

    name: str
    dtype: torch.dtype
    numel: int
    own: OwnShapes | None = None
    encoding: Encoding | None = None

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """Bytes on each rank that shares the flat; a single number if all ranks have the same."""
        shares = (0, self.numel) if self.own is None else self.own.shares
        return tuple((end - start) * self.dtype.itemsize for start, end in itertools.pairwise(shares))

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, number) of the stored elements that belong to elements [start, start + numel) of the shard.

        The elements must be whole parameters where states have their own shapes, and a chunk where states are encoded.
        """
        by = self.own or self.encoding
        return (start, numel) if by is None else by.stretch(start, numel)


def lay_out_states(flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]) -> tuple[StateLayout, ...]:
    """Returns the layouts of all states of a flat's shard that are tensors of several elements.

    Args:
        groups: parameter group of each parameter within its optimizer; None: the optimizer does not update it.
    """
    return tuple(layout for layout in states_of_all_ranks(flat, traits, groups) if layout.numel)


def states_of_all_ranks(
    flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]
) -> tuple[StateLayout, ...]:
    """Returns the layouts of `lay_out_states` and of states of which only other ranks have elements.

    Names, dtypes and shapes are the same on all ranks.
    """
    if not traits.whole:
        return tuple(_like_the_shard(flat, slot) for slot in traits.slots)
    return tuple(_own_shapes(flat, traits, groups))


def _like_the_shard(flat: FlatLayout, slot: SlotTraits) -> StateLayout:
    if slot.encoding is None:
        return StateLayout(slot.name, slot.dtype, flat.shard_numel)
    encoding = slot.encoding(flat.shard_numel, chunk_numel(flat.piece_numel * flat.itemsize))
    return StateLayout(slot.name, encoding.dtype, encoding.numel, encoding=encoding)


def _own_shapes(flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]) -> Iterator[StateLayout]:
    begins = [slot.start for slot in flat.slots]
    # By rank, the index of its first parameter.
    firsts = [bisect.bisect_left(begins, share) for share in flat.shares[:-1]] or [0]
    in_shard = tuple(start - flat.shard_start for start in begins)
    for known in traits.slots:
        shapes = tuple(
            None if group is None else traits.groups[group].state_shapes[slot.spec.shape].get(known.name)
            for slot, group in zip(flat.slots, groups, strict=True)
        )
        ends = [0]
        for shape in shapes:
            ends.append(ends[-1] + (0 if shape is None else round_up(math.prod(shape), BLOCK_BYTES)))
        shares = (*(ends[first] for first in firsts), ends[-1])
        if ends[-1]:
            own = OwnShapes(shapes, tuple(ends), shares, shares[flat.rank], in_shard)
            yield StateLayout(known.name, known.dtype, shares[flat.rank + 1] - shares[flat.rank], own)


def layout_groups(flat: FlatLayout, optimizer: int | None = None) -> tuple[int | None, ...]:
    """Returns the parameter group of each of a flat's parameters, within one of its optimizers (None: the first)."""
    number = flat.slots[0].spec.optimizer if optimizer is None else optimizer
    groups = (slot.spec.group_in(number) for slot in flat.slots)
    return tuple(group if group >= 0 else None for group in groups)
