"""Chunk boundaries of a flat's shard. A chunk is what an update reads, computes and writes at once."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptm.planning.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """The chunk boundaries of one flat's shard, in elements.

    Attributes:
        starts: first element of each chunk, in order.
        numel: elements of the shard, which is the end of the last chunk.
    """

    starts: Sequence[int]
    numel: int

    def length(self, place: int) -> int:
        """Returns the elements of the chunk at index `place` of `starts`."""
        return (self.starts[place + 1] if place + 1 < len(self.starts) else self.numel) - self.starts[place]

    def length_from(self, start: int) -> int:
        """Returns the elements of the chunk that begins at element `start`."""
        return self.length(bisect.bisect_left(self.starts, start))


def even_chunk_bounds(numel: int, chunk_numel: int) -> ChunkBounds:
    """Returns chunks of equal length; the last may be shorter."""
    return ChunkBounds(range(0, numel, chunk_numel), numel)


def chunk_bounds_of(flat: FlatLayout, chunk_numel: int) -> ChunkBounds:
    """Returns the chunk boundaries of a flat.

    Where an update needs whole parameters, a chunk is as many parameters as fit into `chunk_numel` elements, at least
    one. A rank that owns no parameter of the flat has one chunk of padding.
    """
    if not flat.updated_whole:
        return even_chunk_bounds(flat.shard_numel, chunk_numel)
    starts: list[int] = []
    begins = [slot.start for _, slot in flat.whole_slots()] or [0]
    for start, end in itertools.pairwise([*begins, flat.shard_numel]):
        if end > start and (not starts or end - starts[-1] > chunk_numel):
            starts.append(start)
    return ChunkBounds(tuple(starts), flat.shard_numel)
