from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.paged_tensor import TRANSITIONS, Extent, Hold, PageEvent, Pages, PageTable
from lightning_ptm.terms import BLOCK_BYTES, PageState, Tier

PAGE = 65536
LEGAL = {
    (PageState.RESIDENT, PageEvent.ARRIVE): PageState.ARRIVING,
    (PageState.RESIDENT, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.LEAVING, PageEvent.LEAVE): PageState.LEAVING,
    (PageState.RESIDENT, PageEvent.FREE): PageState.ABSENT,
}
EVERY_PAIR = list(itertools.product(PageState, PageEvent))


def pages_in(state: PageState) -> Pages:
    """One page in a chosen state."""
    pages = Pages(PAGE, [Extent(0, PAGE)])
    if state is PageState.ABSENT:
        pages.free()
    if state is PageState.ARRIVING:
        pages.begin(0, PAGE, PageEvent.ARRIVE)
    if state is PageState.LEAVING:
        pages.begin(0, PAGE, PageEvent.LEAVE)
    return pages


@pytest.mark.parametrize(("state", "event"), EVERY_PAIR)
def test_every_state_and_event(state: PageState, event: PageEvent) -> None:
    pages = pages_in(state)
    assert pages.state(0, PAGE) is state
    before = (pages.extents, list(pages.holds))

    def apply() -> None:
        if event is PageEvent.FREE and state is not PageState.ABSENT:
            pages.free()
        else:
            pages.begin(0, PAGE, event)

    if (state, event) in LEGAL:
        apply()
        assert pages.state(0, PAGE) is LEGAL[state, event]
    else:
        with pytest.raises(InternalError, match=f"{state.value} cannot {event.value}"):
            apply()
        assert pages.state(0, PAGE) is state and before == (pages.extents, pages.holds)


def test_the_table_is_that_of_the_documentation() -> None:
    assert TRANSITIONS == LEGAL


def test_halves_of_a_page_travel_both_ways_at_once() -> None:
    pages = Pages(PAGE, [Extent(3 * PAGE, 4 * PAGE)])
    arriving = pages.begin(0, 4096, PageEvent.ARRIVE)
    leaving = pages.begin(4096, PAGE, PageEvent.LEAVE)
    assert pages.state(0, 4096) is PageState.ARRIVING
    assert pages.state(4096, PAGE) is PageState.LEAVING
    with pytest.raises(InternalError):
        pages.begin(0, PAGE, PageEvent.LEAVE)
    Hold.end([arriving, leaving])
    assert pages.state(0, PAGE) is PageState.RESIDENT


def test_transfer_cannot_end_twice() -> None:
    hold = Pages(PAGE, [Extent(0, PAGE)]).begin(0, PAGE, PageEvent.LEAVE)
    Hold.end([hold])
    with pytest.raises(InternalError, match="ended twice"):
        Hold.end([hold])


CELLS = 6
CELL = 4096
EXTENTS = [Extent(2 * CELL, 4 * CELL), Extent(8 * CELL, 12 * CELL)]


@given(
    st.lists(st.tuples(st.sampled_from([*PageEvent, None]), st.integers(0, CELLS), st.integers(1, CELLS)), max_size=40)
)
def test_random_transfers_agree_with_a_map_of_every_block(steps: list[tuple[PageEvent | None, int, int]]) -> None:
    """The model: the readers and the writers of each block of a tensor in two extents."""
    pages = Pages(4 * CELL, EXTENTS)
    readers, writers = [0] * CELLS, [0] * CELLS
    holds: list[tuple[Hold, range, list[int]]] = []
    gone = False
    for event, start, length in steps:
        cells = range(start, start + length)
        before = (pages.extents, list(pages.holds))
        try:
            if event is None:
                legal = True
                if holds:
                    hold, held, counts = holds.pop(start % len(holds))
                    Hold.end([hold])
                    for cell in held:
                        counts[cell] -= 1
            elif event is PageEvent.FREE:
                legal = not any(readers) and not any(writers)
                pages.free()
                gone = True
            else:
                legal = not gone and cells.stop <= CELLS and not any(writers[cell] for cell in cells)
                if event is PageEvent.ARRIVE:
                    legal = legal and not any(readers[cell] for cell in cells)
                hold = pages.begin(start * CELL, (start + length) * CELL, event)
                counts = writers if event is PageEvent.ARRIVE else readers
                for cell in cells:
                    counts[cell] += 1
                holds.append((hold, cells, counts))
            assert legal
        except InternalError:
            assert not legal
            assert before == (pages.extents, pages.holds), "a refused event changed the pages"
        for cell in range(CELLS):
            state = pages.state(cell * CELL, (cell + 1) * CELL)
            if gone:
                assert state is PageState.ABSENT
            elif writers[cell]:
                assert state is PageState.ARRIVING
            elif readers[cell]:
                assert state is PageState.LEAVING
            else:
                assert state is PageState.RESIDENT


