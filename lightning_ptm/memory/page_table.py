"""The page table of one tier: its free frames, the tensors in each page (the paper's Page, section 4.1), and the peak.

Knows no bytes. Has one owner, the Allocator, which holds its lock around every call.

I1: a frame is used in the pool exactly when a tensor has bytes in its page.
I2: a page has bytes of any number of tensors, in the order in which they were taken, and they do not overlap.
I3: a tensor's bytes follow each other, page by page. Only its first extent may begin inside a page, and only the last may
    end inside one. All are whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.page_pool import PagePool
from lightning_ptm.memory.paged_tensor import Extent, Pages, round_up
from lightning_ptm.terms import Tier


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
        uses: what the pages are for, quoted in errors.
    """

    def __init__(self, tier: Tier, total_frames: int, page_size: int, uses: str = "") -> None:
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
