"""The pages that rows fill are those that the page table gives; a pool is the sum of its rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.memory.paged_tensor import PageTable
from lightning_ptm.planning.inventory import Inventory, Lifetime, Row, What, pages_of, with_room
from lightning_ptm.terms import BLOCK_BYTES, TIERS, Tier

PAGE = 16 * BLOCK_BYTES


def row(blocks: int, *, shares: bool = True, count: int = 1, tier: Tier = Tier.HOST) -> Row:
    return Row(What.STATES, tier, blocks * BLOCK_BYTES - 1, "uint8", 1, count, name="a row", shares_pages=shares)


rows = st.lists(
    st.builds(row, st.integers(1, 40), shares=st.booleans(), count=st.integers(1, 3)), min_size=1, max_size=12
)


@given(rows)
def test_pages_are_those_of_the_page_table(rows: list[Row]) -> None:
    table = PageTable(Tier.HOST, 200, PAGE)
    for at, each in enumerate(rows):
        for again in range(each.count):
            table.place(100 * at + again, each.name, each.numel * each.item_bytes, shared_tail=each.shares_pages)
        assert pages_of(rows[: at + 1], PAGE) == 200 - table.pool.free_frames


def test_a_row_without_elements_fills_nothing() -> None:
    empty = Row(What.STATES, Tier.HOST, 0, "float32", 4, shares_pages=True)
    assert pages_of([row(3), empty, row(3)], PAGE) == 1


def test_a_pool_is_the_sum_of_its_rows() -> None:
    given = [row(3), row(3, shares=False, count=2), row(40, tier=Tier.DEVICE)]
    found = with_room(given, PAGE, {Tier.HOST: 2}, PAGE + 1)
    assert found.held_bytes(Tier.HOST, Lifetime.RUN) == 3 * PAGE
    assert found.pool_bytes(Tier.HOST) == 5 * PAGE  # with two pages of transit
    assert found.pool_bytes(Tier.DEVICE) == (3 + 2) * PAGE  # the room for gathered units is whole pages
    assert found.pool_bytes(Tier.DISK) == 0
    for tier in TIERS:
        assert sum(found.by_what(tier).values()) == found.pool_bytes(tier)
    assert found.by_what(Tier.HOST) == {What.STATES: 3 * PAGE, What.TRANSIT: 2 * PAGE}


def test_rows_of_a_flat() -> None:
    of_flats = [Row(What.STATES, Tier.HOST, 1, "float32", 4, flat=flat) for flat in (0, 1, 1)]
    found = Inventory(PAGE, tuple(of_flats))
    assert [found.of_flat(What.STATES, flat) for flat in (0, 1, 2)] == [of_flats[:1], of_flats[1:], ()]
    assert found.of(What.STATES) == tuple(of_flats)
    assert not found.of(What.MASTERS)


@pytest.mark.parametrize("what", What)
def test_users_read_words(what: What) -> None:
    assert what.value == what.value.lower()
