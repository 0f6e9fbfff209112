"""Extents on disk that the next allocator of a run reuses in place, so that none of their bytes are copied.

Knows tensors and frame numbers; changes neither. Of the other old pages, those of tensors that are still to be copied
(`read`) are no frames of the new allocator, so it never overwrites them; they are freed when the old one is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.paged_tensor import PagedTensor


@dataclass(frozen=True, slots=True)
class ReusedExtents:
    """Pages that an allocator leaves to the next one.

    Attributes:
        disk: the region of the pages.
        io_threads: concurrent transfers of one disk path.
        kept: tensors that keep their pages, all in one tier that is not addressable.
        read: tensors that are read from their pages while the old allocator is open.
    """

    disk: DiskRegion
    io_threads: int
    kept: tuple[PagedTensor, ...]
    read: tuple[PagedTensor, ...]

    def frames(self, total: int) -> list[range]:
        """Returns the intervals of the `total` frames of the new allocator, ascending.

        They are the frames of the kept tensors, and as many of the lowest frames that no tensor reads as are lacking.
        If tensors share pages, the kept tensors fill no more frames than newly allocated ones would.
        """
        kept = frames_of(self.kept)
        more = max(0, total - len(kept))
        start = 0
        for taken in sorted(kept | frames_of(self.read)):
            if taken - start >= more:
                break
            start = taken + 1
        return _intervals(sorted([*kept, *range(start, start + more)]))


def frames_of(tensors: Iterable[PagedTensor]) -> set[int]:
    """Returns the frames in which tensors have a part."""
    return {frame for tensor in tensors for frame in tensor.pages.frames}


def _intervals(ordered: Sequence[int]) -> list[range]:
    found: list[range] = []
    for frame in ordered:
        if found and found[-1].stop == frame:
            found[-1] = range(found[-1].start, frame + 1)
        else:
            found.append(range(frame, frame + 1))
    return found


def gaps(frames: Sequence[range]) -> list[range]:
    """Returns the intervals between ascending intervals, and before the first."""
    stops = [0, *(each.stop for each in frames)]
    return [range(stop, each.start) for stop, each in zip(stops, frames, strict=False) if stop < each.start]
