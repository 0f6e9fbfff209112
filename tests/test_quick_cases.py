"""Which cases of a test are quick: with the mark `covering`, few of them, in which nothing is missing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from quick_cases import mark_slow


class Case:
    """What pytest collects of a test, so far as it is asked for."""

    def __init__(self, choices: tuple[str, ...], marks: list[pytest.Mark]) -> None:
        self.nodeid = f"tests/test_x.py::test_x[{'-'.join(choices)}]"
        self.callspec = SimpleNamespace(_idlist=list(choices), params={})
        self.marks = marks[:]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def quick_cases(*lists: str, marks: list[Any]) -> list[tuple[str, ...]]:
    cases = [Case(choices, [each.mark for each in marks]) for choices in itertools.product(*lists)]
    mark_slow(cases, ["ram", "disk"])  # type: ignore[arg-type]
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


def test_without_the_mark_all_are_quick_and_what_is_slow_stays_so() -> None:
    assert len(quick_cases("abcd", "xyz", marks=[])) == 12
    assert quick_cases("abcd", "xyz", marks=[pytest.mark.covering(1), pytest.mark.slow]) == []
