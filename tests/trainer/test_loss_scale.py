"""`16-mixed` with its dynamic loss scale: steps that overflow are skipped, the same in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMPrecision, AngelPTMStrategy
from lightning_ptm.sharded import load
from lightning_ptm.update.loss_scale import LossScale


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        self.weights: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if not isinstance(self.trainer.strategy, AngelPTMStrategy):
            return
        with self.trainer.strategy.gathered(self.blocks[1], write=False):
            self.weights.append(self.blocks[1].weight.detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def ours(**settings: Any) -> AngelPTMStrategy:
    return AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, **settings)


def fit(strategy: Strategy, plugin: Any, resume: Path | None = None, max_epochs: int = 1) -> tuple[Regression, Trainer]:
    """Six steps an epoch."""
    torch.manual_seed(0)
    model = Regression()
    trainer = quiet_trainer(strategy, plugins=[plugin], max_epochs=max_epochs)
    data = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    rows = DataLoader(TensorDataset(data), batch_size=4)
    trainer.fit(model, rows, ckpt_path=None if resume is None else str(resume))
    return model, trainer


def train(init_scale: float, **settings: Any) -> tuple[list[Tensor], float]:
    plugin = AngelPTMPrecision("16-mixed", LossScale(init_scale=init_scale))
    model, _ = fit(ours(**settings), plugin)
    assert plugin.loss_scale is not None
    return model.weights, plugin.loss_scale.value


def test_a_step_that_overflows_is_skipped_and_the_scale_backs_off() -> None:
    weights, scale = train(2.0**40)
    assert scale < 2.0**40
    assert torch.equal(weights[0], weights[1])  # both overflow at this scale: nothing was updated
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_finite_steps_update_and_tiers_do_not_change_them(tmp_path: Path) -> None:
    in_ram, scale = train(2.0**10)
    on_disk, scale_on_disk = train(
        2.0**10, offload_parameters="disk", offload_optimizer="disk", disk_path=str(tmp_path)
    )
    assert scale == scale_on_disk == 2.0**10
    assert not torch.equal(in_ram[0], in_ram[-1])
    assert all(torch.equal(a, b) for a, b in zip(in_ram, on_disk, strict=True))


# -- from one strategy to another -----------------------------------------------------------------------------------------

SCALE, GROWTH = 2.0**9, 8
"""Six steps leave the scale as it is and the count of steps since it grew at six; two more, and it grows."""


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH)


def others(name: str) -> Strategy:
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return SingleDeviceStrategy(torch.device("cpu"))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_another_strategy_goes_on_with_our_scale(kind: str, tmp_path: Path) -> None:
    strategy = ours(checkpoints={"state_dict_type": kind})
    _, trainer = fit(strategy, AngelPTMPrecision("16-mixed", LossScale(SCALE, growth_interval=GROWTH)))
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    if kind == "sharded":
        torch.save(load(path), tmp_path / "full.ckpt")
        path = tmp_path / "full.ckpt"
    fresh = torch.amp.GradScaler("cpu")
    fit(others("single"), MixedPrecision("16-mixed", "cpu", fresh), path, max_epochs=2)
    assert (fresh.get_scale(), fresh.get_growth_interval()) == (2 * SCALE, GROWTH)
    assert fresh.state_dict()["_growth_tracker"] == 12 - GROWTH


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_we_go_on_with_another_strategys_scale(strategy: str, tmp_path: Path) -> None:
    _, trainer = fit(others(strategy), MixedPrecision("16-mixed", "cpu", scaler()))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # which DDP leaves
    plugin = AngelPTMPrecision("16-mixed")
    _, trainer = fit(ours(), plugin, tmp_path / "x.ckpt", max_epochs=2)
    assert plugin.state_dict() == {**scaler().state_dict(), "scale": 2 * SCALE, "_growth_tracker": 12 - GROWTH}
    # And what it saves is its own, not what it has loaded.
    trainer.save_checkpoint(tmp_path / "y.ckpt")
    assert torch.load(tmp_path / "y.ckpt")[MixedPrecision.__qualname__] == plugin.state_dict()
