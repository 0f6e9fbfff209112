"""Pipeline stages of a model whose blocks sleep as long as a device would compute.

Options: `settings` of AngelPTMStrategy; `blocks`; `block_s`, the seconds of a block's forward for one micro-batch (its
backward takes twice as long); `batch`. What the strategy does between blocks is real: hidden states and gradients of a small
model go from stage to stage over gloo. Sleeping ranks share cores without waiting for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.race import Baton, current_rss_bytes
from benchmarks.sides.sleeping import Sleep, train
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


class SleepPacer(Pacer):
    """Reports the seconds that blocks slept in a step of the turn."""

    def numbers(self) -> dict[str, float]:
        slept_s, Sleep.slept_s = Sleep.slept_s, 0.0
        return {"slept_s": slept_s / self.steps}


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    settings = options["settings"]
    blocks = [SleepingBlock(options["block_s"]) for _ in range(options["blocks"])]
    pacer = SleepPacer(baton, count_disk=False, empty_rss_bytes=current_rss_bytes())
    train(blocks, (options["batch"], LENGTH, WIDTH), settings["pipeline_parallel_size"], settings, pacer)
