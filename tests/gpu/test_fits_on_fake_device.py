"""Whole fits on a fake CUDA device: wherever model states live, and whatever else is asked for, the same bits and no race.

Every two choices of `fit_cases.py` meet in some case; what a case has to fulfil stands in `fits_program.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_process import ORDERS, need_fake_device, ranks_on_fake
from fit_cases import CASES, CASES_OF_PARTS, CASES_OF_RANKS

pytestmark = pytest.mark.timeout(600)
QUICK = range(2)
OTHER = {"FAKE_CUDA_NAME": "other"}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    need_fake_device()


def check(numbers: Sequence[int], order: str, folder: Path, world_size: int = 1, **variables: str) -> None:
    """In one process a rank: its start takes seconds."""
    command = [str(Path(__file__).with_name("fits_program.py")), str(folder), *map(str, numbers)]
    expected = "".join(f"case {number}: ok\n" for number in numbers)
    for done in ranks_on_fake(*command, limit_s=580, world_size=world_size, **ORDERS[order], **variables):
        assert done.returncode == 0 and done.stdout == expected, done.stdout + done.stderr[-6000:]


def test_few_fits_have_the_same_bits_and_no_race(tmp_path: Path) -> None:
    check(QUICK, "late", tmp_path)


@pytest.mark.slow
def test_no_device_is_known_by_its_name(tmp_path: Path) -> None:
    """A device of which torch knows only what its library registers works, too."""
    check(QUICK[:1], "late", tmp_path, **OTHER)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_fits_on_a_device_of_another_name_have_the_same_bits_and_no_race(order: str, half: int, tmp_path: Path) -> None:
    check(range(half, len(CASES), 2), order, tmp_path, **OTHER)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_fits_have_the_same_bits_and_no_race(order: str, half: int, tmp_path: Path) -> None:
    check(range(half, len(CASES), 2), order, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_fits_of_two_ranks_have_the_same_bits_and_no_race(order: str, half: int, tmp_path: Path) -> None:
    """On a stand-in for NCCL; some with experts that the ranks divide."""
    check(range(half, len(CASES_OF_RANKS), 2), order, tmp_path, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_fits_of_two_ranks_on_a_device_of_another_name_have_the_same_bits_and_no_race(
    half: int, tmp_path: Path
) -> None:
    check(range(half, len(CASES_OF_RANKS), 2), "late", tmp_path, world_size=2, **OTHER)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_fits_of_ranks_with_parts_of_layers_have_the_same_bits_and_no_race(order: str, tmp_path: Path) -> None:
    first = len(CASES_OF_RANKS)
    check(range(first, first + len(CASES_OF_PARTS)), order, tmp_path, world_size=2)
