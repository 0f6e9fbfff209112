"""Hooks that users register on their optimizer run once a step, although a shadow runs the update page by page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.fits import quiet_trainer
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMStrategy


class Hooked(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters())
        optimizer.register_step_pre_hook(lambda *_: self.calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: self.calls.append("after"))
        return optimizer


@pytest.mark.parametrize("settings", [{}, {"offload_optimizer": "disk"}], ids=["ram", "masters_on_disk"])
def test_step_hooks_run_once_a_step(settings: dict[str, str], tmp_path: Path) -> None:
    model = Hooked()
    trainer = quiet_trainer(AngelPTMStrategy(page_size="64KiB", disk_path=str(tmp_path), **settings), max_steps=3)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4))
    assert model.calls == ["before", "after"] * 3
