"""Short trainings whose settings, and the place at which one goes wrong, are drawn from a seed.

Units of a batch's own choice are left out, each rank gives up other units, and an error or Ctrl-C may come anywhere: between
two exchanges of a block's forward or backward, in a proof, between batches.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from kit.ranks.tensor_models import MODELS, Outcome, PreciseGPT, Run, train
from kit.ranks.training import TIERS
from torch import Tensor, nn

MICRO_BATCHES = 4
PLACES = ("forward", "proof", "backward", "batch begins", "gradients are there", "step", "batch ends")
_OFTEN = ("forward", "backward")
"""Places to which a batch comes several times."""


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


@dataclasses.dataclass(frozen=True)
class Broken:
    """Where a rank breaks off.

    Attributes:
        time: how often it comes there before; it may never come as often.
        error: its type.
    """

    place: str
    time: int
    error: type[BaseException]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """
    Attributes:
        broken: by rank, of those that break off.
    """

    how: Run
    broken: dict[int, Broken]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended on one rank.

    Attributes:
        outcome: None where it ended with an error.
        error: type and text of it.
        broke: whether this rank broke off.
    """

    outcome: Outcome | None
    error: str
    broke: bool


def draw(seed: int, ranks: int) -> Drawn:
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
    return Drawn(how, _draw_broken(chosen, ranks))


def _draw_broken(chosen: random.Random, ranks: int) -> dict[int, Broken]:
    def broken(error: type[BaseException]) -> Broken:
        place = chosen.choice(PLACES)
        return Broken(place, chosen.randrange(10 if place in _OFTEN else 2), error)

    kind = chosen.choice(("none", "error", "error", "interrupt", "interrupt of all"))
    if kind == "none":
        return {}
    if kind == "interrupt of all":
        return {rank: broken(KeyboardInterrupt) for rank in range(ranks)}
    return {chosen.randrange(ranks): broken(ValueError if kind == "error" else KeyboardInterrupt)}


def on_one(how: Run) -> Run:
    """Returns the run of the same batches, each on one rank."""
    data = how.ranks // how.tensor
    trainer = {**how.trainer, "accumulate_grad_batches": data * how.trainer["accumulate_grad_batches"]}
    return dataclasses.replace(how.on_one(), micro_batches=data, trainer=trainer, evictions=None)


class Breaks(L.Callback):
    """Breaks off where and when it has to."""

    def __init__(self, broken: Broken | None) -> None:
        self._broken = broken
        self._times = 0
        self.broke = False

    def _at(self, place: str) -> None:
        if self._broken is None or self._broken.place != place:
            return
        self._times += 1
        if self._times > self._broken.time:
            self.broke = True
            raise self._broken.error("broken off")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for each in module.modules():
            if isinstance(each, nn.Dropout):
                each.register_forward_hook(self._between_exchanges)

    def _between_exchanges(self, dropout: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not dropout.training:  # blocks are proven by copies in evaluation mode
            self._at("proof")
            return
        self._at("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: self._at("backward"))

    def on_train_batch_start(self, *_: Any) -> None:
        self._at("batch begins")

    def on_after_backward(self, *_: Any) -> None:
        self._at("gradients are there")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._at("step")

    def on_train_batch_end(self, *_: Any) -> None:
        self._at("batch ends")


def run_all(drawn: Sequence[Drawn], disk: Path) -> list[Ended]:
    """One rank's part of one run after the other, in one process."""
    return [_run(each, disk) for each in drawn]


def _run(drawn: Drawn, disk: Path) -> Ended:
    breaks = Breaks(drawn.broken.get(int(os.environ.get("RANK", "0"))))
    try:
        return Ended(train(drawn.how, disk, breaks), "", breaks.broke)
    except BaseException as error:  # Ctrl-C, too
        return Ended(None, f"{type(error).__name__}: {error}", breaks.broke)
