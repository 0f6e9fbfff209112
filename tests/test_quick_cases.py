"""Which cases of a test are quick: with the mark `covering`, few of them, in which nothing is missing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from quick_cases import Turn, mark_slow

TIERS = ["ram", "disk", "both", "neither"]


class Case:
    """What pytest collects of a test, so far as it is asked for."""

    def __init__(self, choices: tuple[str, ...], marks: list[pytest.Mark], name: str) -> None:
        self.nodeid = f"tests/test_x.py::test_{name}[{'-'.join(choices)}]"
        params = {"tier": choices[0]} if choices[0] in TIERS else {}
        self.callspec = SimpleNamespace(_idlist=list(choices), params=params)
        self.marks = marks[:]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def quick_cases(
    *lists: Sequence[str], marks: list[Any], turn: Turn | None = None, name: str = "x"
) -> list[tuple[str, ...]]:
    cases = [Case(choices, [each.mark for each in marks], name) for choices in itertools.product(*lists)]
    mark_slow(cases, TIERS, turn)  # type: ignore[arg-type]
    return [tuple(case.callspec._idlist) for case in cases if case.get_closest_marker("slow") is None]


def test_each_value_of_each_parameter_has_a_quick_case_and_no_value_has_many() -> None:
    quick = quick_cases("abcd", "xyz", "12", marks=[pytest.mark.covering(1)])
    assert [set(values) for values in zip(*quick, strict=True)] == [set("abcd"), set("xyz"), set("12")]
    assert len(quick) == 4


def test_every_two_values_meet_where_that_is_asked_for() -> None:
    quick = quick_cases("abcd", "xyz", "12", marks=[pytest.mark.covering(2)])
    for one, other in itertools.combinations(range(3), 2):
        meet = {(case[one], case[other]) for case in quick}
        assert meet == set(itertools.product(("abcd", "xyz", "12")[one], ("abcd", "xyz", "12")[other]))
    assert len(quick) < 24


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_one_case_in_so_many_is_quick_and_one_at_least(count: int) -> None:
    quick = {name: quick_cases("abcd", "xy", marks=[pytest.mark.one_in(count)], name=name) for name in "pqr"}
    assert {len(cases) for cases in quick.values()} == {-(-8 // count)}
    assert count == 1 or len({tuple(cases) for cases in quick.values()}) > 1  # not those of all tests alike
    both = quick_cases("abcd", "xyz", marks=[pytest.mark.covering(1), pytest.mark.one_in(count)])
    assert len(both) == -(-4 // count)


def test_without_the_mark_all_are_quick_and_what_is_slow_stays_so() -> None:
    assert len(quick_cases("abcd", "xyz", marks=[])) == 12
    assert quick_cases("abcd", "xyz", marks=[pytest.mark.covering(1), pytest.mark.slow]) == []


def test_a_test_that_goes_through_the_tiers_has_some_and_tests_of_a_subject_have_all() -> None:
    of_tests = [quick_cases(TIERS, "ab", marks=[], name=f"x{number}") for number in range(20)]
    for cases in of_tests:
        tiers = {tier for tier, _ in cases}
        assert len(tiers) in (1, 2) and len(cases) == 2 * len(tiers)
    assert {tier for cases in of_tests for tier, _ in cases} == set(TIERS)


@pytest.mark.parametrize("marks", [[pytest.mark.covering(1)], [pytest.mark.one_in(3)], [pytest.mark.in_turn]])
def test_every_case_has_its_turn_once(marks: list[Any]) -> None:
    always = set(quick_cases("abcd", "xyz", "12", marks=marks))
    turns = [set(quick_cases("abcd", "xyz", "12", marks=marks, turn=Turn(part, 5))) - always for part in range(5)]
    assert always.union(*turns) == set(itertools.product("abcd", "xyz", "12"))
    assert sum(map(len, turns)) == 24 - len(always)


def test_what_others_test_too_is_quick_in_its_turn_alone() -> None:
    assert quick_cases("abcd", marks=[pytest.mark.in_turn]) == []
    assert quick_cases("abcd", marks=[pytest.mark.in_turn], turn=Turn(0, 1)) == [(each,) for each in "abcd"]
    assert quick_cases("abcd", marks=[pytest.mark.in_turn, pytest.mark.slow], turn=Turn(0, 1)) == []


def test_what_is_slow_by_itself_has_no_turn() -> None:
    assert quick_cases("abcd", marks=[pytest.mark.slow], turn=Turn(0, 1)) == []


def test_a_turn_is_a_part_of_so_many() -> None:
    assert (Turn.read("3/30"), Turn.read("365/30"), Turn.read("")) == (Turn(3, 30), Turn(5, 30), Turn())
    for text in ("3", "3/0", "/3", "a/b", "3/30/2"):
        with pytest.raises(ValueError, match="like 3/30"):
            Turn.read(text)
