"""Sequence parallelism: ranks that keep parts of the sequence between cut layers learn what one rank learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_harness import run_ranks
from rank_tensor_models import GPT2_PLAN, TRANSFORMERS, Run, assert_same_learning, train

ON = {"sequence_parallel": True}
RUNS = {
    "gpt": Run("gpt", 2, 2, settings=ON),
    "gpt recomputed": Run("gpt", 2, 2, settings={"recompute": "all", **ON}),
    "t5": Run("t5", 2, 2, settings=ON),
    "experts": Run("t5_moe", 2, 2, settings=ON),
    "llama": Run("llama", 2, 2, settings=ON),
    "qwen3": Run("qwen3", 2, 2, settings=ON),
    "gpt2": Run("gpt2", 2, 2, settings={"tensor_parallel_plan": GPT2_PLAN, **ON}),
}


def named(name: str) -> object:
    return pytest.param(name, id=name, marks=() if name == "gpt" else pytest.mark.slow)


@pytest.mark.parametrize("name", [named(each) for each in RUNS])
def test_it_learns_what_one_rank_learns(name: str, disk: Path) -> None:
    how = RUNS[name]
    if how.model in TRANSFORMERS:
        pytest.importorskip("transformers", reason="trains a model of theirs")
    (whole,) = run_ranks(train, 1, how.on_one(), disk)
    outcomes = run_ranks(train, how.ranks, how, disk, limit_s=240)
    assert_same_learning(outcomes, whole)
