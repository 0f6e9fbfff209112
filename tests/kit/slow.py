"""Marks of test cases that are slow because others of the same test are quick; the cases are the same on each run.

`slow_unless(*names)`: quick are the cases whose id has one of these between its dashes (`tight` or `tight-32-true`).
`diagonal`: quick is the k-th value of each parameter with the k-th of the others, a shorter list from its start again.
Cases that a mark of their own calls slow are slow with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def mark_slow(cases: Sequence[Any]) -> None:
    """Marks as slow what these cases, all that one test has, do not call quick.

    Raises:
        ValueError: a name of `slow_unless` that no case has.
    """
    named = cases[0].get_closest_marker("slow_unless") if cases else None
    if named is not None:
        for name in named.args:
            if not any(_has(case, name) for case in cases):
                raise ValueError(f"{cases[0].nodeid}: slow_unless({name!r}), but no case of the test has this name")
    diagonal = cases[0].get_closest_marker("diagonal") if cases else None
    on_it = _diagonal([case for case in cases if case.get_closest_marker("slow") is None]) if diagonal else []
    for case in cases:
        slow_by_name = named is not None and not any(_has(case, name) for name in named.args)
        if slow_by_name or (diagonal is not None and case not in on_it):
            case.add_marker(pytest.mark.slow)


def _has(case: Any, name: str) -> bool:
    return f"-{name}-" in f"-{case.callspec.id}-"


def _diagonal(cases: Sequence[Any]) -> list[Any]:
    if not cases:
        return []
    chosen = [tuple(case.callspec._idlist) for case in cases]  # one name for each `parametrize`
    values = [list(dict.fromkeys(names)) for names in zip(*chosen, strict=True)]
    count = max(map(len, values))
    wanted = [tuple(names[k % len(names)] for names in values) for k in range(count)]
    return [case for case, names in zip(cases, chosen, strict=True) if names in wanted]
