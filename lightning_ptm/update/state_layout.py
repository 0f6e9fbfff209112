"""Where the states of a flat's parameters lie in their paged tensors.

A paged tensor for each name of a state. Of an element-wise optimizer it is as long as the shard; where parameters are updated
whole, it holds the state of one parameter behind that of the other, each in its own shape, of those that the rank owns.
Encoded states lie there as state_encoding.py has it.
I1: of own shapes, each begins where a disk block begins, whatever its dtype; so those of neighbouring parameters are one
    stretch that begins and ends there.
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
    """States of one name whose shapes are their own, of the parameters of a flat: those of the first rank's parameters,
    behind them the second's, and so on. Each rank has its share.

    Attributes:
        shapes: by parameter; None of one that has no such state.
        starts: by parameter, where its state begins, or would; and the end of all.
        shares: where each rank's share begins; and the end of the last.
        first: the element with which the rank's own share begins.
        parameter_starts: where parameters begin in the rank's shard; before or behind it where others own them.
    """

    shapes: tuple[Shape | None, ...]
    starts: tuple[int, ...]
    shares: tuple[int, ...]
    first: int
    parameter_starts: tuple[int, ...]

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, elements) in the share of the states of the parameters that begin in [start, start + numel) of the
        shard."""
        first = self.starts[bisect.bisect_left(self.parameter_starts, start)]
        last = self.starts[bisect.bisect_left(self.parameter_starts, start + numel)]
        return first - self.first, last - first

    def view(self, tensor: torch.Tensor, parameter: int, first: int = 0) -> torch.Tensor:
        """A parameter's state in its shape, as a view of all ranks' states from element `first` on."""
        shape = self.shapes[parameter]
        if shape is None:
            raise InternalError(f"parameter {parameter} has no such state of its own shape")
        return tensor.narrow(0, self.starts[parameter] - first, math.prod(shape)).view(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """One paged tensor of states, in elements of what lies in pages.

    Attributes:
        own: where their shapes are not those of the parameters.
        encoding: where they are not what lies in pages.
    """

    name: str
    dtype: torch.dtype
    numel: int
    own: OwnShapes | None = None
    encoding: Encoding | None = None

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """Of each rank that shares the flat; of one that stands for all, where all have the same."""
        shares = (0, self.numel) if self.own is None else self.own.shares
        return tuple((end - start) * self.dtype.itemsize for start, end in itertools.pairwise(shares))

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, elements) of what belongs to elements [start, start + numel) of the shard: whole parameters where
        shapes are own, a chunk where states are encoded."""
        by = self.own or self.encoding
        return (start, numel) if by is None else by.stretch(start, numel)


def lay_out_states(flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]) -> tuple[StateLayout, ...]:
    """All states of a flat's shard that are tensors of several elements.

    Args:
        groups: parameter group of each parameter within its optimizer; None: it updates it not.
    """
    return tuple(layout for layout in states_of_all_ranks(flat, traits, groups) if layout.numel)


def states_of_all_ranks(
    flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]
) -> tuple[StateLayout, ...]:
    """As `lay_out_states`, with those of which other ranks alone have elements; the same names, dtypes and shapes on all."""
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
    # The first parameter of each rank; behind them, all.
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
    """Parameter group of each of a flat's parameters within one of its optimizers (None: the first), as the layout has it."""
    number = flat.slots[0].spec.optimizer if optimizer is None else optimizer
    groups = (slot.spec.group_in(number) for slot in flat.slots)
    return tuple(group if group >= 0 else None for group in groups)
