"""The bookkeeping of one tier: free frames, the tensors' parts of each page, the peak.

Knows no bytes. Has one owner, the Allocator, which holds its lock around every call.

I1: a frame is used in the pool exactly when the table has a part in it.
I2: a tensor's spans follow each other, page by page. Only the first may begin inside its page, and only the last may
    end inside its page. All are whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ptm.errors import CapacityError
from lightning_ptm.memory.page_pool import PagePool
from lightning_ptm.memory.page_ranges import lay_out, round_up
from lightning_ptm.memory.page_table import PageTable
from lightning_ptm.memory.paged_tensor import PageSpan
from lightning_ptm.terms import Tier


class TierLedger:
    """Pool and page table of one tier, always changed together.

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
        self.table = PageTable(tier, page_size)

        # State. `_tail` is the last span of the last shared_tail tensor.
        self._tail: PageSpan | None = None
        self._tail_tensor_id = -1
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
    ) -> tuple[PageSpan, ...]:
        """Gives a tensor pages: shared tail and adjacent pages, else adjacent pages, else (unless `contiguous`) any.

        Raises:
            CapacityError: there are too few; nothing changes.
        """
        needed_bytes = round_up(size_bytes)
        tail = self._open_tail(needed_bytes) if shared_tail and needed_bytes else None
        if tail is not None:
            offset_bytes = tail.offset_bytes + tail.bytes
            frames = [tail.frame, *self.pool.take_at(tail.frame + 1, self._pages(needed_bytes + offset_bytes) - 1)]
        else:
            offset_bytes = 0
            frames = self._take(self._pages(needed_bytes), name, contiguous=contiguous)
        spans = lay_out(frames, self.page_size, offset_bytes, needed_bytes)
        for span in spans:
            self.table.take(span.frame, tensor_id, span.offset_bytes, span.offset_bytes + span.bytes)
        if shared_tail and spans:
            self._tail, self._tail_tensor_id = spans[-1], tensor_id
        self._peak_frames = max(self._peak_frames, self.pool.used_frames)
        return spans

    def keep(self, tensor_id: int, spans: Sequence[PageSpan]) -> None:
        """Registers a tensor on pages that hold its bytes already; InternalError if another tensor has those bytes."""
        for span in spans:
            if not self.table.parts(span.frame):
                self.pool.take_at(span.frame, 1)
            self.table.take(span.frame, tensor_id, span.offset_bytes, span.offset_bytes + span.bytes)
        self._peak_frames = max(self._peak_frames, self.pool.used_frames)

    def check_vacate(self, tensor_id: int, spans: Sequence[PageSpan]) -> None:
        """Raises InternalError if a page of the tensor is in a transfer."""
        for span in spans:
            self.table.check_free(span.frame, tensor_id)

    def vacate(self, tensor_id: int, spans: Sequence[PageSpan]) -> None:
        """Takes a tensor's pages away; InternalError, and no change, if one is in a transfer."""
        self.check_vacate(tensor_id, spans)
        self.pool.give_back([span.frame for span in spans if self.table.free(span.frame, tensor_id)])

    def _take(self, count: int, name: str, *, contiguous: bool) -> list[int]:
        try:
            return [*self.pool.take_run(count, name=name)]
        except CapacityError:
            if contiguous:
                raise
            return [*self.pool.take(count, name=name)]

    def _open_tail(self, needed_bytes: int) -> PageSpan | None:
        """Returns the last shared_tail tensor's last span if `needed_bytes` more can begin after it, else None."""
        tail = self._tail
        if tail is None:
            return None
        stop_bytes = tail.offset_bytes + tail.bytes
        parts = self.table.parts(tail.frame)
        if stop_bytes == self.page_size or not parts or parts[-1].tensor_id != self._tail_tensor_id:
            return None  # the page is full, or the tensor was released since
        if parts[-1].stop_bytes != stop_bytes:
            return None  # the tensor was moved away and back since, and has other bytes of this page
        more_pages = self._pages(needed_bytes + stop_bytes) - 1
        return tail if more_pages == 0 or self.pool.has_run_at(tail.frame + 1, more_pages) else None

    def _pages(self, size_bytes: int) -> int:
        return -(-size_bytes // self.page_size)
