"""Pages of tensors: the free frames of a tier, the bytes that each tensor has, their state, and the paged tensor itself.

A frame is the place of one page in its tier: an index from 0 to `total_frames - 1`, or higher with frames left out.
`PagePool` has the free frames of a tier; `PageTable` the tensors in each page (the paper's Page, section 4.1), and the peak;
`Pages` the bytes of one tensor, and the transfers that hold some of them; `PagedTensor` is the paper's Tensor: elements of
one dtype on pages of one tier.

States of bytes:

    RESIDENT --ARRIVE--> ARRIVING --end of the transfer--> RESIDENT --FREE--> ABSENT
    RESIDENT --LEAVE---> LEAVING  --end of the transfer--> RESIDENT

RESIDENT bytes are the bytes written last (undefined at first). ARRIVING bytes may be neither read nor written. LEAVING bytes
may be read but not written, so a second reader may start (LEAVING --LEAVE--> LEAVING). Bytes that the tensor does not have
are ABSENT.

I1: every frame is either free or used: free + used == total. It is used exactly when a tensor has bytes in its page.
I2: free frames are stored as intervals, sorted, disjoint, and never adjacent (adjacent ones are merged), so that cost
    depends on the fragmentation of the tier and not on the number of frames.
I3: the lowest frames are taken first. Runs stay long at the top, and the bytes of frames never used are never
    committed.
I4: frames that the tier does not have (`leave_out`) are in no free interval and do not count in the total. Nothing
    takes them or gives them back.
I5: a page has bytes of any number of tensors, in the order in which they were taken, and they do not overlap.
I6: a tensor's bytes follow each other, page by page. Only its first extent may begin inside a page, and only the last may
    end inside one. All are whole blocks.
I7: the state is one of a tensor's bytes, since no two tensors share a byte (I5): a page that two tensors share, or one cut by
    an update that does not begin at a page border, is read at one end while it is written at the other.
I8: two transfers over the same byte are both departures. Transfers over different bytes are independent.
I9: an illegal event raises InternalError and changes nothing.
I10: one writer of all of this: the Allocator with its Copier, under its lock.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lightning_ptm.errors import CapacityError, InternalError, UsageError, format_bytes
from lightning_ptm.memory.region import Region
from lightning_ptm.terms import BLOCK_BYTES, PageState, Tier


def round_up(value_bytes: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """Returns the next multiple of `unit_bytes`."""
    return -(-value_bytes // unit_bytes) * unit_bytes


class PageEvent(enum.Enum):
    """An event of bytes of a tensor's pages."""

    __hash__ = object.__hash__  # Enum's own hash is a Python function, which is slower

    ARRIVE = "arrive"
    """A transfer starts to write the bytes."""
    LEAVE = "leave"
    """A transfer starts to read the bytes."""
    FREE = "free"
    """The tensor gives the bytes up."""


TRANSITIONS: dict[tuple[PageState, PageEvent], PageState] = {
    (PageState.RESIDENT, PageEvent.ARRIVE): PageState.ARRIVING,
    (PageState.RESIDENT, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.LEAVING, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.RESIDENT, PageEvent.FREE): PageState.ABSENT,
}
"""Every legal transition; all others are illegal."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start_bytes, stop_bytes) of a tier, counted from its first page on."""

    start_bytes: int
    stop_bytes: int


@dataclass(frozen=True, slots=True)
class PageSpan:
    """A tensor's bytes in one page: whole blocks, so the last span may extend past the tensor's last element."""

    frame: int
    offset_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """A transfer's hold on bytes [start_bytes, stop_bytes) of a tensor; compared by identity."""

    pages: Pages
    start_bytes: int
    stop_bytes: int
    state: PageState

    @staticmethod
    def end(holds: Iterable[Hold]) -> None:
        """Ends holds, whether their transfers succeeded or failed; InternalError at one that has ended before."""
        for hold in holds:
            try:
                hold.pages.holds.remove(hold)
            except ValueError:
                raise InternalError(
                    f"a transfer of bytes {hold.start_bytes} to {hold.stop_bytes} of a tensor ended twice"
                ) from None


