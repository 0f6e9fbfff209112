"""`param_groups` that change while training goes on, between any two hooks, count as they do for a plain Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, judge, run
from torch import Tensor

from lightning_ptm.errors import UsageError


class AfterBackward(Judged):
    """A closure around Lightning's own chooses the step's rate when it has seen the loss."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + batch_idx)
            return loss

        optimizer.step(closure=closure)


class BeforeBackward(Judged):
    """Warm-up as in Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)


class InStepHook(Judged):
    """A pre-hook of torch's."""

    def configure_optimizers(self) -> Any:
        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.param_groups[0]["weight_decay"] = 0.5
            optimizer.param_groups[0]["lr"] *= 0.5

        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(halve)
        return optimizer


class InBeforeStep(Judged):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
@pytest.mark.parametrize("build", [AfterBackward, BeforeBackward, InStepHook, InBeforeStep])
def test_a_rate_counts_for_the_step_that_follows(
    build: Callable[[], Judged], tier: str, strategy_at: MakeStrategy
) -> None:
    judge(build, strategy_at(tier))


class InTensorHook(Judged):
    """Nobody expects it: a hook of a gradient, when units have been updated behind the backward already."""

    def on_fit_start(self) -> None:
        self.first.bias.register_hook(self.halve)

    def halve(self, gradient: Tensor) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        return gradient


class InTensorHookOfLaterUpdates(InTensorHook):
    """Tensor hook, with another hook that waits for all gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


def test_a_rate_that_changes_in_the_backward_pass_is_refused_or_counts(strategy_at: MakeStrategy) -> None:
    judge(InTensorHook, strategy_at("ram"))
    with pytest.raises(
        UsageError, match="lr in the optimizer's param_groups changed between the backward pass and the"
    ):
        run(InTensorHook, strategy_at("masters_on_disk"))
    judge(InTensorHookOfLaterUpdates, strategy_at("masters_on_disk"))


class TwoGroups(ByHand):
    """Biases move to the group of slow learners for a while, and back."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.parameters()), "lr": 0.1}, {"params": [], "lr": 1e-3, "weight_decay": 0.3}]
        groups[1]["params"] = [groups[0]["params"].pop()]  # type: ignore[attr-defined]
        return torch.optim.AdamW(groups, fused=True)

    def move(self, optimizer: Any, index: int) -> None:
        source, target = optimizer.param_groups if index % 2 else reversed(optimizer.param_groups)
        if index:
            moved = self.blocks[0].inner[0].bias
            source["params"] = [each for each in source["params"] if each is not moved]
            target["params"].append(moved)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.move(optimizer, index)
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        optimizer.step()


class TwoGroupsAutomatic(TwoGroups):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.move(self.optimizers(), index)
        return self.loss(batch)


class Removed(TwoGroups):
    """A parameter leaves all groups: it is trained no more."""

    def move(self, optimizer: Any, index: int) -> None:
        if index == 1:
            group = optimizer.param_groups[0]
            group["params"] = [each for each in group["params"] if each is not self.first.weight]


@pytest.mark.slow_unless(
    "masters_on_disk-TwoGroups",
    "all_on_disk",
    "lock_free-TwoGroupsAutomatic",
    "lock_free_three_tiers",
    "tight_recomputed-Removed",
)
@pytest.mark.parametrize("build", [TwoGroups, TwoGroupsAutomatic, Removed])
def test_a_parameter_that_changes_groups_is_updated_as_its_new_one(
    build: Callable[[], Judged], tier: str, strategy_at: MakeStrategy
) -> None:
    judge(build, strategy_at(tier))


class UnlikeGroups(TwoGroups):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.param_groups[1]["amsgrad"] = True
        return optimizer


class Foreign(TwoGroups):
    def configure_optimizers(self) -> Any:
        parameters = [each for each in self.parameters() if each is not self.head.bias]
        return torch.optim.AdamW([{"params": parameters}])

    def move(self, optimizer: Any, index: int) -> None:
        if index == 1:
            optimizer.param_groups[0]["params"].append(self.head.bias)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (UnlikeGroups, "was moved from parameter group 0 to 1 of .*AdamW, which keep different states"),
        (Foreign, r"a parameter of shape \(4,\) was put into a group of AdamW during a batch.* between two batches"),
    ],
)
def test_a_parameter_that_cannot_be_updated_in_its_new_group_is_refused(
    build: Callable[[], Judged], reason: str, strategy_at: MakeStrategy
) -> None:
    with pytest.raises(UsageError, match=reason):
        run(build, strategy_at("ram"))
