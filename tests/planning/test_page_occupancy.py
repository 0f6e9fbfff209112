"""The memory-over-ticks tree against a plain list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.planning.page_occupancy import Occupancy


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 20), st.data())
def test_the_tree_answers_as_a_list_would(tick_count: int, data: st.DataObject) -> None:
    tree = Occupancy(tick_count)
    plain = [0] * (2 * tick_count + 2)
    instants = st.integers(0, len(plain) - 1)
    for _ in range(data.draw(st.integers(0, 12))):
        first, last, pages = data.draw(instants), data.draw(instants), data.draw(st.integers(-3, 5))
        tree.add(first, last, pages)
        for instant in range(first, last + 1):
            plain[instant] += pages
    first, last, limit = data.draw(instants), data.draw(instants), data.draw(st.integers(-3, 8))
    assert tree.peak(first, last) == max(plain[first : last + 1], default=0)
    if min(plain) >= 0:
        assert tree.peak() == max(plain)
        assert tree.peak_instant() == plain.index(max(plain))
    starts = [at for at in range(first, last + 1) if max(plain[at : last + 1]) <= limit]
    assert tree.earliest(first, last, limit) == min(starts, default=last + 1)
