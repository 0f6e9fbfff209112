"""Random programs on one rank, and on ranks with data parallelism: the bits of the judge."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.ranks.harness import run_ranks

from fuzz.judge import check, check_all, ending
from fuzz.programs import draw

AT_ONCE = 3
"""Programs of one start of ranks."""


@pytest.mark.seeds(12, 300)
def test_one_rank(seed: int, tmp_path: Path) -> None:
    program = draw(seed)
    print(f"seed {seed}: {program}")
    found = check(program, tmp_path)
    assert not found, f"seed {seed}, {program}: {found}"


def test_a_plan_keeps_to_a_limit_that_is_no_multiple_of_pages(tmp_path: Path) -> None:
    """Its first choice of homes takes 27 pages of 76 KiB, which are 4 KiB too many; there are others that fit."""
    program = draw(219)
    assert program.home[:2] == ("tiers", "auto") and ("page_size", "76KiB") in program.settings
    assert check(program, tmp_path) == ""


@pytest.mark.seeds(1, 40)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks(seed: int, ranks: int, tmp_path: Path) -> None:
    programs = [draw(AT_ONCE * seed + each, ranks) for each in range(AT_ONCE)]
    for rank, found in enumerate(run_ranks(check_all, ranks, programs, tmp_path, limit_s=240.0)):
        for program, each in zip(programs, found, strict=False):
            assert not each, f"rank {rank} of seed {seed}, {program}: {each}"


@pytest.mark.seeds(1, 40)
def test_an_error_of_one_rank_ends_all(seed: int, tmp_path: Path) -> None:
    program = draw(seed, 2, raising=True)
    first, second = sorted(run_ranks(ending, 2, program, tmp_path, limit_s=120.0))
    told = f"seed {seed}, {program}: {first}; {second}"
    assert first == "Broken: this rank has had enough", told
    assert second.startswith(("RankError: rank 0 failed with Broken", "RankError: rank 1 failed with Broken")), told
