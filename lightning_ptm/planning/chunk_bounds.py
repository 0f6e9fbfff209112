"""Where the shard of a flat is cut into chunks: what updates read, compute and write at once."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptm.planning.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """Where a flat's shard is cut into chunks, in elements.

    Attributes:
        starts: of the chunks, in order.
        numel: of the shard: the end of the last one.
    """

    starts: Sequence[int]
    numel: int

    def length(self, place: int) -> int:
        """Elements of the chunk at a place in `starts`."""
        return (self.starts[place + 1] if place + 1 < len(self.starts) else self.numel) - self.starts[place]

    def length_from(self, start: int) -> int:
        """Elements of the chunk that starts there."""
        return self.length(bisect.bisect_left(self.starts, start))


def even_chunk_bounds(numel: int, chunk_numel: int) -> ChunkBounds:
    """Chunks of equal length, but for the last."""
    return ChunkBounds(range(0, numel, chunk_numel), numel)


def chunk_bounds_of(flat: FlatLayout, chunk_numel: int) -> ChunkBounds:
    """Of a flat; where parameters are updated whole, a chunk is as many of them as `chunk_numel` elements hold, or one; it is
    padding where the rank owns none."""
    if not flat.updated_whole:
        return even_chunk_bounds(flat.shard_numel, chunk_numel)
    starts: list[int] = []
    begins = [slot.start for _, slot in flat.whole_slots()] or [0]
    for start, end in itertools.pairwise([*begins, flat.shard_numel]):
        if end > start and (not starts or end - starts[-1] > chunk_numel):
            starts.append(start)
    return ChunkBounds(tuple(starts), flat.shard_numel)
