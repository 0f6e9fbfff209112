"""`zero_grad` of a module forgets gradients that live in pages, as it forgets those in `.grad`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kit.fits import quiet_trainer
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMStrategy


class ByHand(LightningModule):
    """Manual optimization that clears gradients through the module, not through the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = batch[0]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = x.square().mean()
        self.zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]
        self.losses.append(loss.detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithoutArguments(torch.optim.SGD):
    """Clears gradients by a method without arguments, as Apex's FusedAdam does."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


class Automatic(ByHand):
    """Automatic optimization, in which Lightning clears gradients through the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        x = batch[0]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = x.square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return WithoutArguments(self.parameters(), lr=0.1)


def losses(kind: type[ByHand] = ByHand, **settings: Any) -> Tensor:
    torch.manual_seed(0)
    model = kind()
    trainer = quiet_trainer(AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, **settings), max_steps=4)
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=4))
    return torch.stack(model.losses)


def test_zero_grad_of_the_module_forgets_gradients_in_pages(tmp_path: Path) -> None:
    in_place = losses()
    in_pages = losses(
        device_memory="1MiB",
        host_memory="64MiB",
        offload_parameters="host",
        offload_optimizer="host",
        disk_path=str(tmp_path),
    )
    assert torch.equal(in_place, in_pages)


def test_an_optimizer_whose_zero_grad_takes_no_argument(tmp_path: Path) -> None:
    in_pages = losses(Automatic, offload_optimizer="disk", disk_path=str(tmp_path))
    assert torch.equal(losses(Automatic), in_pages) and torch.equal(losses(), in_pages)
