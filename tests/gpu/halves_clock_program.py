"""Simulated seconds of training steps in which two tensor ranks add up activations over a link.

`python halves_clock_program.py RUN...` is one rank of two on the fake device with a clock; a run is `blocking` or `halves`,
`blocking+recomputed` or `halves+recomputed`, or `halves+recomputed late`, in which a half waits for the sum of a unit's
backward before it recomputes the next unit. BLOCKS in the environment is the number of blocks. Prints a JSON object with the
seconds of the forward and of the step by run.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import fake_device  # before torch
import fake_nccl  # noqa: F401 in place of NCCL
import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel, exchange

RANK = int(os.environ["RANK"])
BLOCKS = int(os.environ["BLOCKS"])
WIDTH, LENGTH, BATCH = 64, 16, 4
STEPS = 4  # before the last one halves are not compared with the whole batch
PLAN = {"blocks.*.*.up": ColwiseParallel(), "blocks.*.*.down": RowwiseParallel()}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(functional.gelu(self.up(self.norm(value))))


class Tower(L.LightningModule):
    """Blocks of two parts that compute and add up equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Part(), Part()) for _ in range(BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Seconds(L.Callback):
    """Seconds of the last step."""

    began_s = forward_s = step_s = 0.0

    def now(self) -> float:
        return max(fake_device.lib.fc_clock_host(), fake_device.lib.fc_clock_device(RANK))

    def on_train_batch_start(self, *_: Any) -> None:
        self.began_s = self.now()

    def on_before_backward(self, *_: Any) -> None:
        self.forward_s = self.now() - self.began_s

    def on_train_batch_end(self, *_: Any) -> None:
        self.step_s = self.now() - self.began_s


def seconds_of(run: str) -> tuple[float, float]:
    with patch.object(exchange, "last_recomputed", lambda: None) if run.endswith("late") else nullcontext():
        return trained(run)


def trained(run: str) -> tuple[float, float]:
    torch.manual_seed(0)
    seconds = Seconds()
    strategy = AngelPTMStrategy(
        page_size="64KiB",
        units=["Sequential"],
        recompute="all" if "recomputed" in run else "none",
        tensor_parallel_size=2,
        tensor_parallel={"plan": PLAN, "overlap": "two_batches" if run.startswith("halves") else "none"},
    )
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[seconds],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(STEPS * BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(Tower(), DataLoader(rows, BATCH))  # type: ignore[arg-type]
    return seconds.forward_s, seconds.step_s


if __name__ == "__main__":
    print(json.dumps({run: seconds_of(run) for run in sys.argv[1:]}))
