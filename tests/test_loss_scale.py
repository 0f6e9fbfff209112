"""`16-mixed` with its dynamic loss scale: steps that overflow are skipped, the same in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMPrecision, AngelPTMStrategy
from lightning_ptm.update import LossScale


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
        with self.trainer.strategy.gathered(self.blocks[1], write=False):  # type: ignore[attr-defined]
            self.weights.append(self.blocks[1].weight.detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(init_scale: float, **settings: Any) -> tuple[list[Tensor], float]:
    torch.manual_seed(0)
    model = Regression()
    plugin = AngelPTMPrecision("16-mixed", LossScale(init_scale=init_scale))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AngelPTMStrategy(page_size="64KiB", poison=True, **settings),
        plugins=[plugin],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=4))
    assert plugin.loss_scale is not None
    return model.weights, plugin.loss_scale.value


def test_a_step_that_overflows_is_skipped_and_the_scale_backs_off() -> None:
    weights, scale = train(2.0**40)
    assert scale < 2.0**40
    assert torch.equal(weights[0], weights[1])  # both overflow at this scale: nothing was updated
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_finite_steps_update_and_tiers_do_not_change_them(tmp_path: Path) -> None:
    in_ram, scale = train(2.0**10)
    on_disk, scale_on_disk = train(2.0**10, parameter_home="disk", master_home="disk", disk_path=str(tmp_path))
    assert scale == scale_on_disk == 2.0**10
    assert not torch.equal(in_ram[0], in_ram[-1])
    assert all(torch.equal(a, b) for a, b in zip(in_ram, on_disk, strict=True))
