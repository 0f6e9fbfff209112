"""Which cases of a test are quick, by its marks; the others are slow, unless it is their turn."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence, Set

import pytest
from covering import few


@dataclasses.dataclass(frozen=True)
class Turn:
    """Of the cases that are slow because others of their test are quick, one part of so many. Without a turn, none."""

    part: int = 0
    parts: int = 0

    @classmethod
    def read(cls, text: str) -> Turn:
        """`3/30`, or "" for none; any number will do for the part, a day's too.

        Raises:
            ValueError: it says something else.
        """
        if not text:
            return cls()
        part, _, parts = text.partition("/")
        if not (part.isdecimal() and parts.isdecimal() and int(parts)):
            raise ValueError(f"a turn is a part of so many, like 3/30, not {text!r}")
        return cls(int(part) % int(parts), int(parts))

    def has(self, name: str) -> bool:
        return self.parts > 0 and zlib.crc32(name.encode()) % self.parts == self.part


def mark_slow(items: Sequence[pytest.Item], all_tiers: Sequence[str], turn: Turn | None = None) -> None:
    """Marks those as slow that no mark of their test calls quick, and that do not have their turn.

    A test that goes through `all_tiers` takes every third one, from the first, the second or the third on as its name has
    it: quick tests of a subject have all of them in turn; with the mark `quick_tiers`, those that it names. Of a test with
    the mark `one_in(n)`, one case in n is quick; with the mark `covering(n)`, few of those that would be quick without it; a
    case or a test with the mark `in_turn` is quick in its turn alone.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, cases in tests.items():
        left_out: set[str] = set()
        if set(map(_tier_of, cases)) == set(all_tiers):
            left_out = set(all_tiers) - set(all_tiers[zlib.crc32(name.encode()) % 3 :: 3])
        quick = _one_in(_covering(name, [case for case in cases if _is_quick(case, left_out)]))
        for case in cases:
            if case not in quick and not (turn or Turn()).has(case.nodeid):
                case.add_marker(pytest.mark.slow)


def _is_quick(case: pytest.Item, left_out: Set[str]) -> bool:
    named = case.get_closest_marker("quick_tiers")
    if case.get_closest_marker("slow") is not None or case.get_closest_marker("in_turn") is not None:
        return False
    tier = _tier_of(case)
    return tier not in left_out if named is None else tier in ("", *named.args)


def _tier_of(case: pytest.Item) -> str:
    call = getattr(case, "callspec", None)
    return str(call.params.get("tier", "")) if call is not None else ""


def _covering(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of these cases of a test, those that its mark `covering` asks for; without the mark all."""
    mark = cases[0].get_closest_marker("covering") if cases else None
    if mark is None:
        return cases
    # One name for each `parametrize`: the values of several parameters that come together are one choice.
    by_choices = {tuple(case.callspec._idlist): case for case in cases}  # type: ignore[attr-defined]
    assert len(by_choices) == len(cases), f"{name}: cases that differ in nothing"
    assert mark.args[0] <= len(next(iter(by_choices))), f"{name}: fewer choices than are to meet"
    return [by_choices[chosen] for chosen in few(list(by_choices), zlib.crc32(name.encode()), mark.args[0])]


def _one_in(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of these cases of a test, as many as its mark `one_in` asks for; without the mark all."""
    mark = cases[0].get_closest_marker("one_in") if cases else None
    if mark is None:
        return cases
    return sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))[:: mark.args[0]]
