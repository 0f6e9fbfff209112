"""Which ranges of which parameters are where in one tensor of a flat, on every rank that shares the flat.

The tensor holds compute parameters, master weights, or one kind of optimizer states. Facts only; reshard.py moves
elements by them.
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
    """The place of each parameter in one tensor of a flat.

    Attributes:
        flat: the layout, as this rank has it.
        ranks: the ranks that share it, in the order of their pieces.
        keys: by slot, the id of the parameter.
        dtype: dtype of the elements.
        elements: this rank's shard; None if it has no elements.
        own: shapes of states whose shapes differ from the parameters'.
    """

    flat: FlatLayout
    ranks: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype
    elements: Elements | None
    own: OwnShapes | None = None

    def segments(self, rank: int) -> Sequence[Segment]:
        """Returns the ranges of parameters in the shard of a rank; `rank` is its index among those that share the
        flat."""
        flat, own = self.flat.of(rank), self.own
        if own is None:
            return shard_segments(flat, rank)
        return [
            Segment(place, own.starts[place] - own.shares[rank], 0, math.prod(shape), ragged=False)
            for place, _ in flat.whole_slots()
            if (shape := own.shapes[place]) is not None
        ]

    def stretches(self) -> Iterator[ShardRange]:
        """Yields the ranges of all ranks, rank by rank, in the order of each shard."""
        for rank in range(len(self.ranks)):
            for each in self.segments(rank):
                yield ShardRange(self.keys[each.parameter], each.parameter_start, each.numel, rank, each.start)

    def of_parameters(self) -> dict[int, list[ShardRange]]:
        """Returns the ranges of each parameter, in its order, by key."""
        found: dict[int, list[ShardRange]] = {}
        for each in self.stretches():
            found.setdefault(each.parameter, []).append(each)
        for stretches in found.values():
            stretches.sort(key=lambda each: each.first)
        return found

    def shape(self, key: int) -> tuple[int, ...]:
        """Returns the shape of the states of a parameter (or of its slice), as the ranks that share the flat have
        it."""
        place = self.keys.index(key)
        own = None if self.own is None else self.own.shapes[place]
        return self.flat.slots[place].spec.shape if own is None else own

    def stride(self, key: int) -> tuple[int, ...] | None:
        """Returns the strides of a parameter whose elements are not stored row by row; None for one stored row by
        row."""
        return None if self.own is not None else self.flat.slots[self.keys.index(key)].spec.stride

    def here(self) -> Elements:
        """Returns this rank's elements, which other ranks or the new layout need."""
        if self.elements is None:
            raise InternalError(
                f"flat {self.flat.unit}/{self.flat.index} has no elements on this rank, and some are to be moved from "
                "it"
            )
        return self.elements


def geometry(flat: FlatLayout, keys: Sequence[int]) -> tuple[object, ...]:
    """Returns what two flats have in common if their shards hold the same elements at the same offsets on every
    rank."""
    slots = tuple((slot.start, slot.numel, slot.spec.stride, slot.spec.box) for slot in flat.slots)
    pieces = (flat.world_size, flat.piece_numel, flat.stripes, flat.tail_piece_numel, flat.shares, flat.rank)
    return tuple(keys), slots, pieces, flat.dtype, flat.code
