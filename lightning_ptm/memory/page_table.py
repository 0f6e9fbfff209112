"""State of each page's bytes (absent, resident, arriving, leaving) and the tensors that own them (the paper's Page).

    ABSENT --TAKE--> RESIDENT --ARRIVE--> ARRIVING --ARRIVED--> RESIDENT
                     RESIDENT --LEAVE---> LEAVING  --LEFT-----> RESIDENT --FREE--> ABSENT

Guarantees by state: RESIDENT bytes are the bytes written last (undefined after TAKE). ARRIVING bytes may be neither
read nor written. LEAVING bytes may be read but not written, so a second reader may start (LEAVING --LEAVE--> LEAVING).

I1: a page (the paper's section 4.1) holds parts of any number of tensors, in the order in which they were taken, and
    the parts do not overlap.
I2: two transfers over the same byte are both departures. Transfers over different bytes of a page are independent. The
    state is one of bytes and not of pages, because a page shared by two units, or one cut by an update that does not
    begin at a page border, is read at one end while it is written at the other.
I3: an illegal event raises InternalError and changes nothing.
I4: one writer: the Allocator, under its lock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lightning_ptm.errors import InternalError
from lightning_ptm.terms import PageState, Tier


class PageEvent(enum.Enum):
    """An event of bytes of a page."""

    __hash__ = object.__hash__  # Enum's own hash is a Python function, which is slower

    TAKE = "take"
    """A tensor gets the bytes."""
    ARRIVE = "arrive"
    """A transfer starts to write the bytes."""
    ARRIVED = "arrived"
    LEAVE = "leave"
    """A transfer starts to read the bytes."""
    LEFT = "left"
    FREE = "free"
    """The tensor gives the bytes up."""


TRANSITIONS: dict[tuple[PageState, PageEvent], PageState] = {
    (PageState.ABSENT, PageEvent.TAKE): PageState.RESIDENT,
    (PageState.RESIDENT, PageEvent.ARRIVE): PageState.ARRIVING,
    (PageState.ARRIVING, PageEvent.ARRIVED): PageState.RESIDENT,
    (PageState.RESIDENT, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.LEAVING, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.LEAVING, PageEvent.LEFT): PageState.RESIDENT,
    (PageState.RESIDENT, PageEvent.FREE): PageState.ABSENT,
}
"""Every legal transition; all others are illegal."""


def next_state(state: PageState, event: PageEvent) -> PageState:
    """Returns the state after `event`; InternalError if the table does not allow it."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(f"bytes of a page that are {state.value} cannot {event.value}") from None


@dataclass(frozen=True, slots=True)
class PagePart:
    """The bytes of one tensor in one page."""

    tensor_id: int
    start_bytes: int
    stop_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A transfer's hold on bytes [start_bytes, stop_bytes) of one frame; compared by identity."""

    frame: int
    start_bytes: int
    stop_bytes: int
    state: PageState


class PageTable:
    """Parts and flights of every page of one tier. Cost per call does not depend on the number of frames.

    Args:
        tier: named in errors.
        page_size: bytes of a page.
    """

    def __init__(self, tier: Tier, page_size: int) -> None:
        self.tier = tier
        self.page_size = page_size

        # State. `_parts` has entries for frames in use only, `_flights` for frames in a transfer only.
        self._parts: dict[int, tuple[PagePart, ...]] = {}
        self._flights: dict[int, list[Flight]] = {}

    def parts(self, frame: int) -> tuple[PagePart, ...]:
        """Returns the parts of a page, in the order in which they were taken; empty for a page that is ABSENT."""
        return self._parts.get(frame, ())

    def available_bytes(self, frame: int) -> int:
        """Returns the bytes of a page that belong to no tensor (the paper's available_bytes)."""
        return self.page_size - sum(part.stop_bytes - part.start_bytes for part in self.parts(frame))

    def state(self, frame: int, start_bytes: int, stop_bytes: int) -> PageState:
        """Returns the state of bytes [start_bytes, stop_bytes).

        ABSENT unless they are in one tensor's part, ARRIVING if any of them is.
        """
        if not any(part.start_bytes <= start_bytes and stop_bytes <= part.stop_bytes for part in self.parts(frame)):
            return PageState.ABSENT
        state = PageState.RESIDENT
        for flight in self._flights.get(frame, ()):
            if flight.start_bytes < stop_bytes and start_bytes < flight.stop_bytes:
                if flight.state is PageState.ARRIVING:
                    return PageState.ARRIVING
                state = flight.state
        return state

    def take(self, frame: int, tensor_id: int, start_bytes: int, stop_bytes: int) -> None:
        """Gives bytes of a page to a tensor."""
        parts = self.parts(frame)
        overlaps = any(part.start_bytes < stop_bytes and start_bytes < part.stop_bytes for part in parts)
        self._check(frame, PageState.RESIDENT if overlaps else PageState.ABSENT, PageEvent.TAKE)
        if any(part.tensor_id == tensor_id for part in parts):
            raise InternalError(f"tensor {tensor_id} is already in {self.tier.name} page {frame}")
        if not 0 <= start_bytes < stop_bytes <= self.page_size:
            raise InternalError(f"bytes {start_bytes} to {stop_bytes} are not in a page of {self.page_size} bytes")
        self._parts[frame] = (*parts, PagePart(tensor_id, start_bytes, stop_bytes))

    def free(self, frame: int, tensor_id: int) -> bool:
        """Takes a tensor's bytes of a page away; True if the page is now empty and its frame can be given back."""
        mine = self.check_free(frame, tensor_id)
        rest = tuple(part for part in self._parts[frame] if part is not mine)
        if rest:
            self._parts[frame] = rest
        else:
            del self._parts[frame]
        return not rest

    def check_free(self, frame: int, tensor_id: int) -> PagePart:
        """Returns the part that `free` would take away; InternalError if that is not allowed."""
        for part in self.parts(frame):
            if part.tensor_id == tensor_id:
                self._check(frame, self.state(frame, part.start_bytes, part.stop_bytes), PageEvent.FREE)
                return part
        raise InternalError(f"tensor {tensor_id} is not in {self.tier.name} page {frame}")

    def begin(self, frame: int, start_bytes: int, stop_bytes: int, event: PageEvent) -> Flight:
        """Starts a transfer's hold on bytes; `event` is ARRIVE or LEAVE. End it once, with `end`."""
        state = self._check(frame, self.state(frame, start_bytes, stop_bytes), event)
        if state is PageState.RESIDENT or state is PageState.ABSENT:
            raise InternalError(f"{event.value} is not the start of a transfer")
        flight = Flight(frame, start_bytes, stop_bytes, state)
        self._flights.setdefault(frame, []).append(flight)
        return flight

    def end(self, flight: Flight) -> None:
        """Ends a transfer's hold (ARRIVED or LEFT, by how it began), whether the transfer succeeded or failed."""
        flights = self._flights.get(flight.frame, [])
        if flight not in flights:
            raise InternalError(f"a transfer of {self.tier.name} page {flight.frame} ended twice")
        self._check(flight.frame, flight.state, _END[flight.state])
        flights.remove(flight)
        if not flights:
            del self._flights[flight.frame]

    def _check(self, frame: int, state: PageState, event: PageEvent) -> PageState:
        try:
            return next_state(state, event)
        except InternalError as error:
            raise InternalError(f"{self.tier.name} page {frame}: {error}") from None


_END = {PageState.ARRIVING: PageEvent.ARRIVED, PageState.LEAVING: PageEvent.LEFT}
