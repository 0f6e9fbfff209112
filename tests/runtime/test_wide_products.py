"""Whole runs whose products of 16-bit tensors are computed in fp32: the same bits everywhere, in every way to train."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from kit.plain_loop import PlainLoop, TrainModule, fit, make_trainer, tokens
from kit.stacks import ScheduledStack, Stack
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_ptm.trainer.matmul_precision import WideMatmuls, wide_matmuls

BATCHES = tokens(4)


def wide() -> bool:
    return any(isinstance(mode, WideMatmuls) for mode in _get_current_dispatch_mode_stack())


@pytest.mark.slow_unless(
    "ram-bf16-mixed",
    "masters_on_disk-bf16-true",
    "all_on_disk-bf16-mixed",
    "three_tiers-bf16-mixed",
    "lock_free-bf16-true",
    "lock_free_three_tiers-bf16-true",
    "tight-bf16-mixed",
    "tight_recomputed-bf16-true",
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bits_are_those_of_the_plain_loop_in_every_tier(strategy_at, tier, precision) -> None:
    ours = fit(ScheduledStack, BATCHES, strategy_at(tier, tuning={"matmul_precision": "fp32"}), precision)
    with wide_matmuls():
        ours.assert_equal(PlainLoop(ScheduledStack, precision).fresh(BATCHES))


def test_recomputed(strategy_at) -> None:
    ours = fit(
        ScheduledStack, BATCHES, strategy_at("three_tiers", tuning={"matmul_precision": "fp32"}, recompute="all")
    )
    with wide_matmuls():
        ours.assert_equal(PlainLoop(ScheduledStack).fresh(BATCHES))


class Seen(Stack):
    """Notes whether products are wide, wherever the user's code runs."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.seen: dict[str, bool] = {}

    def loss(self, batch: Any, index: int) -> Tensor | None:
        self.seen["step"] = wide()
        loss = super().loss(batch, index)
        assert loss is not None
        loss.register_hook(lambda gradient: self.seen.__setitem__("backward", wide()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen["validation"] = wide()
        assert self.embedding.weight.dtype is torch.bfloat16
        self(batch)

    def forward(self, batch: Tensor) -> Tensor:
        return self.score(batch, self.middle(self.embedding(batch[:, :-1]), 0))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen["after"] = wide()


@pytest.mark.parametrize("chosen", ["fp32", "native"])
def test_where_products_are_wide(strategy_at, chosen) -> None:
    module = Seen()
    trainer = make_trainer(strategy_at("ram", tuning={"matmul_precision": chosen}), max_steps=2, val_check_interval=2)
    trainer.fit(module, BATCHES.loader(), BATCHES.loader())
    inside = chosen == "fp32"
    assert module.seen == {"step": inside, "backward": inside, "validation": inside, "after": False}
    assert not wide()


class ByHand(TrainModule):
    """Manual optimization, with a backward pass by torch's own hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(64, 64)
        self.inside: list[bool] = []

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        loss = functional.mse_loss(
            self.layer(self.layer.weight[batch.flatten() % 64]), torch.zeros(len(batch.flatten()), 64)
        )
        loss.register_hook(lambda gradient: self.inside.append(wide()))
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_manual_optimization(strategy_at) -> None:
    module = ByHand()
    make_trainer(strategy_at("ram", tuning={"matmul_precision": "fp32"})).fit(module, BATCHES.loader())
    assert module.inside == [True] * 4


def test_an_error_leaves_nothing_entered(strategy_at) -> None:
    class Failing(Stack):
        def loss(self, batch: Any, index: int) -> Tensor | None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(strategy_at("ram", tuning={"matmul_precision": "fp32"})).fit(Failing(), BATCHES.loader())
    assert not wide()


def test_compiled_parts_are_said_to_be_computed_uncompiled(strategy_at) -> None:
    def build() -> Stack:
        module = Stack(depth=2)
        for block in module.blocks:
            block.compile(backend="eager")
        return module

    with pytest.warns(UserWarning, match=r"blocks.0, ... will be computed without torch.compile.*precision='32-true'"):
        ours = fit(build, BATCHES, strategy_at("ram", tuning={"matmul_precision": "fp32"}))
    with wide_matmuls():
        ours.assert_equal(PlainLoop(lambda: Stack(depth=2)).fresh(BATCHES))


def test_the_start_says_what_was_done(strategy_at, caplog) -> None:
    with caplog.at_level(logging.INFO):
        fit(Stack, BATCHES, strategy_at("ram", tuning={"matmul_precision": "fp32"}))
    assert sum("computed in fp32 and rounded once" in record.getMessage() for record in caplog.records) <= 1
