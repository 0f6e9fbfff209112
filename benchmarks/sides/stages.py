"""Pipeline stages of a model whose blocks sleep as long as a device would compute.

Options: `settings` of AngelPTMStrategy; `blocks`; `block_s`, the seconds of a block's forward for one micro-batch (its
backward takes twice as long); `batch`. What the strategy does between blocks is real: hidden states and gradients of a small
model go from stage to stage over gloo. Sleeping ranks share cores without waiting for them.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.race import Baton, current_rss_bytes
from benchmarks.sides.slow_link import Sleep
from benchmarks.sides.trainer import Pacer

WIDTH, LENGTH = 128, 16


class SleepingBlock(nn.Module):
    """A norm and a layer with a residual connection."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        inner: Tensor = Sleep.apply(self.norm(value), self.seconds)
        return value + self.layer(inner)


class SleepingBlocks(LightningModule):
    """Blocks one after another, and a loss."""

    def __init__(self, blocks: int, block_s: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(SleepingBlock(block_s) for _ in range(blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = batch
        for block in self.blocks:
            value = block(value)
        return value.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class SleepPacer(Pacer):
    """Reports the seconds that blocks slept in a step of the turn."""

    def numbers(self) -> dict[str, float]:
        slept_s, Sleep.slept_s = Sleep.slept_s, 0.0
        return {"slept_s": slept_s / self.steps}


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm import AngelPTMStrategy

    torch.set_num_threads(1)
    settings = options["settings"]
    data = torch.randn(options["batch"], LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    trainer = Trainer(
        accelerator="cpu",
        devices=settings["pipeline_parallel_size"],
        strategy=AngelPTMStrategy(**settings),
        max_epochs=1,
        callbacks=[SleepPacer(baton, count_disk=False, empty_rss_bytes=current_rss_bytes())],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = SleepingBlocks(options["blocks"], options["block_s"])
    trainer.fit(model, DataLoader([data] * 10**6, batch_size=None))  # type: ignore[arg-type]
