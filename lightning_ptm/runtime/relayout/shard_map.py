"""What lies where in one tensor of a flat, on every rank that shares it: parameters, masters, or one kind of states.

Facts only; what is moved by them, reshard.py decides and moves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.reshard_moves import ShardRange
from lightning_ptm.runtime.tensors.page_io import Elements
from lightning_ptm.update.flat_states import Segment, shard_segments

if TYPE_CHECKING:
    from lightning_ptm.update.state_layout import OwnShapes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """See the file's contract.

    Attributes:
        flat: as this rank has it.
        ranks: that share it, in the order of their pieces.
        keys: by slot, what the parameter is known by.
        dtype: of the elements.
        elements: this rank's; None where only others have any.
        own: shapes of states that are not those of parameters.
    """

    flat: FlatLayout
    ranks: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype
    elements: Elements | None
    own: OwnShapes | None = None

    def segments(self, rank: int) -> Sequence[Segment]:
        """Which parameters lie where in the shard of a rank, by its number among those that share the flat."""
        flat, own = self.flat.of(rank), self.own
        if own is None:
            return shard_segments(flat, rank)
        return [
            Segment(place, own.starts[place] - own.shares[rank], 0, math.prod(shape), ragged=False)
            for place, _ in flat.whole_slots()
            if (shape := own.shapes[place]) is not None
        ]

    def stretches(self) -> Iterator[ShardRange]:
        """Of all ranks, one after the other, in the order of each shard."""
        for rank in range(len(self.ranks)):
            for each in self.segments(rank):
                yield ShardRange(self.keys[each.parameter], each.parameter_start, each.numel, rank, each.start)

    def of_parameters(self) -> dict[int, list[ShardRange]]:
        """The same by parameter, in its order."""
        found: dict[int, list[ShardRange]] = {}
        for each in self.stretches():
            found.setdefault(each.parameter, []).append(each)
        for stretches in found.values():
            stretches.sort(key=lambda each: each.first)
        return found

    def shape(self, key: int) -> tuple[int, ...]:
        """Of what is kept of a parameter, on the ranks that have the same part of it."""
        place = self.keys.index(key)
        own = None if self.own is None else self.own.shapes[place]
        return self.flat.slots[place].spec.shape if own is None else own

    def stride(self, key: int) -> tuple[int, ...] | None:
        """Where the elements do not lie row by row, from one to the next along each dimension."""
        return None if self.own is not None else self.flat.slots[self.keys.index(key)].spec.stride

    def here(self) -> Elements:
        """This rank's elements, of which others want some."""
        if self.elements is None:
            raise InternalError(
                f"flat {self.flat.unit}/{self.flat.index} has no elements here of which some are to move"
            )
        return self.elements


def geometry(flat: FlatLayout, keys: Sequence[int]) -> tuple[object, ...]:
    """What two flats have in common whose shards hold the same elements at the same places, on every rank."""
    slots = tuple((slot.start, slot.numel, slot.spec.stride, slot.spec.box) for slot in flat.slots)
    pieces = (flat.world_size, flat.piece_numel, flat.stripes, flat.tail_piece_numel, flat.shares, flat.rank)
    return tuple(keys), slots, pieces, flat.dtype, flat.code
