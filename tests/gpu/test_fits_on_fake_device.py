"""Whole fits on a fake CUDA device: wherever model states live, and whatever else is asked for, the same bits and no race.

Every two choices of `fit_cases.AXES` meet in some case; what a case has to fulfil stands in `fits_program.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_process import ORDERS, need_fake_device, on_fake
from fit_cases import CASES

pytestmark = pytest.mark.timeout(600)
QUICK = range(4)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    need_fake_device()


def check(numbers: Sequence[int], order: str, folder: Path) -> None:
    """In one process: its start takes seconds."""
    program = str(Path(__file__).with_name("fits_program.py"))
    done = on_fake(program, str(folder), *map(str, numbers), limit_s=580, **ORDERS[order])
    expected = "".join(f"case {number}: ok\n" for number in numbers)
    assert done.returncode == 0 and done.stdout == expected, done.stdout + done.stderr[-6000:]


def test_few_fits_have_the_same_bits_and_no_race(tmp_path: Path) -> None:
    check(QUICK, "late", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_fits_have_the_same_bits_and_no_race(order: str, half: int, tmp_path: Path) -> None:
    check(range(half, len(CASES), 2), order, tmp_path)
