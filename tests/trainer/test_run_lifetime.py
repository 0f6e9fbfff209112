"""Lifetime of a run: from the strategy's `setup` to its `teardown`, and not before or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ptm.trainer.builder
from lightning_ptm import AngelPTMStrategy, UsageError

MakeStrategy = Callable[..., AngelPTMStrategy]


class Net(L.LightningModule):
    """Notes in which of its hooks there is an engine.

    Args:
        fails: in its first step.
    """

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.fails = fails
        self.found: dict[str, bool] = {}

    def note(self, hook: str) -> None:
        try:
            self.found[hook] = self.trainer.strategy.engine is not None
        except UsageError:
            self.found[hook] = False

    def setup(self, stage: str) -> None:
        self.note("setup")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self.note("on_fit_start")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.note("training_step")
        if self.fails:
            raise ValueError("fails")
        return self.layer(batch[0]).square().mean()

    def teardown(self, stage: str) -> None:
        self.note("teardown")


def trainer_of(strategy: AngelPTMStrategy) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, enable_checkpointing=False, **quiet)


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4)


def test_there_is_a_run_from_setup_to_teardown(strategy_at: MakeStrategy) -> None:
    module, strategy = Net(), strategy_at("masters_on_disk")
    assert strategy._run is None
    trainer_of(strategy).fit(module, batches())
    assert strategy._run is None and strategy._set_up is None
    wanted = {"setup": False, "configure_optimizers": False, "on_fit_start": True, "training_step": True}
    assert {name: module.found[name] for name in wanted} == wanted


def test_a_run_that_fails_ends(strategy_at: MakeStrategy) -> None:
    strategy = strategy_at("masters_on_disk")
    trainer = trainer_of(strategy)
    with pytest.raises(ValueError, match="fails"):
        trainer.fit(Net(fails=True), batches())
    assert strategy._run is None and strategy._set_up is None
    trainer.fit(Net(), batches())


def test_a_set_up_that_fails_ends(strategy_at: MakeStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = strategy_at("masters_on_disk")
    trainer = trainer_of(strategy)
    with monkeypatch.context() as patched:

        def fails(*_: Any, **__: Any) -> None:
            raise ValueError("nothing is decided")

        patched.setattr(lightning_ptm.trainer.builder, "decide_here", fails)
        with pytest.raises(ValueError, match="nothing is decided"):
            trainer.fit(Net(), batches())
    assert strategy._run is None and strategy._set_up is None
    trainer.fit(Net(), batches())
