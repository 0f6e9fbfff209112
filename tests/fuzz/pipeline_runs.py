"""Short trainings in pipeline stages whose settings, and the place at which one goes wrong, are drawn from a seed.

Each rank gives up other units, and an error, Ctrl-C or the end of a process may come anywhere: in a block's forward or
backward, in the loss, in the check of stages, between batches.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from kit.ranks.pipeline_models import StagedGPT, StagedOutcome, StagedRun, train
from torch import Tensor

STEPS = 3
SCHEDULES = ("1f1b", "gpipe", "interleaved", "breadth_first")
TIERS = ("ram", "three_tiers", "all_on_disk", "tight")
PLACES = ("forward", "backward", "loss", "batch begins", "gradients are there", "step", "batch ends")
_TIMES = {"forward": 24, "backward": 12, "loss": 8}
"""Upper limits of the calls before the one that breaks off; other places are reached once for each batch."""


class Killed(BaseException):
    """Stands for the end of the process."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """Where a rank breaks off.

    Attributes:
        time: number of calls before; a run may have fewer.
        error: type of the error.
    """

    place: str
    time: int
    error: type[BaseException]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A run.

    Attributes:
        broken: by rank, of the ranks that break off.
    """

    how: StagedRun
    broken: dict[int, Broken]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended on one rank.

    Attributes:
        outcome: None where it ended with an error.
        error: type and text of the error.
        broke: whether this rank broke off.
    """

    outcome: StagedOutcome | None
    error: str
    broke: bool


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

    def broken(error: type[BaseException]) -> Broken:
        place = chosen.choice(PLACES)
        return Broken(place, chosen.randrange(_TIMES.get(place, STEPS)), error)

    kind = "killed" if kills else chosen.choice(("none", "error", "error", "error", "interrupt", "interrupt of all"))
    if kind == "none":
        return Drawn(how, {})
    if kind == "interrupt of all":
        return Drawn(how, {rank: broken(KeyboardInterrupt) for rank in range(ranks)})
    error = {"error": ValueError, "interrupt": KeyboardInterrupt, "killed": Killed}[kind]
    return Drawn(how, {chosen.randrange(ranks): broken(error)})


class Breaks(L.Callback):
    """Breaks off at its place."""

    def __init__(self, broken: Broken | None) -> None:
        self._broken = broken
        self._times = 0
        self.broke = False

    def at(self, place: str) -> None:
        if self._broken is None or self._broken.place != place:
            return
        self._times += 1
        if self._times > self._broken.time:
            if self._broken.error is Killed:
                os.kill(os.getpid(), signal.SIGKILL)
            self.broke = True
            raise self._broken.error("broken off")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for block in module.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(self._in_forward)
        vars(module)["breaks"] = self

    def _in_forward(self, module: Any, args: Any, output: Tensor) -> None:
        self.at("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: self.at("backward"))

    def on_train_batch_start(self, *_: Any) -> None:
        self.at("batch begins")

    def on_after_backward(self, *_: Any) -> None:
        self.at("gradients are there")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.at("step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.at("batch ends")


class Breakable(StagedGPT):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        if "breaks" in vars(self):
            vars(self)["breaks"].at("loss")
        return loss


def run_all(drawn: Sequence[Drawn], disk: Path) -> list[Ended]:
    """One rank's part of one run after the other, in one process."""
    return [_run(each, disk) for each in drawn]


def _run(drawn: Drawn, disk: Path) -> Ended:
    breaks = Breaks(drawn.broken.get(int(os.environ.get("RANK", "0"))))
    try:
        return Ended(train(drawn.how, disk, breaks, model=Breakable), "", breaks.broke)
    except BaseException as error:  # Ctrl-C, too
        return Ended(None, f"{type(error).__name__}: {error}", breaks.broke)
