"""Programs that nobody thought of: each ends as with DDP, or with an error on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.ranks.ddp_judge import endings, run_cases
from kit.ranks.harness import run_ranks
from random_programs import case_of


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (2, (1,)),
        (3, (201,)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, (13,)), (2, (2, 34)), (3, (207,)))),
    ],
)
def test_as_with_ddp(world_size: int, seeds: tuple[int, ...], disk: Path) -> None:
    """More seeds were tried by hand."""
    run_cases([case_of(seed, world_size) for seed in seeds], world_size, disk)


def test_an_error_on_all_ranks(disk: Path) -> None:
    cases = [case_of(seed, 2, raising=True) for seed in (101, 104, 113, 115)]
    for texts in zip(*run_ranks(endings, 2, cases, 2, str(disk), limit_s=120.0), strict=True):
        first, second = sorted(texts)
        assert first.startswith(
            ("RankError: rank 0 failed with ValueError", "RankError: rank 1 failed with ValueError")
        )
        assert second == "ValueError: this rank has had enough"
