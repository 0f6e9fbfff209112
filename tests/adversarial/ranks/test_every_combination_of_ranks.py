"""Every way in which settings meet, on two ranks: few cases quickly, more of them slowly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from combinations import ALL, check
from covering import Case, few
from kit.ranks.harness import run_ranks

FEW = few(ALL, seed=1)
AT_ONCE = 3
"""Cases of one start of ranks. The first have the most pairs of choices."""
QUICK = 3 * AT_ONCE


def check_all(cases: Sequence[Case], folder: str) -> int:
    """What this rank finds, case by case: the first that fails ends it."""
    for index, case in enumerate(cases):
        try:
            check(case, Path(folder) / str(index))
        except BaseException as error:
            error.add_note(", ".join(case))
            raise
    return len(cases)


def on_two_ranks(cases: Sequence[Case], folder: Path, limit_s: float) -> None:
    assert run_ranks(check_all, 2, list(cases), str(folder), limit_s=limit_s) == [len(cases)] * 2


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(AT_ONCE, QUICK, AT_ONCE))]
)
def test_few(first: int, tmp_path: Path) -> None:
    on_two_ranks(FEW[first : first + AT_ONCE], tmp_path, 240)


@pytest.mark.slow
def test_every_two_choices(tmp_path: Path) -> None:
    on_two_ranks(FEW[QUICK:], tmp_path, 280)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(4))
def test_many(seed: int, tmp_path: Path) -> None:
    on_two_ranks(random.Random(seed).sample(ALL, 200), tmp_path, 1400)
