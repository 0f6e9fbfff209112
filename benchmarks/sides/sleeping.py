"""Trainings whose blocks sleep as long as a device would compute, so that busy cores count less than in other cases."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Sleep(torch.autograd.Function):
    """What a device would take. `slept_s` is what it has taken in this process."""

    slept_s = 0.0

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Sleep._sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        Sleep._sleep(2 * ctx.seconds)
        return gradient, None

    @staticmethod
    def _sleep(seconds: float) -> None:
        began_s = time.perf_counter()
        time.sleep(seconds)
        Sleep.slept_s += time.perf_counter() - began_s


class Blocks(LightningModule):
    """Blocks one after another, and a loss."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = batch
        for block in self.blocks:
            value = block(value)
        return value.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(
    blocks: Sequence[nn.Module],
    shape: tuple[int, ...],
    devices: int,
    settings: Mapping[str, Any],
    pacer: Callback,
    machines: int = 1,
) -> None:
    """Trains until the pacer ends it, on one batch of random numbers of a shape.

    Args:
        devices: ranks of each machine.
    """
    from lightning_ptm import AngelPTMStrategy

    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=machines,
        strategy=AngelPTMStrategy(**settings),
        max_epochs=1,
        callbacks=[pacer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    trainer.fit(Blocks(blocks), DataLoader([data] * 10**6, batch_size=None))  # type: ignore[arg-type]
