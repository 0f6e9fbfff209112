"""Short trainings in pipeline stages whose settings, and the place at which one goes wrong, are drawn from a seed.

Each rank gives up other units, and an error, Ctrl-C or the end of a process may come anywhere: in a block's forward or
backward, in the loss, in the check of stages, between batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import lightning as L
from kit.ranks.pipeline_models import StagedGPT, StagedRun, train
from torch import Tensor

from fuzz.breaking import Breaks, Drawn, Ended, draw_broken, run_all

STEPS = 3
SCHEDULES = ("1f1b", "gpipe", "interleaved", "breadth_first")
TIERS = ("ram", "three_tiers", "all_on_disk", "tight")
_TIMES = {"forward": 24, "backward": 12, "loss": 8}
_TIMES |= dict.fromkeys(("batch begins", "gradients are there", "step", "batch ends"), STEPS)
"""By place, an upper limit of the calls before the one that breaks off."""


def draw(seed: int, ranks: int, *, kills: bool) -> Drawn:
    """Returns the run of a seed.

    Args:
        kills: whether the process of one rank ends.
    """
    chosen = random.Random(seed * 10 + ranks)
    how = StagedRun(
        ranks,
        2,
        micro_batches=chosen.choice((2, 4)),
        schedule=chosen.choice(SCHEDULES),
        tier=chosen.choice(TIERS),
        steps=STEPS,
        settings={"recompute": chosen.choice(("none", "all"))},
        evictions=chosen.choice((None, seed, seed)),
    )

    kinds = ("killed",) if kills else ("none", "error", "error", "error", "interrupt", "interrupt of all")
    return Drawn(how, draw_broken(chosen, ranks, _TIMES, kinds))


class BreaksInStage(Breaks):
    """Breaks off also in a block's forward or backward, and in the loss."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for block in module.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(self.in_forward)
        vars(module)["breaks"] = self


class Breakable(StagedGPT):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        if "breaks" in vars(self):
            vars(self)["breaks"].at("loss")
        return loss


def run_stages(drawn: Sequence[Drawn], disk: Path) -> list[Ended]:
    """One rank's part of the runs, in one process."""
    return run_all(drawn, disk, BreaksInStage, partial(train, model=Breakable))