class Pages:
    """The bytes of one tensor in a tier, and the transfers that hold some of them. Offsets are counted from its first byte.

    Args:
        page_size: bytes of a page.
        extents: the tensor's bytes, in order. Only the first may begin inside a page and only the last may end inside one.
    """

    __slots__ = ("_starts", "extents", "holds", "page_size")

    def __init__(self, page_size: int, extents: Sequence[Extent]) -> None:
        self.page_size = page_size

        # State, changed by the Allocator and its Copier under their lock.
        self.extents = tuple(extents)
        self.holds: list[Hold] = []
        """Holds of the transfers under way."""
        self._starts = [0]
        """First byte of each extent, then the number of bytes."""
        for extent in extents:
            self._starts.append(self._starts[-1] + extent.stop_bytes - extent.start_bytes)

    @property
    def spans(self) -> tuple[PageSpan, ...]:
        """The bytes page by page."""
        size = self.page_size
        pieces = page_pieces(self.extents, size, joined=False)
        return tuple(
            PageSpan(each.start_bytes // size, each.start_bytes % size, each.stop_bytes - each.start_bytes)
            for each in pieces
        )

    @property
    def frames(self) -> list[int]:
        """The pages, in order."""
        size = self.page_size
        return [
            frame
            for extent in self.extents
            for frame in range(extent.start_bytes // size, -(-extent.stop_bytes // size))
        ]

    def between(self, start_bytes: int, stop_bytes: int) -> Sequence[Extent]:
        """Returns bytes [start_bytes, stop_bytes) of the tensor as extents of the tier."""
        if start_bytes >= stop_bytes:
            return ()
        index = bisect.bisect_right(self._starts, start_bytes) - 1
        found: list[Extent] = []
        while start_bytes < stop_bytes:
            end_bytes = min(stop_bytes, self._starts[index + 1])
            shift_bytes = self.extents[index].start_bytes - self._starts[index]
            found.append(Extent(start_bytes + shift_bytes, end_bytes + shift_bytes))
            start_bytes, index = end_bytes, index + 1
        return found

    def state(self, start_bytes: int, stop_bytes: int) -> PageState:
        """Returns the state of bytes [start_bytes, stop_bytes).

        ABSENT unless the tensor has all of them, ARRIVING if any of them is.
        """
        if not 0 <= start_bytes < stop_bytes <= self._starts[-1]:
            return PageState.ABSENT
        state = PageState.RESIDENT
        for hold in self.holds:
            if hold.start_bytes < stop_bytes and start_bytes < hold.stop_bytes:
                if hold.state is PageState.ARRIVING:
                    return PageState.ARRIVING
                state = hold.state
        return state

    def begin(self, start_bytes: int, stop_bytes: int, event: PageEvent) -> Hold:
        """Starts a transfer's hold on bytes; `event` is ARRIVE or LEAVE. End it once, with `Hold.end`."""
        state = self.state(start_bytes, stop_bytes)
        after = TRANSITIONS.get((state, event))
        if after is None:
            raise InternalError(f"bytes of a page that are {state.value} cannot {event.value}")
        hold = Hold(self, start_bytes, stop_bytes, after)
        self.holds.append(hold)
        return hold

    def check_free(self, start_bytes: int, stop_bytes: int) -> None:
        """Raises InternalError if the bytes may not be given up: a transfer holds some, or the tensor does not have them."""
        state = self.state(start_bytes, stop_bytes)
        if (state, PageEvent.FREE) not in TRANSITIONS:
            raise InternalError(f"bytes of a page that are {state.value} cannot {PageEvent.FREE.value}")

    def free(self) -> Sequence[Extent]:
        """Gives all bytes up and returns them; InternalError, and no change, if a transfer holds some."""
        if self.extents:
            self.check_free(0, self._starts[-1])
        extents, self.extents, self._starts = self.extents, (), [0]
        return extents


def page_pieces(extents: Sequence[Extent], page_size: int, *, joined: bool) -> list[Extent]:
    """Cuts extents at page borders; with `joined`, an extent's rest that is no longer than a page remains one piece."""
    found: list[Extent] = []
    for extent in extents:
        start, stop = extent.start_bytes, extent.stop_bytes
        while start < stop:
            whole = joined and stop - start <= page_size
            end = stop if whole else min(stop, start - start % page_size + page_size)
            found.append(Extent(start, end))
            start = end
    return found


def setting_of(tier: Tier) -> str:
    """Returns the setting to raise when a tier is too small, for callers that do not know whether there is a device."""
    return f"{tier.setting} (host_memory on a CPU-only machine)" if tier.computes else tier.setting


class PagePool:
    """The free frames of one tier. Not thread-safe: its owner, the Allocator, holds a lock.

    Args:
        tier: named in errors.
        total_frames: pages of the tier.
        page_size: bytes of a page, for errors only.
        uses: returns what the frames of a tier are for, for errors only.
    """

    def __init__(
        self, tier: Tier, total_frames: int, page_size: int, uses: Callable[[Tier], str] | None = None
    ) -> None:
        self.tier = tier
        self.total_frames = total_frames
        self.page_size = page_size
        self._uses = uses

        # State: free intervals [start, stop), as two parallel sorted lists.
        self._starts: list[int] = [0] if total_frames else []
        self._stops: list[int] = [total_frames] if total_frames else []
        self.used_frames = 0
        """Others read it."""
        self.stop = total_frames

    def leave_out(self, first: int, count: int) -> None:
        """Removes the free frames `first` to `first + count - 1` from the pool for good (I4)."""
        self.take_at(first, count)
        self.total_frames -= count
        self.used_frames -= count

    @property
    def free_frames(self) -> int:
        return self.total_frames - self.used_frames

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
        if count == 0:
            return range(0)
        for index, start in enumerate(self._starts):
            if self._stops[index] - start >= count:
                return self._cut_out(index, start, count)
        raise self.capacity_error(count, name, adjacent=True)

    def best_run(self, count: int, within: range) -> int | None:
        """Returns the first of `count` adjacent free frames of `within`; None if there are none.

        They are in the shortest free interval that has so many (best fit), the first of equal ones if `within` ascends, and
        at its lower end; the last, and at its upper end, if `within` descends.
        """
        ascends = within.step > 0
        lowest, limit = (within.start, within.stop) if ascends else (within.stop + 1, within.start + 1)
        best: tuple[int, int] | None = None
        intervals = zip(self._starts, self._stops, strict=True)
        for start, stop in intervals if ascends else reversed(list(intervals)):
            first, last = max(start, lowest), min(stop, limit)
            if last - first >= count and (best is None or last - first < best[0]):
                best = last - first, first if ascends else last - count
        return None if best is None else best[1]

    def take_at(self, first: int, count: int) -> Sequence[int]:
        """Takes the frames `first` to `first + count - 1`; InternalError, and no change, if one of them is used."""
        if count == 0:
            return range(first, first)
        if not self.has_run_at(first, count):
            raise InternalError(f"{self.tier.name} frames {first} to {first + count - 1} are not all free")
        return self._cut_out(bisect.bisect_right(self._starts, first) - 1, first, count)

    def _cut_out(self, index: int, first: int, count: int) -> range:
        """Takes frames out of the free interval at `index`."""
        start, stop = self._starts[index], self._stops[index]
        starts, stops = [], []
        if start < first:
            starts.append(start)
            stops.append(first)
        if first + count < stop:
            starts.append(first + count)
            stops.append(stop)
        self._starts[index : index + 1] = starts
        self._stops[index : index + 1] = stops
        self.used_frames += count
        return range(first, first + count)

    def take(self, count: int, *, name: str = "a tensor") -> Sequence[int]:
        """Takes any `count` frames, lowest first, ascending.

        Raises:
            CapacityError: fewer are free; nothing is taken.
        """
        if count > self.free_frames:
            raise self.capacity_error(count, name, adjacent=False)
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
            if first < 0 or stop > self.stop:
                raise InternalError(f"{self.tier.name} frames {first} to {stop - 1} are not in a pool of {self.stop}")
            index = bisect.bisect_left(self._stops, first + 1)
            if index < len(self._starts) and self._starts[index] < stop:
                raise InternalError(f"a frame from {first} to {stop - 1} of {self.tier.name} was given back while free")
        for first, stop in runs:
            self._insert(first, stop)

    def _insert(self, first: int, stop: int) -> None:
        """Adds a free interval that overlaps none, merged with adjacent ones (I2)."""
        index = bisect.bisect_left(self._starts, first)
        self.used_frames -= stop - first
        lower, upper = index, index
        if index > 0 and self._stops[index - 1] == first:
            lower, first = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == stop:
            upper, stop = index + 1, self._stops[index]
        self._starts[lower:upper] = [first]
        self._stops[lower:upper] = [stop]

    def capacity_error(self, count: int, name: str, *, adjacent: bool) -> CapacityError:
        """Returns the error that `count` frames, which have to be `adjacent`, are not free for a tensor."""
        size = self.page_size
        where = f"the {self.tier.name.lower()} tier has {self.free_frames} of {self.total_frames} pages free"
        if adjacent and count <= self.free_frames:
            where += f", {self.longest_run()} of them side by side"
        uses = "" if self._uses is None else self._uses(self.tier)
        return CapacityError(
            f"{name} needs {count} page{'' if count == 1 else 's'} ({format_bytes(count * size)}), and {where}; "
            f"raise {setting_of(self.tier)}{f' ({uses})' if uses else ''}"
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


@dataclass(frozen=True, slots=True)
class PagePart:
    """The bytes of one tensor in a page that it does not fill, counted in the tier."""

    tensor_id: int
    start_bytes: int
    stop_bytes: int


class PageTable:
    """Free frames and pages in use of one tier.

    Args:
        tier: named in errors.
        total_frames: pages of the tier.
        page_size: bytes of a page.
        uses: returns what the pages of a tier are for, quoted in errors.
    """

    def __init__(
        self, tier: Tier, total_frames: int, page_size: int, uses: Callable[[Tier], str] | None = None
    ) -> None:
        self.tier = tier
        self.page_size = page_size
        self.pool = PagePool(tier, total_frames, page_size, uses)

        # State. `_tail` is where the last shared_tail tensor ends.
        self._parts: dict[int, list[PagePart]] = {}
        """By frame, the tensors in a page that none of them fills. A page that one fills has no entry."""
        self._tail: PagePart | None = None
        self._peak_frames = 0

    @property
    def capacity_bytes(self) -> int:
        return self.pool.total_frames * self.page_size

    @property
    def free_bytes(self) -> int:
        return self.pool.free_frames * self.page_size

    @property
    def peak_bytes(self) -> int:
        return self._peak_frames * self.page_size

    def begin_peak(self) -> None:
        """Forgets the peak so far."""
        self._peak_frames = self.pool.used_frames

    def place(
        self, tensor_id: int, name: str, size_bytes: int, *, shared_tail: bool = False, contiguous: bool = False
    ) -> Pages:
        """Gives a tensor pages: shared tail and adjacent pages, else adjacent pages, else (unless `contiguous`) any.

        Raises:
            CapacityError: there are too few; nothing changes.
        """
        needed_bytes = round_up(size_bytes)
        if not needed_bytes:
            return Pages(self.page_size, ())
        start_bytes = self._open_tail(needed_bytes) if shared_tail else None
        if start_bytes is not None:
            more = -(-(start_bytes + needed_bytes) // self.page_size) - start_bytes // self.page_size - 1
            self.pool.take_at(start_bytes // self.page_size + 1, more)
            extents = [Extent(start_bytes, start_bytes + needed_bytes)]
        else:
            extents = self._take(needed_bytes, name, contiguous=contiguous)
        for extent in extents:
            for part in self._parts_of(tensor_id, extent):
                self._parts.setdefault(part.start_bytes // self.page_size, []).append(part)
        if shared_tail:
            self._tail = PagePart(tensor_id, extents[-1].start_bytes, extents[-1].stop_bytes)
        self._peak_frames = max(self._peak_frames, self.pool.used_frames)
        return Pages(self.page_size, extents)

    def place_at(self, tensor_id: int, size_bytes: int, frame: int) -> Pages:
        """Gives a tensor whole pages from `frame` on; InternalError, and no change, if one of them is used."""
        needed_bytes = round_up(size_bytes)
        if not needed_bytes:
            return Pages(self.page_size, ())
        self.pool.take_at(frame, -(-needed_bytes // self.page_size))
        extent = Extent(frame * self.page_size, frame * self.page_size + needed_bytes)
        for part in self._parts_of(tensor_id, extent):
            self._parts.setdefault(part.start_bytes // self.page_size, []).append(part)
        self._peak_frames = max(self._peak_frames, self.pool.used_frames)
        return Pages(self.page_size, [extent])

    def keep(self, tensor_id: int, extents: Sequence[Extent]) -> Pages:
        """Registers a tensor on pages that hold its bytes already; InternalError if another tensor has those bytes."""
        for extent in extents:
            parts = self._parts_of(tensor_id, extent)
            for part in parts:
                frame = part.start_bytes // self.page_size
                if frame not in self._parts:
                    self.pool.take_at(frame, 1)
                others = self._parts.setdefault(frame, [])
                for other in others:
                    if other.start_bytes < part.stop_bytes and part.start_bytes < other.stop_bytes:
                        raise InternalError(
                            f"tensors {other.tensor_id} and {tensor_id} overlap in {self.tier.name} page {frame}"
                        )
                others.append(part)
            whole = self._filled(extent)
            self.pool.take_at(whole.start, len(whole))
        self._peak_frames = max(self._peak_frames, self.pool.used_frames)
        return Pages(self.page_size, extents)

    def vacate(self, tensor_id: int, pages: Pages) -> None:
        """Takes a tensor's pages away; InternalError, and no change, if one is in a transfer."""
        empty: list[int] = []
        for extent in pages.free():
            empty.extend(self._filled(extent))
            for part in self._parts_of(tensor_id, extent):
                frame = part.start_bytes // self.page_size
                self._parts[frame].remove(part)
                if not self._parts[frame]:
                    del self._parts[frame]
                    empty.append(frame)
        self.pool.give_back(empty)

    def _filled(self, extent: Extent) -> range:
        """Returns the pages that an extent fills."""
        first, stop = -(-extent.start_bytes // self.page_size), extent.stop_bytes // self.page_size
        return range(first, max(first, stop))

    def _parts_of(self, tensor_id: int, extent: Extent) -> list[PagePart]:
        """Returns the parts of pages that an extent does not fill: none, or one at its start and one at its end."""
        start, stop, size = extent.start_bytes, extent.stop_bytes, self.page_size
        if start // size == stop // size:
            return [PagePart(tensor_id, start, stop)]
        parts = []
        if start % size:
            parts.append(PagePart(tensor_id, start, round_up(start, size)))
        if stop % size:
            parts.append(PagePart(tensor_id, stop - stop % size, stop))
        return parts

    def _take(self, needed_bytes: int, name: str, *, contiguous: bool) -> list[Extent]:
        size = self.page_size
        count = -(-needed_bytes // size)
        try:
            frames = self.pool.take_run(count, name=name)
            return [Extent(frames[0] * size, frames[0] * size + needed_bytes)]
        except CapacityError:
            if contiguous:
                raise
            frames = self.pool.take(count, name=name)
        extents: list[Extent] = []
        for frame in frames:
            start, size_here = frame * size, min(size, needed_bytes)
            needed_bytes -= size_here
            if extents and extents[-1].stop_bytes == start:
                extents[-1] = Extent(extents[-1].start_bytes, start + size_here)
            else:
                extents.append(Extent(start, start + size_here))
        return extents

    def _open_tail(self, needed_bytes: int) -> int | None:
        """Returns where the last shared_tail tensor ends if `needed_bytes` more can begin there, else None."""
        if self._tail is None:
            return None
        stop_bytes, size = self._tail.stop_bytes, self.page_size
        frame = stop_bytes // size
        parts = self._parts.get(frame)
        if stop_bytes % size == 0 or not parts or parts[-1].tensor_id != self._tail.tensor_id:
            return None  # the page is full, or the tensor was released since
        if parts[-1].stop_bytes != stop_bytes:
            return None  # the tensor was moved away and back since, and has other bytes of this page
        more_pages = -(-(stop_bytes + needed_bytes) // size) - frame - 1
        return stop_bytes if more_pages == 0 or self.pool.has_run_at(frame + 1, more_pages) else None


_NOWHERE = Pages(0, ())
"""Pages of a tensor without any. They are shared, as they never change: they have no byte."""


class PagedTensor:
    """A 1-D tensor on pages. Only the Allocator creates, places, moves and releases it; any code may read it.

    The tensor is contiguous if its bytes follow each other in the tier.
    """

    __slots__ = ("_view", "dtype", "id", "is_released", "moving", "name", "nbytes", "numel", "pages", "tier")

    def __init__(self, tensor_id: int, name: str, numel: int, dtype: torch.dtype, tier: Tier) -> None:
        self.id = tensor_id
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.nbytes = numel * dtype.itemsize
        """Bytes of the elements, without the padding to a whole block."""

        # State, changed by the Allocator under its lock.
        self.tier = tier
        self.pages = _NOWHERE
        self._view: torch.Tensor | None = None
        self.moving = False
        self.is_released = False

    @property
    def is_contiguous(self) -> bool:
        return len(self.pages.extents) <= 1

    def tensor(self) -> torch.Tensor:
        """Returns a view of the elements without a copy, shape (numel,), valid until released, moved or merged.

        Raises:
            UsageError: released, being moved, on disk, or scattered over pages (`merge` first).
        """
        if self._view is not None and not self.moving:
            return self._view
        if self.is_released:
            raise UsageError(f"{self.name} is released: its pages may hold another tensor; allocate it again")
        if self.moving:
            raise UsageError(f"{self.name} is being moved; wait for the transfer that move() returned")
        if not self.tier.addressable:
            raise UsageError(f"{self.name} is on disk and has no address; copy it to the device or host tier first")
        raise UsageError(f"{self.name} is scattered over {len(self.pages.frames)} pages; merge it first")

    def move(self, *, under_way: bool) -> None:
        """The Allocator has begun to move the tensor, or has ended it."""
        self.moving = under_way

    def place(self, tier: Tier, pages: Pages, region: Region | None) -> None:
        """Puts the tensor on pages of a tier (for the Allocator). `region`: the tier's bytes; None: they are on disk."""
        self.tier, self.pages, self._view = tier, pages, None
        if region is not None and len(pages.extents) <= 1:
            start_bytes = pages.extents[0].start_bytes if pages.extents else 0
            # In inference mode a view in another dtype would be an inference tensor, which autograd refuses for good.
            with torch.inference_mode(False):
                self._view = region.tensor[start_bytes : start_bytes + self.nbytes].view(self.dtype)

    def forget(self) -> None:
        """Marks the tensor as released (for the Allocator)."""
        self.pages, self._view, self.is_released = _NOWHERE, None, True

    def __repr__(self) -> str:
        where = "released" if self.is_released else f"{self.tier.name.lower()}, {len(self.pages.frames)} pages"
        return f"PagedTensor({self.name}, {self.numel} x {self.dtype}, {where})"
