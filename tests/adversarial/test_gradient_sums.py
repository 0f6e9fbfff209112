"""Sums of gradients over many micro-batches are a plain Trainer's, in every home: nothing is lost where sums grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, judge, run
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from lightning_ptm import UsageError


class Small(Judged):
    """One layer, whose gradients are all alike, so that sums in 16 bits would come to a halt at 256."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks
        self.head = nn.Linear(8, 4)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.head(torch.ones(1, 8)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class SmallByHand(Small):
    """Small program without Lightning's count of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch) / 320)
        if index == 319:
            self.optimizers().step()  # type: ignore[union-attr]


MANY = {"limit_train_batches": 320, "precision": "bf16-mixed"}


@pytest.mark.parametrize("where", ["ram", "three_tiers", "lock_free"])
def test_320_micro_batches_count_as_320(where: str, strategy_at: MakeStrategy) -> None:
    judge(Small, strategy_at(where), **MANY, accumulate_grad_batches=320)


def test_320_passes_of_manual_optimization_count_as_320(strategy_at: MakeStrategy) -> None:
    judge(SmallByHand, strategy_at("all_on_disk"), **MANY)


class Clipped(ByHand):
    """Two passes a step; what was clipped stays clipped, when more is added and when it is used again."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for value in (0.1, 0.2):
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")
            self.clip_gradients(optimizer, gradient_clip_val=value / 20, gradient_clip_algorithm="value")
        optimizer.step()
        optimizer.step()


@pytest.mark.slow_unless("masters_on_disk", "all_on_disk", "lock_free", "lock_free_three_tiers", "tight_recomputed")
def test_clipped_gradients_stay_clipped(tier: str, strategy_at: MakeStrategy) -> None:
    judge(Clipped, strategy_at(tier))


class SumsMoreInMidEpoch(Callback):
    """Lightning forgets gradients at every fourth batch from then on, which is not the first one behind the last step."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        if index == 5:
            trainer.accumulate_grad_batches = 4


class SumsMoreBehindZeros(SumsMoreInMidEpoch):
    """Accumulates after zeros, as Lightning does before it validates."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        super().on_train_batch_start(trainer, module, batch, index)
        if index == 5:
            module.zero_grad()


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
@pytest.mark.parametrize("clip", [None, 0.01])
def test_what_a_step_has_used_is_added_to_or_the_run_ends(
    tier: str, clip: float | None, strategy_at: MakeStrategy
) -> None:
    options = {"callbacks": [SumsMoreInMidEpoch()], "limit_train_batches": 10, "gradient_clip_val": clip}
    if tier == "ram" or (tier, clip) == ("masters_on_disk", 0.01):  # gradients outlive their update
        judge(Judged, strategy_at(tier), **options)
    else:
        with pytest.raises(UsageError, match=r"was used by a step and not zeroed .* override optimizer_zero_grad"):
            run(Judged, strategy_at(tier), **options)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
@pytest.mark.parametrize("clip", [None, 0.01])
def test_what_a_step_has_used_is_forgotten_with_the_modules(
    tier: str, clip: float | None, strategy_at: MakeStrategy
) -> None:
    options = {"callbacks": [SumsMoreBehindZeros()], "limit_train_batches": 10, "gradient_clip_val": clip}
    judge(Judged, strategy_at(tier), **options)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "bf16-true"])
def test_homes_do_not_change_the_numbers(precision: str, strategy_at: MakeStrategy) -> None:
    options = {"precision": precision, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    first = run(Judged, strategy_at("ram"), **options)
    for where in ("all_on_disk", "three_tiers", "lock_free"):
        other = run(Judged, strategy_at(where), **options)
        assert [float(each) for each in other.notes] == [float(each) for each in first.notes]
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), first.parameters(), strict=True))


def test_a_schedule_of_accumulation_is_planned_for(strategy_at: MakeStrategy) -> None:
    def scheduled() -> dict[str, Any]:
        return {"max_epochs": 2, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]}

    judge(Judged, strategy_at("three_tiers"), **scheduled())
    judge(Judged, strategy_at("masters_on_disk"), **scheduled())


def test_one_micro_batch_a_step_takes_no_more_memory(strategy_at: MakeStrategy) -> None:
    """Sums are fp32 only where there may be sums."""

    class Weighed(Judged):
        def on_train_start(self) -> None:
            gradients = [state.bytes for state in self.trainer.strategy.states_at_home() if state.states == "gradients"]
            self.note(sum(gradients))

    one = run(Weighed, strategy_at("three_tiers"), precision="bf16-mixed", gradient_clip_val=1.0).notes[0]
    several = run(Weighed, strategy_at("three_tiers"), precision="bf16-mixed", accumulate_grad_batches=2).notes[0]
    assert 0 < one == several / 2
