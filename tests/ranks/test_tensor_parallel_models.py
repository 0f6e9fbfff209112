"""Models whose parameters are cut over ranks learn what they learn whole, wherever their states live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import GPT2_PLAN, Run, assert_same_learning, train

RUNS = {
    "t5": Run("t5", 2, 2),
    "t5 gated on four": Run("t5", 4, 4, sizes={"gated": True}),
    "t5 with data": Run("t5", 4, 2, "masters_on_disk"),
    "t5 recomputed": Run("t5", 2, 2, settings={"recompute": "all"}),
    "experts": Run("t5_moe", 2, 2),
    "experts gated, on disk": Run("t5_moe", 2, 2, "all_on_disk", sizes={"gated": True, "choices": 1}),
    "experts recomputed, in three tiers": Run("t5_moe", 2, 2, "three_tiers", settings={"recompute": "all"}),
    "experts, lock-free": Run("t5_moe", 2, 2, "lock_free"),
    "a tied head": Run("gpt", 2, 2, sizes={"tie_head": True}),
    "a vocabulary that does not divide": Run("gpt", 2, 2, sizes={"vocab_size": 65, "tie_head": True}),
    "clipped": Run("t5", 2, 2, trainer={"gradient_clip_val": 0.5}),
    "accumulated": Run("t5", 4, 2, trainer={"accumulate_grad_batches": 2, "max_steps": 3}),
    "built without memory": Run("t5", 2, 2, sizes={"meta": True}),
}
HELD = {
    "llama": Run("llama", 2, 2, "masters_on_disk"),
    "qwen3": Run("qwen3", 4, 2),
    "mixtral": Run("mixtral", 2, 2, settings={"recompute": "all"}),
    "gemma": Run("gemma", 2, 2, "all_on_disk"),
    "gpt2": Run("gpt2", 2, 2, settings={"tensor_parallel": {"plan": GPT2_PLAN}}),
    "llama with LoRA": Run("llama", 2, 2, "masters_on_disk", sizes={"lora": True}),
}
QUICK = ("experts",)


def named(name: str) -> object:
    marks = () if name in QUICK else pytest.mark.slow
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [named(each) for each in (*RUNS, *HELD)])
def test_it_learns_what_one_rank_learns(name: str, disk: Path) -> None:
    how = {**RUNS, **HELD}[name]
    if name in HELD:
        pytest.importorskip("peft" if "LoRA" in name else "transformers", reason="trains a model of theirs")
    (whole,) = run_ranks(train, 1, how.on_one(), disk)
    outcomes = run_ranks(train, how.ranks, how, disk, limit_s=240)
    if name == "mixtral":  # its router rounds to fp32
        assert_same_learning(outcomes, whole, losses=1e-8, weights=1e-6)
    else:
        assert_same_learning(outcomes, whole)


@pytest.mark.slow
def test_in_mixed_precision_they_differ_by_the_rounding_of_a_sum(disk: Path) -> None:
    how = Run("gpt", 2, 2, precision="bf16-mixed", steps=3)
    (whole,) = run_ranks(train, 1, how.on_one(), disk)
    for mine in run_ranks(train, 2, how, disk):
        assert mine.losses == pytest.approx(whole.losses, rel=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "t5", "t5_moe", "llama"])
def test_first_values_do_not_depend_on_how_many_ranks_cut(model: str, disk: Path) -> None:
    """Nothing is learned: the learning rate is 0."""
    sizes = {"meta": True, "rate": 0.0} if model == "llama" else {"meta": True, "learning_rate": 0.0}
    sizes = {**sizes, **({"num_key_value_heads": 4} if model == "llama" else {})}
    runs = [Run(model, size, size, steps=1, sizes=sizes) for size in (1, 2, 4)]
    first, *others = [run_ranks(train, how.ranks, how, disk, limit_s=240)[0].weights for how in runs]
    for each in others:
        assert each.keys() == first.keys()
        assert [name for name in first if not torch.equal(each[name], first[name])] == []
