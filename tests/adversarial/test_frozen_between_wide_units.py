"""Wide units around a frozen one: gradients that leave find parameters of a unit without gradients in their way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMStrategy, CapacityError

KIB = 1 << 10


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (700, 96, 1500, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(96, width), nn.GELU(), nn.Linear(width, 96)) for width in widths
        )
        self.head = nn.Linear(96, 1)
        self.blocks[1].requires_grad_(False)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, fused=True)


def fit(strategy: Any, folder: Path, **options: Any) -> dict[str, Tensor]:
    module = Wide()
    batches = torch.randn(12, 96, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(strategy, max_epochs=1, default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(TensorDataset(batches), batch_size=2))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}], ids=["plain", "sums"]
)
@pytest.mark.parametrize("homes", [{}, {"offload_optimizer": "disk"}, {"host_memory": "2MiB"}], ids=str)
def test_in_the_least_memory_the_numbers_are_those_of_a_plain_trainer(
    tmp_path: Path, homes: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = fit("auto", tmp_path, **options)
    for pages in range(16, 120, 4):
        strategy = AngelPTMStrategy(
            units=["Sequential"],
            page_size=64 * KIB,
            disk_path=str(tmp_path),
            device_memory=pages * 64 * KIB,
            debug={"poison": True},
            **homes,
        )
        try:
            ours = fit(strategy, tmp_path, **options)
        except CapacityError:
            continue
        assert all(torch.equal(plain[name], value) for name, value in ours.items())
        return
    raise AssertionError("no device memory was accepted")
