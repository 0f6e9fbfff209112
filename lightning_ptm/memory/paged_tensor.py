"""A paged tensor: elements of one dtype on pages of one tier (the paper's Tensor, section 4.1), and the state of its bytes.

    RESIDENT --ARRIVE--> ARRIVING --end of the transfer--> RESIDENT --FREE--> ABSENT
    RESIDENT --LEAVE---> LEAVING  --end of the transfer--> RESIDENT

Guarantees by state: RESIDENT bytes are the bytes written last (undefined at first). ARRIVING bytes may be neither read nor
written. LEAVING bytes may be read but not written, so a second reader may start (LEAVING --LEAVE--> LEAVING). Bytes that
the tensor does not have are ABSENT.

I1: the state is one of a tensor's bytes, since no two tensors share a byte (page_table.py): a page that two tensors share,
    or one cut by an update that does not begin at a page border, is read at one end while it is written at the other.
I2: two transfers over the same byte are both departures. Transfers over different bytes are independent.
I3: an illegal event raises InternalError and changes nothing.
I4: one writer: the Allocator with its Copier, under its lock.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ptm.errors import InternalError, UsageError
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

    def end(self) -> None:
        """Ends the hold, whether the transfer succeeded or failed; InternalError if it has ended before."""
        try:
            self.pages.holds.remove(self)
        except ValueError:
            raise InternalError(
                f"a transfer of bytes {self.start_bytes} to {self.stop_bytes} of a tensor ended twice"
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

    def place(self, tier: Tier, pages: Pages, view: torch.Tensor | None) -> None:
        """Puts the tensor on pages (for the Allocator); `view` is None if they have no single address."""
        self.tier, self.pages, self._view = tier, pages, view

    def forget(self) -> None:
        """Marks the tensor as released (for the Allocator)."""
        self.pages, self._view, self.is_released = _NOWHERE, None, True

    def __repr__(self) -> str:
        where = "released" if self.is_released else f"{self.tier.name.lower()}, {len(self.pages.frames)} pages"
        return f"PagedTensor({self.name}, {self.numel} x {self.dtype}, {where})"
