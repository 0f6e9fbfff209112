"""Ranks divide experts and cut layers at the same time: they learn what one rank learns, and each element has one owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import Run, assert_same_learning, train

EXPERTS: dict[str, Any] = {"expert_parallel_size": 2}
NESTED = {**EXPERTS, "units": ["Block", "Expert"]}
RUNS = {
    "experts cut": Run("t5_moe", 4, 2, settings=EXPERTS),
    "masters on disk, clipped": Run(
        "t5_moe", 4, 2, "masters_on_disk", settings=NESTED, trainer={"gradient_clip_val": 0.5}, norms=True
    ),
    "all on disk, recomputed": Run("t5_moe", 4, 2, "all_on_disk", settings={**NESTED, "recompute": "all"}),
    "three tiers, gated": Run("t5_moe", 4, 2, "three_tiers", settings=NESTED, sizes={"gated": True, "choices": 1}),
    "lock-free": Run("t5_moe", 4, 2, "lock_free", settings=NESTED),
    "experts alone": Run("t5_moe", 4, 1, settings={"expert_parallel_size": 2}),
    "no tokens for some ranks": Run("undecided", 4, 2, steps=1, settings=NESTED, sizes={"choices": 1}),
    "layers alone": Run("t5_moe", 4, 2),
}
QUICK = "experts cut"


def named(name: str) -> object:
    return pytest.param(name, id=name, marks=() if name == QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", [named(each) for each in RUNS])
def test_it_learns_what_one_rank_learns(name: str, disk: Path) -> None:
    how = RUNS[name]
    (whole,) = run_ranks(train, 1, how.on_one_by_batches(), disk)
    outcomes = run_ranks(train, how.ranks, how, disk, limit_s=240)
    assert_same_learning(outcomes, whole)
    for each in outcomes:
        assert each.norms == pytest.approx(whole.norms, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2])
def test_each_element_has_one_owner(experts: int, disk: Path) -> None:
    sizes = {"width": 128, "experts": 4}
    settings = {"expert_parallel_size": experts, "units": ["Block", "Expert"]}
    how = Run("t5_moe", 4, 2, steps=1, sizes=sizes, settings=settings)
    (whole,) = run_ranks(train, 1, how.on_one(), disk)
    for each in run_ranks(train, 4, how, disk, limit_s=240):
        for states, count in whole.state_bytes.items():
            assert each.state_bytes[states] <= 1.04 * count / 4, states