@given(st.integers(0, CELLS), st.integers(0, CELLS))
def test_bytes_are_found_in_the_extents(start: int, stop: int) -> None:
    everywhere = [block for extent in EXTENTS for block in range(extent.start_bytes, extent.stop_bytes, CELL)]
    found = Pages(4 * CELL, EXTENTS).between(start * CELL, stop * CELL)
    assert [block for extent in found for block in range(extent.start_bytes, extent.stop_bytes, CELL)] == (
        everywhere[start:stop]
    )


def test_pages_are_listed_one_by_one() -> None:
    pages = Pages(4 * CELL, EXTENTS)
    assert pages.frames == [0, 2]
    assert [(span.frame, span.offset_bytes, span.bytes) for span in pages.spans] == [(0, 8192, 8192), (2, 0, 16384)]
    longer = Pages(4 * CELL, [Extent(2 * CELL, 9 * CELL)])
    assert longer.frames == [span.frame for span in longer.spans] == [0, 1, 2]


# The page table of a tier.


def test_a_page_is_free_when_its_last_tensor_is_gone() -> None:
    table = PageTable(Tier.HOST, 2, PAGE)
    placed = [table.place(tensor, "x", 4096, shared_tail=True) for tensor in range(PAGE // 4096)]
    assert table.free_bytes == PAGE
    for tensor, pages in enumerate(placed[:-1]):
        table.vacate(tensor, pages)
        assert table.free_bytes == PAGE
    table.vacate(len(placed) - 1, placed[-1])
    assert table.free_bytes == 2 * PAGE


def test_pages_in_a_transfer_are_not_given_back() -> None:
    table = PageTable(Tier.DISK, 4, PAGE)
    pages = table.place(1, "x", 3 * PAGE)
    hold = pages.begin(2 * PAGE, 2 * PAGE + 4096, PageEvent.LEAVE)
    with pytest.raises(InternalError, match="leaving cannot free"):
        table.vacate(1, pages)
    assert table.free_bytes == PAGE
    Hold.end([hold])
    table.vacate(1, pages)
    assert table.free_bytes == table.capacity_bytes


def test_bytes_that_another_tensor_has_cannot_be_kept() -> None:
    table = PageTable(Tier.DISK, 4, PAGE)
    table.keep(1, [Extent(4096, PAGE + 4096)])
    table.keep(2, [Extent(PAGE + 4096, PAGE + 8192)])
    with pytest.raises(InternalError, match="tensors 2 and 3 overlap in DISK page 1"):
        table.keep(3, [Extent(PAGE + 4096, PAGE + 12288)])
    with pytest.raises(InternalError, match="not all free"):
        table.keep(3, [Extent(0, 2 * PAGE)])


STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 3 * CELLS), st.booleans(), st.booleans()), max_size=40
)


@given(STEPS)
def test_random_tensors_agree_with_a_map_of_every_block(steps: list[tuple[bool, int, int, bool, bool]]) -> None:
    """The model: the owner of each block of a tier."""
    blocks, frames = 4, 8
    table = PageTable(Tier.DISK, frames, blocks * CELL)
    owners: list[int | None] = [None] * (blocks * frames)
    placed: dict[int, Pages] = {}
    for places, tensor, length, shared_tail, contiguous in steps:
        if not places:
            if tensor in placed:
                table.vacate(tensor, placed.pop(tensor))
                owners = [None if owner == tensor else owner for owner in owners]
        elif tensor not in placed:
            try:
                pages = table.place(tensor, "x", length * CELL - 1, shared_tail=shared_tail, contiguous=contiguous)
            except CapacityError:
                continue
            placed[tensor] = pages
            assert len(pages.extents) == 1 or not contiguous
            found = [
                block // CELL for each in pages.extents for block in range(each.start_bytes, each.stop_bytes, CELL)
            ]
            assert len(found) == length
            assert all(owners[block] is None for block in found), "a block has two owners"
            for block in found:
                owners[block] = tensor
        used = sum(any(owner is not None for owner in owners[at : at + blocks]) for at in range(0, len(owners), blocks))
        assert table.free_bytes == (frames - used) * blocks * CELL


def test_a_tail_that_has_moved_away_and_back_is_followed_where_it_ends_now() -> None:
    table = PageTable(Tier.HOST, 4, 4 * BLOCK_BYTES)
    first = table.place(1, "first", BLOCK_BYTES, shared_tail=True)
    frames = first.frames
    table.vacate(1, first)
    again = table.place(1, "first", 3 * BLOCK_BYTES)
    assert again.frames == frames
    second = table.place(2, "second", BLOCK_BYTES, shared_tail=True)
    assert second.frames != again.frames
    table.vacate(1, again)
    table.vacate(2, second)
    assert table.free_bytes == table.capacity_bytes
