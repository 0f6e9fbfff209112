"""Choice of the cases that are slow because others of their test are quick."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kit.slow import mark_slow


class Case:
    """What pytest collects of a test, as far as it is needed."""

    nodeid = "tests/test_x.py::test_x"

    def __init__(self, choices: tuple[str, ...], marks: Sequence[pytest.MarkDecorator]) -> None:
        self.callspec = SimpleNamespace(_idlist=list(choices), id="-".join(choices))
        self.marks = [each.mark for each in marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def quick(*lists: Sequence[str], mark: Any, slow: str = "") -> list[str]:
    cases = [
        Case(choices, [mark, *([pytest.mark.slow] if slow in choices else [])]) for choices in itertools.product(*lists)
    ]
    mark_slow(cases)
    return [case.callspec.id for case in cases if case.get_closest_marker("slow") is None]


def test_those_that_are_named_are_quick() -> None:
    homes = ["ram", "tight", "tight_too"]
    assert quick(homes, "xy", mark=pytest.mark.slow_unless("tight")) == ["tight-x", "tight-y"]
    assert quick(homes, "xy", mark=pytest.mark.slow_unless("ram-y", "tight_too-x")) == ["ram-y", "tight_too-x"]
    assert quick(homes, "xy", mark=pytest.mark.slow_unless("ram"), slow="y") == ["ram-x"]


def test_a_name_that_no_case_has_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"test_x: slow_unless\('disk'\), but no case"):
        quick(["ram", "tight"], mark=pytest.mark.slow_unless("ram", "disk"))


def test_on_the_diagonal_each_value_comes_and_few_cases_are_quick() -> None:
    assert quick("abcd", "xyz", "12", mark=pytest.mark.diagonal) == ["a-x-1", "b-y-2", "c-z-1", "d-x-2"]


def test_the_diagonal_is_one_of_values_that_are_not_slow() -> None:
    assert quick("abc", "xyz", mark=pytest.mark.diagonal, slow="b") == ["a-x", "a-z", "c-y"]
