"""Context parallelism: many runs in which ranks give up units at random, and some rank may fail at a random place. All end,
and those that train learn what one rank learns."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from kit.ranks.context_models import ContextOutcome, ContextRun, train
from kit.ranks.harness import run_ranks
from torch import Tensor

PROMPT_S = 30.0
"""Far less than the collectives' time limit of 60 s: a failed rank ends the others, which do not wait for that."""
MESHES = {2: [(2, 1)], 4: [(4, 1), (2, 1), (2, 2)]}
"""By number of ranks: sizes of context and tensor groups."""
TIERS = ("ram", "masters_on_disk", "three_tiers", "all_on_disk", "tight")
STEPS = 3


class Fault(L.Callback):
    """A rank raises in a random block's forward or backward, before the update, or at the end of a batch."""

    def __init__(self, seed: int, ranks: int) -> None:
        drawn = random.Random(-seed)
        self.culprit, self.step = drawn.randrange(ranks), drawn.randrange(STEPS)
        self.place = drawn.choice(["forward", "backward", "update", "end"])
        self.block, self.call = drawn.randrange(2), drawn.randrange(3)
        self.raised_s = 0.0

    def act(self, *_: Any) -> None:
        self.raised_s = time.monotonic()
        raise ValueError("this rank has had enough")

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        self.raised_s = time.monotonic()
        if trainer.global_rank != self.culprit or index != self.step or self.place not in ("forward", "backward"):
            return
        left = self.call  # the check of a batch calls blocks, too

        def called(_module: Any, _args: Any, output: Tensor) -> None:
            nonlocal left
            left -= 1
            if self.place == "forward" and left < 0:
                self.act()
            if self.place == "backward" and output.requires_grad:
                output.register_hook(self.act)

        module.blocks[self.block].register_forward_hook(called)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if (trainer.global_rank, trainer.global_step, self.place) == (self.culprit, self.step, "update"):
            self.act()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (trainer.global_rank, index, self.place) == (self.culprit, self.step, "end"):
            self.act()


def drawn(seed: int, ranks: int) -> tuple[ContextRun, Fault | None]:
    """Returns how ranks train in the run of a seed, and which of them fails."""
    choose = random.Random(seed)
    context, tensor = choose.choice(MESHES[ranks])
    settings = choose.choice([{}, {"recompute": "all"}])
    way, tier = choose.choice(["gather", "ulysses", "ring"]), choose.choice(TIERS)
    how = ContextRun(
        "gpt", ranks, context, way, tensor=tensor, tier=tier, steps=STEPS, settings=settings, evictions=seed
    )
    return how, Fault(seed, ranks) if choose.random() < 0.5 else None


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended on one rank; without an error, how far losses and weights are from those of one rank.

    Attributes:
        seconds: from the fault, or the begin of the last batch, to the end.
        threads: names of those left.
    """

    error: str
    seconds: float
    threads: list[str]
    losses: list[float] = dataclasses.field(default_factory=list)
    off: float = 0.0


def train_many(seeds: range, disk: Path, whole: ContextOutcome) -> list[Ended]:
    """One rank's part of the runs of all seeds, one after the other in this process."""
    found = []
    for seed in seeds:
        how, fault = drawn(seed, ranks=4 if seed % 2 else 2)
        try:
            outcome = train(how, disk, *([] if fault is None else [fault]))
        except (Exception, SystemExit) as error:
            assert fault is not None, f"seed {seed}: {how}"
            seconds = time.monotonic() - fault.raised_s
            threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ptm")]
            found.append(Ended(f"{type(error).__name__}: {error}", seconds, threads))
            continue
        off = max(float((value - whole.weights[name]).abs().max()) for name, value in outcome.weights.items())
        found.append(Ended("", 0.0, [], outcome.losses, off))
    return found


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.slow) for first in (*range(0, 200, 50), *range(1, 200, 50))]
)
def test_runs_with_random_evictions_and_exceptions_end(first: int, disk: Path) -> None:
    """200 runs in eight starts: seeds that are even train on two ranks, others on four."""
    (whole,) = run_ranks(train, 1, ContextRun("gpt", steps=STEPS), disk)
    seeds = range(first, first + 50, 2)
    ranks = 4 if first % 2 else 2
    of_ranks = run_ranks(train_many, ranks, seeds, disk, whole, limit_s=900)
    for seed, ended in zip(seeds, zip(*of_ranks, strict=True), strict=True):
        how, fault = drawn(seed, ranks)
        if fault is None:
            assert not any(each.error for each in ended), f"seed {seed}: {ended}"
            mean = [sum(of_step) / ranks for of_step in zip(*(each.losses for each in ended), strict=True)]
            assert mean == pytest.approx(whole.losses, rel=0, abs=1e-12), f"seed {seed}: {how}"
            assert max(each.off for each in ended) < 1e-9, f"seed {seed}: {how}"
            continue
        for rank, each in enumerate(ended):
            if rank == fault.culprit:
                assert "ValueError: this rank has had enough" in each.error, f"seed {seed}: {each}"
            else:
                assert each.error.startswith("RankError: "), f"seed {seed}, rank {rank}: {each}"
            assert each.seconds < PROMPT_S and each.threads == [], f"seed {seed}, rank {rank}: {each}"
