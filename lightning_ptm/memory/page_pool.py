"""Free frames of one tier. Knows numbers, never tensors (the paper's pre-allocated space, section 5).

A frame is the place of one page in its tier: an index from 0 to `total_frames - 1`.

I1: every frame is either free or used: free + used == total.
I2: free frames are kept as intervals, sorted, disjoint, and never touching (touching ones are joined), so that cost
    depends on how scattered the pool is and not on how many frames it has.
I3: the lowest frames go first. Runs stay long at the top, and the bytes of frames never used are never committed.
I4: frames that the tier has not (`leave_out`) are between those that it has; nobody gets or returns them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.terms import Tier


def setting_of(tier: Tier) -> str:
    """The setting to raise when a tier is too small, for those who do not know whether there is a device."""
    return f"{tier.setting} (host_memory on a CPU-only machine)" if tier.computes else tier.setting


class PagePool:
    """The free frames of one tier. Not safe for threads: its owner, the Allocator, holds a lock.

    Args:
        tier: named in errors.
        total_frames: how many pages the tier holds.
        page_size: bytes of a page, for errors only.
        uses: what the frames are for, likewise.
    """

    def __init__(self, tier: Tier, total_frames: int, page_size: int, uses: str = "") -> None:
        self.tier = tier
        self.total_frames = total_frames
        self.page_size = page_size
        self._uses = uses

        # State: free intervals [start, stop), as two parallel sorted lists.
        self._starts: list[int] = [0] if total_frames else []
        self._stops: list[int] = [total_frames] if total_frames else []
        self._free_frames = total_frames
        self._stop = total_frames

    def leave_out(self, first: int, count: int) -> None:
        """The tier has not the free frames `first` to `first + count - 1` (I4)."""
        self.take_at(first, count)
        self.total_frames -= count

    @property
    def free_frames(self) -> int:
        return self._free_frames

    @property
    def used_frames(self) -> int:
        return self.total_frames - self._free_frames

    def longest_run(self) -> int:
        """Frames in the longest run of free neighbours."""
        return max((stop - start for start, stop in zip(self._starts, self._stops, strict=True)), default=0)

    def has_run_at(self, first: int, count: int) -> bool:
        """Whether the frames `first` to `first + count - 1` are all free."""
        index = bisect.bisect_right(self._starts, first) - 1
        return index >= 0 and first + count <= self._stops[index]

    def take_run(self, count: int, *, name: str = "a tensor") -> Sequence[int]:
        """Take `count` neighbouring frames, first fit.

        Args:
            count: frames wanted, at least 0.
            name: who wants them, for the error.
        Raises:
            CapacityError: no run is long enough; nothing is taken.
        """
        for start, stop in zip(self._starts, self._stops, strict=True):
            if stop - start >= count:
                return self.take_at(start, count)
        if count == 0:
            return range(0)
        raise self._capacity_error(count, name, longest_run=self.longest_run())

    def take_at(self, first: int, count: int) -> Sequence[int]:
        """Take the frames `first` to `first + count - 1`; InternalError, and no change, when one of them is used."""
        if count == 0:
            return range(first, first)
        if not self.has_run_at(first, count):
            raise InternalError(f"{self.tier.name} frames {first} to {first + count - 1} are not all free")
        index = bisect.bisect_right(self._starts, first) - 1
        start, stop = self._starts[index], self._stops[index]
        left = [(start, first)] if start < first else []
        right = [(first + count, stop)] if first + count < stop else []
        self._starts[index : index + 1] = [piece[0] for piece in left + right]
        self._stops[index : index + 1] = [piece[1] for piece in left + right]
        self._free_frames -= count
        return range(first, first + count)

    def take(self, count: int, *, name: str = "a tensor") -> Sequence[int]:
        """Take any `count` frames, lowest first, ascending.

        Raises:
            CapacityError: fewer are free; nothing is taken.
        """
        if count > self._free_frames:
            raise self._capacity_error(count, name, longest_run=None)
        frames: list[int] = []
        while len(frames) < count:
            start = self._starts[0]
            frames.extend(self.take_at(start, min(count - len(frames), self._stops[0] - start)))
        return frames

    def give_back(self, frames: Iterable[int]) -> None:
        """Return used frames, in any order. A frame that is free, unknown or named twice: InternalError, no change."""
        ordered = sorted(frames)
        for before, frame in itertools.pairwise(ordered):
            if before == frame:
                raise InternalError(f"{self.tier.name} frame {frame} was given back twice in one call")
        runs = _runs(ordered)
        for first, stop in runs:
            if first < 0 or stop > self._stop:
                raise InternalError(f"{self.tier.name} frames {first} to {stop - 1} are not in a pool of {self._stop}")
            index = bisect.bisect_left(self._stops, first + 1)
            if index < len(self._starts) and self._starts[index] < stop:
                raise InternalError(f"a frame from {first} to {stop - 1} of {self.tier.name} was given back while free")
        for first, stop in runs:
            self._insert(first, stop)

    def _insert(self, first: int, stop: int) -> None:
        """Add a free interval that overlaps none, joining the neighbours that it touches (I2)."""
        index = bisect.bisect_left(self._starts, first)
        self._free_frames += stop - first
        lower, upper = index, index
        if index > 0 and self._stops[index - 1] == first:
            lower, first = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == stop:
            upper, stop = index + 1, self._stops[index]
        self._starts[lower:upper] = [first]
        self._stops[lower:upper] = [stop]

    def _capacity_error(self, count: int, name: str, *, longest_run: int | None) -> CapacityError:
        size = self.page_size
        where = f"the {self.tier.name.lower()} tier has {self._free_frames} of {self.total_frames} pages free"
        if longest_run is not None and count <= self._free_frames:
            where += f", {longest_run} of them side by side"
        return CapacityError(
            f"{name} needs {count} pages of {size} bytes ({count * size} bytes), {where} "
            f"({self._free_frames * size} bytes); raise {setting_of(self.tier)}{f' ({self._uses})' if self._uses else ''}"
        )


def _runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    """Cut ascending numbers into intervals [first, stop) of neighbours."""
    runs: list[tuple[int, int]] = []
    for number in ordered:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
