"""Runs that break off on a rank: at a place that is drawn, with an error, Ctrl-C or the end of the process."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor


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
        how: what the training is called with.
        broken: by rank, of the ranks that break off.
    """

    how: Any
    broken: dict[int, Broken]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended on one rank.

    Attributes:
        outcome: None where it ended with an error.
        error: type and text of the error.
        broke: whether this rank broke off.
    """

    outcome: Any
    error: str
    broke: bool


def draw_broken(chosen: random.Random, ranks: int, times: Mapping[str, int], kinds: Sequence[str]) -> dict[int, Broken]:
    """Draws the ranks that break off, and where.

    Args:
        times: by place, an upper limit of the calls before the one that breaks off.
        kinds: what is drawn from: `none`, `error`, `interrupt`, `interrupt of all` or `killed`.
    """

    def broken(error: type[BaseException]) -> Broken:
        place = chosen.choice(tuple(times))
        return Broken(place, chosen.randrange(times[place]), error)

    kind = kinds[0] if len(kinds) == 1 else chosen.choice(kinds)
    if kind == "none":
        return {}
    if kind == "interrupt of all":
        return {rank: broken(KeyboardInterrupt) for rank in range(ranks)}
    error = {"error": ValueError, "interrupt": KeyboardInterrupt, "killed": Killed}[kind]
    return {chosen.randrange(ranks): broken(error)}


class Breaks(L.Callback):
    """Breaks off at its place. Subclasses add places inside of the model."""

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

    def in_forward(self, module: Any, args: Any, output: Tensor) -> None:
        """Forward hook: the places `forward` and `backward`."""
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


def run_all(
    drawn: Sequence[Drawn], disk: Path, breaks_of: type[Breaks], train: Callable[[Any, Path, Breaks], Any]
) -> list[Ended]:
    """One rank's part of one run after the other, in one process."""
    ended = []
    for each in drawn:
        breaks = breaks_of(each.broken.get(int(os.environ.get("RANK", "0"))))
        try:
            ended.append(Ended(train(each.how, disk, breaks), "", breaks.broke))
        except BaseException as error:  # Ctrl-C, too
            ended.append(Ended(None, f"{type(error).__name__}: {error}", breaks.broke))
    return ended
