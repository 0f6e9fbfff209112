"""Free frames of one tier. Knows numbers, never tensors (the paper's pre-allocated space, section 5).

A frame is the place of one page in its tier: an index from 0 to `total_frames - 1`, or higher with frames left out.

I1: every frame is either free or used: free + used == total.
I2: free frames are stored as intervals, sorted, disjoint, and never adjacent (adjacent ones are merged), so that cost
    depends on the fragmentation of the pool and not on the number of frames.
I3: the lowest frames are taken first. Runs stay long at the top, and the bytes of frames never used are never
    committed.
I4: frames that the tier does not have (`leave_out`) are in no free interval and do not count in the total. Nothing
    takes them or gives them back.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from lightning_ptm.errors import CapacityError, InternalError, format_bytes
from lightning_ptm.terms import Tier


def setting_of(tier: Tier) -> str:
    """Returns the setting to raise when a tier is too small, for callers that do not know whether there is a device."""
    return f"{tier.setting} (host_memory on a CPU-only machine)" if tier.computes else tier.setting


class PagePool:
    """The free frames of one tier. Not thread-safe: its owner, the Allocator, holds a lock.

    Args:
        tier: named in errors.
        total_frames: pages of the tier.
        page_size: bytes of a page, for errors only.
        uses: what the frames are for, for errors only.
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
        """Removes the free frames `first` to `first + count - 1` from the pool for good (I4)."""
        self.take_at(first, count)
        self.total_frames -= count

    @property
    def free_frames(self) -> int:
        return self._free_frames

    @property
    def used_frames(self) -> int:
        return self.total_frames - self._free_frames

    def longest_run(self) -> int:
        """Returns the number of frames in the longest run of adjacent free frames."""
        return max((stop - start for start, stop in zip(self._starts, self._stops, strict=True)), default=0)

    def has_run_at(self, first: int, count: int) -> bool:
        """Whether the frames `first` to `first + count - 1` are all free."""
        index = bisect.bisect_right(self._starts, first) - 1
        return index >= 0 and first + count <= self._stops[index]

    def take_run(self, count: int, *, name: str = "a tensor") -> Sequence[int]:
        """Takes `count` adjacent frames, first fit.

        Args:
            count: frames wanted, at least 0.
            name: the tensor that needs them, for the error.
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
        """Takes the frames `first` to `first + count - 1`; InternalError, and no change, if one of them is used."""
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
        """Takes any `count` frames, lowest first, ascending.

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
        """Returns used frames to the pool, in any order. A free, unknown or repeated frame is an InternalError: no change."""
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
        """Adds a free interval that overlaps none, merged with adjacent ones (I2)."""
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
            f"{name} needs {count} page{'' if count == 1 else 's'} ({format_bytes(count * size)}), and {where}; "
            f"raise {setting_of(self.tier)}{f' ({self._uses})' if self._uses else ''}"
        )


def _runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    """Groups ascending numbers into intervals [first, stop) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for number in ordered:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
