"""Short trainings whose settings, and the place at which one goes wrong, are drawn from a seed.

Units of a batch's own choice are left out, each rank gives up other units, and an error or Ctrl-C may come anywhere: between
two exchanges of a block's forward or backward, in a proof, between batches.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from kit.ranks.tensor_models import MODELS, PreciseGPT, Run, train
from kit.ranks.training import TIERS
from torch import Tensor, nn

from fuzz.breaking import Breaks, Drawn, Ended, draw_broken, run_all

MICRO_BATCHES = 4
_TIMES = {
    "forward": 10,
    "proof": 2,
    "backward": 10,
    "batch begins": 2,
    "gradients are there": 2,
    "step": 2,
    "batch ends": 2,
}
"""By place, an upper limit of the calls before the one that breaks off."""


class Choosy(PreciseGPT):
    """The first token tells which block is left out, and whether somebody looks at logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = int(tokens[0, 0])
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            if number != first % (len(self.blocks) + 1):
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if first % 2:
            logits.argmax(-1)
        return logits


MODELS["choosy"] = Choosy


def draw(seed: int, ranks: int) -> Drawn:
    """Returns the run of a seed."""
    chosen = random.Random(seed * 10 + ranks)
    settings: dict[str, Any] = {"recompute": chosen.choice(("none", "all"))}
    model, sizes = "choosy", {"layers": 3}
    if ranks == 4 and chosen.random() < 0.25:
        model, sizes = "t5_moe", {"layers": 2}
        settings |= {"expert_parallel_size": 2, "units": ["Block", "Expert"]}
    every = chosen.choice((1, 2))
    trainer = {"accumulate_grad_batches": every, "max_steps": MICRO_BATCHES // every}
    evictions = chosen.choice((None, seed))
    tier = chosen.choice(tuple(TIERS))
    how = Run(model, ranks, 2, tier, "64-true", MICRO_BATCHES, settings, sizes, trainer, evictions=evictions)
    kinds = ("none", "error", "error", "interrupt", "interrupt of all")
    return Drawn(how, draw_broken(chosen, ranks, _TIMES, kinds))


def on_one(how: Run) -> Run:
    """Returns the run of the same batches, each on one rank."""
    data = how.ranks // how.tensor
    trainer = {**how.trainer, "accumulate_grad_batches": data * how.trainer["accumulate_grad_batches"]}
    return dataclasses.replace(how.on_one(), micro_batches=data, trainer=trainer, evictions=None)


class BreaksBetweenExchanges(Breaks):
    """Breaks off also between two exchanges of a block's forward or backward, and in the check of a block."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for each in module.modules():
            if isinstance(each, nn.Dropout):
                each.register_forward_hook(self._at_dropout)

    def _at_dropout(self, dropout: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if dropout.training:
            self.in_forward(dropout, args, output)
        else:  # blocks are checked by copies in evaluation mode
            self.at("proof")


def run_tensors(drawn: Sequence[Drawn], disk: Path) -> list[Ended]:
    """One rank's part of the runs, in one process."""
    return run_all(drawn, disk, BreaksBetweenExchanges, train)
