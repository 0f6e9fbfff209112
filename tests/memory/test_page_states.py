from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.ledger import TierLedger
from lightning_ptm.memory.page_table import TRANSITIONS, Flight, PageEvent, PageTable, next_state
from lightning_ptm.terms import BLOCK_BYTES, PageState, Tier

PAGE = 65536
TENSOR = 7
LEGAL = {
    (PageState.ABSENT, PageEvent.TAKE): PageState.RESIDENT,
    (PageState.RESIDENT, PageEvent.ARRIVE): PageState.ARRIVING,
    (PageState.ARRIVING, PageEvent.ARRIVED): PageState.RESIDENT,
    (PageState.RESIDENT, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.LEAVING, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.LEAVING, PageEvent.LEFT): PageState.RESIDENT,
    (PageState.RESIDENT, PageEvent.FREE): PageState.ABSENT,
}
EVERY_PAIR = list(itertools.product(PageState, PageEvent))


@pytest.mark.parametrize(("state", "event"), EVERY_PAIR)
def test_table_for_every_state_and_event(state: PageState, event: PageEvent) -> None:
    if (state, event) in LEGAL:
        assert next_state(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(InternalError, match=f"{state.value} cannot {event.value}"):
            next_state(state, event)


def test_every_state_can_be_reached_and_left() -> None:
    assert {before for before, _ in TRANSITIONS} == set(PageState) == set(TRANSITIONS.values())


class Page:
    """One page in a chosen state, and the events applied through the table's own methods."""

    def __init__(self, state: PageState) -> None:
        self.table = PageTable(Tier.DISK, PAGE)
        self.flight = Flight(0, 0, PAGE, PageState.ARRIVING)  # of no transfer, until one begins
        if state is not PageState.ABSENT:
            self.table.take(0, TENSOR, 0, PAGE)
        if state is PageState.ARRIVING:
            self.flight = self.table.begin(0, 0, PAGE, PageEvent.ARRIVE)
        if state is PageState.LEAVING:
            self.flight = self.table.begin(0, 0, PAGE, PageEvent.LEAVE)

    def apply(self, event: PageEvent) -> None:
        if event is PageEvent.TAKE:
            self.table.take(0, TENSOR, 0, PAGE)
        elif event is PageEvent.FREE:
            self.table.free(0, TENSOR)
        elif event in (PageEvent.ARRIVED, PageEvent.LEFT):
            self.table.end(self.flight)
        else:
            self.table.begin(0, 0, PAGE, event)

    @property
    def state(self) -> PageState:
        return self.table.state(0, 0, PAGE)


ENDS = {PageState.ARRIVING: PageEvent.ARRIVED, PageState.LEAVING: PageEvent.LEFT}


@pytest.mark.parametrize(("state", "event"), EVERY_PAIR)
def test_page_for_every_state_and_event(state: PageState, event: PageEvent) -> None:
    if event in ENDS.values() and state in ENDS and ENDS[state] is not event:
        return  # a flight ends by its own event: the table's `end` has no way to ask for the other
    page = Page(state)
    assert page.state is state
    if (state, event) in LEGAL:
        page.apply(event)
        assert page.state is LEGAL[state, event]
    else:
        with pytest.raises(InternalError):
            page.apply(event)
        assert page.state is state


def test_a_page_holds_as_many_tensors_as_have_room_each_once() -> None:
    table = PageTable(Tier.HOST, PAGE)
    for tensor in range(PAGE // 4096):
        table.take(0, tensor, tensor * 4096, (tensor + 1) * 4096)
    assert [part.tensor_id for part in table.parts(0)] == list(range(PAGE // 4096))
    assert table.available_bytes(0) == 0
    with pytest.raises(InternalError, match="resident cannot take"):
        table.take(0, 99, 4096, 8192)
    assert not table.free(0, 1) and table.available_bytes(0) == 4096
    with pytest.raises(InternalError, match="tensor 2 is already in HOST page 0"):
        table.take(0, 2, 4096, 8192)
    assert not any(table.free(0, tensor) for tensor in range(2, PAGE // 4096)) and table.free(0, 0)


def test_page_is_empty_when_its_second_tensor_is_gone() -> None:
    table = PageTable(Tier.HOST, PAGE)
    table.take(5, 1, 0, 4096)
    table.take(5, 2, 4096, PAGE)
    assert table.free(5, 1) is False
    assert table.free(5, 2) is True
    assert table.available_bytes(5) == PAGE


def test_halves_of_a_page_travel_both_ways_at_once() -> None:
    table = PageTable(Tier.DISK, PAGE)
    table.take(0, 1, 0, PAGE)
    arriving = table.begin(0, 0, 4096, PageEvent.ARRIVE)
    leaving = table.begin(0, 4096, PAGE, PageEvent.LEAVE)
    assert table.state(0, 0, 4096) is PageState.ARRIVING
    assert table.state(0, 4096, PAGE) is PageState.LEAVING
    with pytest.raises(InternalError):
        table.begin(0, 0, PAGE, PageEvent.LEAVE)
    table.end(arriving)
    table.end(leaving)
    assert table.state(0, 0, PAGE) is PageState.RESIDENT


def test_transfer_cannot_end_twice() -> None:
    table = PageTable(Tier.DISK, PAGE)
    table.take(0, 1, 0, PAGE)
    flight = table.begin(0, 0, PAGE, PageEvent.LEAVE)
    table.end(flight)
    with pytest.raises(InternalError, match="ended twice"):
        table.end(flight)


CELLS = 6
CELL = 4096
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "free", "arrive", "leave", "end"]),
        st.integers(0, 3),
        st.integers(0, CELLS - 1),
        st.integers(1, CELLS),
    ),
    max_size=40,
)


@given(STEPS)
def test_random_sequences_agree_with_a_map_of_every_block(steps: list[tuple[str, int, int, int]]) -> None:
    """The model: for each block of a page its owner, its readers and its writers."""
    table = PageTable(Tier.DISK, CELLS * CELL)
    owner: list[int | None] = [None] * CELLS
    readers, writers = [0] * CELLS, [0] * CELLS
    flights: list[tuple[Flight, range, list[int]]] = []
    for action, tensor, start, length in steps:
        stop = min(start + length, CELLS)
        cells = range(start, stop)
        before = (dict(table._parts), {frame: list(flights) for frame, flights in table._flights.items()})
        try:
            if action == "take":
                legal = all(owner[cell] is None for cell in cells) and tensor not in owner
                table.take(0, tensor, start * CELL, stop * CELL)
                for cell in cells:
                    owner[cell] = tensor
            elif action == "free":
                mine = [cell for cell in range(CELLS) if owner[cell] == tensor]
                legal = bool(mine) and not any(readers[cell] or writers[cell] for cell in mine)
                table.free(0, tensor)
                owner = [None if one == tensor else one for one in owner]
            elif action == "end":
                legal = bool(flights)
                if flights:
                    flight, held, counts = flights.pop(tensor % len(flights))
                    table.end(flight)
                    for cell in held:
                        counts[cell] -= 1
                else:
                    continue
            else:
                one_owner = len({owner[cell] for cell in cells}) == 1 and owner[start] is not None
                legal = one_owner and not any(writers[cell] for cell in cells)
                if action == "arrive":
                    legal = legal and not any(readers[cell] for cell in cells)
                flight = table.begin(0, start * CELL, stop * CELL, PageEvent(action))
                counts = writers if action == "arrive" else readers
                for cell in cells:
                    counts[cell] += 1
                flights.append((flight, cells, counts))
            assert legal
        except InternalError:
            assert not legal
            assert before == (table._parts, table._flights), "a refused event changed the table"
        for cell in range(CELLS):
            state = table.state(0, cell * CELL, (cell + 1) * CELL)
            if owner[cell] is None:
                assert state is PageState.ABSENT
            elif writers[cell]:
                assert state is PageState.ARRIVING
            elif readers[cell]:
                assert state is PageState.LEAVING
            else:
                assert state is PageState.RESIDENT


def test_a_tail_that_has_moved_away_and_back_is_followed_where_it_ends_now() -> None:
    ledger = TierLedger(Tier.HOST, 4, 4 * BLOCK_BYTES, "")
    first = ledger.place(1, "first", BLOCK_BYTES, shared_tail=True)
    ledger.vacate(1, first)
    again = ledger.place(1, "first", 3 * BLOCK_BYTES)
    assert again[0].frame == first[0].frame
    second = ledger.place(2, "second", BLOCK_BYTES, shared_tail=True)
    assert second[0].frame != again[0].frame
    ledger.vacate(1, again)
    ledger.vacate(2, second)
    assert ledger.free_bytes == ledger.capacity_bytes
