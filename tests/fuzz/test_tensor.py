"""Runs of ranks that divide layers, drawn from seeds: each ends right or, on all ranks, with an error; none hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import Outcome, assert_same_learning

from fuzz.breaking import Drawn, Ended
from fuzz.tensor_runs import draw, on_one, run_tensors

AT_ONCE = 5
"""Runs of one process."""


def check(seed: int, drawn: Drawn, ended: list[Ended], whole: Outcome | None) -> None:
    told = f"seed {seed}, {drawn}: {[(each.error, each.broke) for each in ended]}"
    assert not any("Timed out" in each.error for each in ended), told
    if not any(each.broke for each in ended):
        assert not any(each.error for each in ended), told
        assert whole is not None
        outcomes = [each.outcome for each in ended if each.outcome is not None]
        assert_same_learning(outcomes, whole, losses=1e-10, weights=1e-8)
        return
    for rank, each in enumerate(ended):
        assert each.error, told
        if each.broke and drawn.broken[rank].error is ValueError:
            assert each.error == "ValueError: broken off", told
        if not each.broke:
            assert each.error.startswith("RankError: "), told


def check_runs(seeds: range, ranks: int, disk: Path) -> None:
    drawn = [draw(seed, ranks) for seed in seeds]
    (whole,) = run_ranks(run_tensors, 1, [Drawn(on_one(each.how), {}) for each in drawn], disk, limit_s=300)
    by_rank = run_ranks(run_tensors, ranks, drawn, disk, limit_s=500)
    for seed, each, alone, *ended in zip(seeds, drawn, whole, *by_rank, strict=True):
        assert not alone.error, (seed, alone.error)
        check(seed, each, ended, alone.outcome)


@pytest.mark.seeds(1, 20)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_drawn_runs_end_right_or_with_an_error_on_all_ranks(seed: int, ranks: int, disk: Path) -> None:
    """At tensor 2 and data 2 x tensor 2."""
    first = 1000 + AT_ONCE * seed
    check_runs(range(first, first + AT_ONCE), ranks, disk)
