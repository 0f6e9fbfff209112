"""Best-first search against computing all costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.planning.best_first import best_first

COSTS = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 30)), st.integers(0, 30)), max_size=20
)
"""Group, cost, and by how much the bound is less."""


@given(COSTS, st.integers(1, 4))
def test_it_finds_what_computing_all_costs_finds(drawn: list[tuple[int, int | None, int]], wanted: int) -> None:
    asked: list[int] = []

    def cost(place: int) -> float | None:
        asked.append(place)
        return drawn[place][1]

    def bound(place: int) -> float:
        return (drawn[place][1] or 0) - drawn[place][2]

    found = best_first(range(len(drawn)), bound, cost, group=lambda place: drawn[place][0], wanted=wanted)
    least: dict[int, int] = {}
    for group, value, _ in drawn:
        if value is not None:
            least[group] = min(value, least.get(group, value))
    assert [drawn[place][1] for place in found.best] == sorted(least.values())[:wanted]
    assert found.proven and len(set(asked)) == len(asked)


def test_what_cannot_be_among_the_best_is_not_computed() -> None:
    asked: list[int] = []
    found = best_first(
        range(6),
        [3.0, 1.0, 9.0, 2.0, 8.0, 7.0].__getitem__,
        lambda place: asked.append(place) or place,
        group=int,
        wanted=2,
    )
    assert found.best == (1, 3) and asked == [1, 3]


def test_a_search_that_ends_early_lists_what_it_knows() -> None:
    left = iter([True, True, False])
    found = best_first(
        range(4), lambda _: 0.0, lambda place: 9.0 - place, group=int, wanted=3, goes_on=lambda: next(left)
    )
    assert found.best == (1, 0) and not found.proven
