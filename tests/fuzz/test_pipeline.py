"""Runs in pipeline stages, drawn from seeds: each ends right or, on all ranks, with an error; none hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.pipeline_models import StagedOutcome, StagedRun, assert_same, train

from fuzz.breaking import Drawn, Ended
from fuzz.pipeline_runs import STEPS, draw, run_stages

AT_ONCE = 5
"""Runs of one process; the last one may end it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StagedOutcome:
    return run_ranks(train, 1, StagedRun(steps=STEPS), tmp_path_factory.mktemp("disk"))[0]


def check(seed: int, drawn: Drawn, ended: dict[int, Ended], whole: StagedOutcome) -> None:
    text = f"seed {seed}, {drawn}: {[(rank, each.error, each.broke) for rank, each in ended.items()]}"
    assert not any("Timed out" in each.error for each in ended.values()), text
    missing = len(ended) < drawn.how.ranks  # the rank whose process has ended, in this run or in a later one
    if not any(each.broke for each in ended.values()) and not (missing and any(each.error for each in ended.values())):
        assert not any(each.error for each in ended.values()), text
        if not missing:
            assert_same([each.outcome for each in ended.values() if each.outcome is not None], whole)
        return
    for rank, each in ended.items():
        assert each.error, text
        if each.broke and drawn.broken[rank].error is ValueError:
            assert each.error == "ValueError: broken off", text
        if not each.broke:
            assert each.error.startswith("RankError: "), text


@pytest.mark.seeds(0, 30)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_drawn_runs_end_right_or_with_an_error_on_all_ranks(
    seed: int, ranks: int, disk: Path, whole: StagedOutcome
) -> None:
    """At 2 stages, and data 2 x 2 stages: 300 runs, 60 of which a rank's process ends."""
    seeds = range(AT_ONCE * seed, AT_ONCE * (seed + 1))
    drawn = [draw(each, ranks, kills=each == seeds[-1]) for each in seeds]
    outcomes = watch_ranks(run_stages, ranks, drawn, disk, limit_s=600)
    killed = {each.rank for each in outcomes if each.end is End.EXITED and each.exit_code == -9}
    assert killed <= drawn[-1].broken.keys(), outcomes
    assert all(each.end is End.RETURNED for each in outcomes if each.rank not in killed), outcomes
    for at, (number, each) in enumerate(zip(seeds, drawn, strict=True)):
        check(number, each, {one.rank: one.value[at] for one in outcomes if one.rank not in killed}, whole)
