"""Pages on disk that a run's next allocator goes on with where they are, so that none of their bytes move.

Knows tensors and numbers of frames; touches neither. What else of the old pages is read until the old allocator closes, the
new one does not write to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.paged_tensor import PagedTensor


@dataclass(frozen=True, slots=True)
class ReusedExtents:
    """What an allocator leaves to the next one.

    Attributes:
        disk: the region of the pages.
        io_threads: transfers of one disk path that run at once.
        kept: tensors that stay where they are, of one tier that has no addresses.
        read: tensors that are read there as long as the old allocator is open.
    """

    disk: DiskRegion
    io_threads: int
    kept: tuple[PagedTensor, ...]
    read: tuple[PagedTensor, ...]

    def frames(self, total: int) -> list[range]:
        """Intervals of the `total` frames that the new allocator has, ascending: those of what is kept, and others that
        nobody reads, side by side, so that what lies there end to end fills no more of them than of new ones."""
        kept = frames_of(self.kept)
        more = max(0, total - len(kept))
        start = 0
        for taken in sorted(kept | frames_of(self.read)):
            if taken - start >= more:
                break
            start = taken + 1
        return _intervals(sorted([*kept, *range(start, start + more)]))


def frames_of(tensors: Iterable[PagedTensor]) -> set[int]:
    """The frames in which tensors have a part."""
    return {span.frame for tensor in tensors for span in tensor.pages}


def _intervals(ordered: Sequence[int]) -> list[range]:
    found: list[range] = []
    for frame in ordered:
        if found and found[-1].stop == frame:
            found[-1] = range(found[-1].start, frame + 1)
        else:
            found.append(range(frame, frame + 1))
    return found


def gaps(frames: Sequence[range]) -> list[range]:
    """What lies between ascending intervals, and before the first."""
    stops = [0, *(each.stop for each in frames)]
    return [range(stop, each.start) for stop, each in zip(stops, frames, strict=False) if stop < each.start]
