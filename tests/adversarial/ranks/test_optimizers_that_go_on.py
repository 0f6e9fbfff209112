"""Several ranks: an optimizer that has states when a fit begins goes on with them. A run leaves them on rank 0 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.training import make_strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def weights_after(folder: Path, fits: int) -> list[Tensor]:
    torch.manual_seed(1)
    module = Model()
    data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)
    trainer = quiet_trainer(make_strategy(folder), devices=2, default_root_dir=folder)
    for fit in range(fits):
        trainer.fit_loop.max_epochs = 4 * (fit + 1) // fits
        trainer.fit(module, data)
    return [value.detach().clone() for value in module.state_dict().values()]


def both(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    return weights_after(folder, 1), weights_after(folder, 2)


def test_two_fits_are_as_one(tmp_path: Path) -> None:
    for once, twice in run_ranks(both, 2, tmp_path):
        assert all(map(torch.equal, once, twice))
