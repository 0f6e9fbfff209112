"""Sequence parallelism: ranks that keep parts of the sequence between cut layers learn what one rank learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import SaveAfterOneEpoch, is_whole, loader, module_of, trainer_of, weights_of
from kit.ranks.tensor_models import GPT2_PLAN, LENGTH, TRANSFORMERS, Run, assert_same_learning, train
from kit.ranks.training import TIERS
from kit.settings import merged
from torch import Tensor

from lightning_ptm.terms import Mode

ON = {"tensor_parallel": {"sequence_parallel": True}}
CLIPPED = {"gradient_clip_val": 0.5}
RUNS = {
    "gpt": Run("gpt", 2, 2, settings=ON),
    "gpt recomputed": Run("gpt", 2, 2, settings={"recompute": "all", **ON}),
    "gpt with data, clipped": Run("gpt", 4, 2, settings=ON, trainer=CLIPPED, norms=True),
    "gpt on four": Run("gpt", 4, 4, settings=ON),
    "gpt, masters on disk": Run("gpt", 2, 2, "masters_on_disk", settings=ON),
    "gpt, all on disk, recomputed": Run("gpt", 2, 2, "all_on_disk", settings={"recompute": "all", **ON}),
    "gpt, lock-free": Run("gpt", 2, 2, "lock_free", settings=ON),
    "gpt, a tied head": Run("gpt", 2, 2, settings=ON, sizes={"tie_head": True, "vocab_size": 65}),
    "gpt, a length that does not divide": Run("gpt", 4, 4, settings=ON, sizes={"sequence_length": LENGTH}),
    "gpt, compiled": Run("compiled gpt", 2, 2, settings=ON),
    "gpt, compiled and recomputed": Run("compiled gpt", 2, 2, settings={"recompute": "all", **ON}),
    "t5": Run("t5", 2, 2, settings=ON),
    "t5 with data, accumulated": Run(
        "t5", 4, 2, "masters_on_disk", settings=ON, trainer={"accumulate_grad_batches": 2, "max_steps": 3}
    ),
    "t5 recomputed, three tiers": Run("t5", 2, 2, "three_tiers", settings={"recompute": "all", **ON}),
    "t5 built without memory": Run("t5", 2, 2, settings=ON, sizes={"meta": True}),
    "experts": Run("t5_moe", 2, 2, settings=ON),
    "experts recomputed, on disk": Run("t5_moe", 2, 2, "all_on_disk", settings={"recompute": "all", **ON}),
    "experts divided, too": Run("t5_moe", 4, 2, settings={"expert_parallel_size": 2, **ON}),
    "llama": Run("llama", 2, 2, settings=ON),
    "llama with LoRA": Run("llama", 2, 2, "masters_on_disk", settings=ON, sizes={"lora": True}),
    "llama with LoRA, recomputed": Run("llama", 2, 2, settings={"recompute": "all", **ON}, sizes={"lora": True}),
    "qwen3": Run("qwen3", 2, 2, settings=ON),
    "gemma": Run("gemma", 2, 2, settings=ON),
    "mixtral": Run("mixtral", 2, 2, settings=ON),
    "gpt2": Run("gpt2", 2, 2, settings=merged(ON, tensor_parallel={"plan": GPT2_PLAN})),
}


IN_FP32 = {
    "mixtral": "its router rounds to fp32",
    "gemma": "norms add up their weights' gradients in fp32, here by parts",
}
"""Models that are rounded in fp32 whatever they are trained in."""


def named(name: str) -> object:
    return pytest.param(name, id=name, marks=() if name == "gpt" else pytest.mark.slow)


@pytest.mark.parametrize("name", [named(each) for each in RUNS])
def test_it_learns_what_one_rank_learns(name: str, disk: Path) -> None:
    how = RUNS[name]
    if how.model in TRANSFORMERS:
        pytest.importorskip("peft" if "LoRA" in name else "transformers", reason="trains a model of theirs")
    (whole,) = run_ranks(train, 1, how.on_one_by_batches() if "experts" in name else how.on_one(), disk)
    outcomes = run_ranks(train, how.ranks, how, disk, limit_s=240)
    if name in IN_FP32:
        assert_same_learning(outcomes, whole, losses=1e-8, weights=1e-6)
    else:
        assert_same_learning(outcomes, whole)
    for each in outcomes:
        assert each.norms == pytest.approx(whole.norms, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"recompute": "all"}], ids=["kept", "recomputed"])
def test_in_mixed_precision_they_differ_by_the_rounding_of_a_sum(settings: dict[str, Any], disk: Path) -> None:
    how = Run("gpt", 2, 2, precision="bf16-mixed", steps=3, settings={**settings, **ON})
    (whole,) = run_ranks(train, 1, how.on_one(), disk)
    for mine in run_ranks(train, 2, how, disk):
        assert mine.losses == pytest.approx(whole.losses, rel=2**-8)
        for (
            name,
            value,
        ) in whole.weights.items():  # Adam's steps are as long as their rate, 3e-4, whatever gradients are
            torch.testing.assert_close(mine.weights[name], value, rtol=0, atol=2e-3, msg=name)


# -- checkpoints ------------------------------------------------------------------------------------------------------

STEPS_OF_EPOCH = 3


def go_on(folder: Path, kind: str) -> dict[tuple[bool, bool | None], dict[str, Tensor]]:
    """Weights of two epochs, by whether parts of the sequence are divided in the first, and in a run from its checkpoint."""
    found: dict[tuple[bool, bool | None], dict[str, Tensor]] = {}
    for first in (True, False):
        path = folder / f"{first}.ckpt"
        settings = {"checkpoints": {"state_dict_type": kind}}
        module = module_of()
        trainer = trainer_of(
            2,
            2,
            {**settings, "tensor_parallel": {"sequence_parallel": first}},
            max_epochs=2,
            callbacks=[SaveAfterOneEpoch(path)],
        )
        trainer.fit(module, loader(4 * STEPS_OF_EPOCH, 4))
        found[first, None] = weights_of(module)
        for second in (True, False):
            module = module_of(seed=1)
            trainer = trainer_of(2, 2, {**settings, "tensor_parallel": {"sequence_parallel": second}}, max_epochs=2)
            trainer.fit(module, loader(4 * STEPS_OF_EPOCH, 4), ckpt_path=path)
            assert is_whole(module) and len(module.losses) == STEPS_OF_EPOCH
            found[first, second] = weights_of(module)
    return found


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "sharded"])
def test_a_run_goes_on_with_it_and_without(kind: str, tmp_path: Path) -> None:
    for found in run_ranks(go_on, 2, tmp_path, kind):
        whole = found[False, None]
        assert all(
            torch.equal(value, found[first, first][name])
            for first in (True, False)
            for name, value in found[first, None].items()
        )
        for weights in found.values():
            for name, value in whole.items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12, msg=name)


# -- pages ------------------------------------------------------------------------------------------------------------


class Ticks(L.Callback):
    """Records the ticks of the plan that the run follows."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        planned = trainer.strategy.engine.executor.plans.planned(Mode.TRAIN)  # type: ignore[attr-defined]
        self.seen = [(tick.unit, tick.phase.value) for tick in planned[1].ticks]


def ticks(disk: Path) -> dict[bool, list[tuple[int, str]]]:
    found = {}
    for divided in (True, False):
        watch = Ticks()
        settings = {**TIERS["all_on_disk"], "disk_path": str(disk), "tensor_parallel": {"sequence_parallel": divided}}
        trainer_of(2, 2, settings, callbacks=[watch]).fit(module_of(), loader(4 * 4, 4))
        found[divided] = watch.seen
    return found


def test_units_are_fetched_in_backward_passes_as_without_it(disk: Path) -> None:
    """Blocks hear of gradients of what they gave, though the next block has taken the part that this was gathered from."""
    for found in run_ranks(ticks, 2, disk):
        assert found[True] == found[False]
        assert [unit for unit, phase in found[True] if phase == "backward"] == [0, 2, 1]
