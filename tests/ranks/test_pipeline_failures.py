"""Pipeline stages: a rank that fails takes all others with it at once, signals end all, and some modules are refused."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import End, watch_ranks
from kit.ranks.pipeline_models import StagedGPT, StagedRun, train
from kit.ranks.tensor_models import PreciseT5, PreciseT5MoE
from torch import Tensor

PROMPT_S = 25.0
"""Far less than the collectives' time limit of 60 s: the others are told, they do not run into it."""


class Fault(L.Callback):
    """A rank raises, or its process ends, in a random block's forward or backward, or in the loss."""

    def __init__(self, seed: int, *, kills: bool) -> None:
        drawn = random.Random(seed)
        self.culprit, self.step, self.kills = drawn.randrange(4), drawn.randrange(1, 4), kills
        self.backward, self.call = drawn.random() < 0.5, drawn.randrange(4)
        self.started_s = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        self.started_s = time.monotonic()
        if trainer.global_rank != self.culprit or index != self.step:
            return
        blocks = module.blocks[2:] if trainer.global_rank < 2 else module.blocks[:2]  # of four ranks in two stages
        left = self.call

        def act(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                return
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this rank has had enough")

        def called(_module: Any, _args: Any, output: Tensor) -> None:
            if self.backward:
                output.register_hook(act)
            else:
                act()

        blocks[0].register_forward_hook(called)


def fail_together(disk: Path, seed: int, kills: bool) -> tuple[str, float, list[str]]:
    """(type and text of the error, seconds from the last step's begin to the end, threads left) of this rank's fit."""
    fault = Fault(seed, kills=kills)
    schedule = random.Random(seed).choice(["1f1b", "gpipe"])
    tier = random.Random(seed + 1).choice(["ram", "three_tiers", "all_on_disk"])
    try:
        train(StagedRun(4, 2, schedule=schedule, tier=tier, steps=6, evictions=seed), disk, fault)
    except (Exception, SystemExit) as error:
        seconds = time.monotonic() - fault.started_s
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ptm")]
        return f"{type(error).__name__}: {error}", seconds, threads
    raise AssertionError("fit ended without an error")


def check(seed: int, disk: Path, *, kills: bool) -> None:
    culprit = Fault(seed, kills=kills).culprit
    for outcome in watch_ranks(fail_together, 4, disk, seed, kills):
        if kills and outcome.rank == culprit:
            assert outcome.end is End.EXITED and outcome.exit_code == -9
            continue
        assert outcome.end is End.RETURNED, outcome
        text, seconds, threads = outcome.value
        assert seconds < PROMPT_S, outcome
        assert threads == []
        if outcome.rank == culprit:
            assert text == "ValueError: this rank has had enough"
        else:
            assert text.startswith("RankError: ") and "stops" in text, text
            assert kills or culprit == 0 or f"rank {culprit} failed with " in text, text


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_rank_raises_at_a_random_place(seed: int, disk: Path) -> None:
    check(seed, disk, kills=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
def test_a_rank_dies_at_a_random_place(seed: int, disk: Path) -> None:
    check(seed, disk, kills=True)


class Signalled(StagedGPT):
    """A rank of the first stage gets a signal in the forward of its first block."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def build(self) -> None:
        super().build()
        self.blocks[0].register_forward_hook(self.send)

    def send(self, *_: Any) -> None:
        if self.trainer.global_step == 3 and self.number:  # not a step that stages compare
            number, self.number = self.number, 0
            signal.raise_signal(number)


def signalled(number: int, disk: Path) -> tuple[str, int]:
    """Type of the error with which this rank's fit ends, and the steps done."""
    module = Signalled(number)
    try:
        train(StagedRun(2, 2, steps=6, tier="three_tiers"), disk, model=lambda: module)  # type: ignore[arg-type]
    except (Exception, SystemExit) as error:
        return type(error).__name__, module.trainer.global_step
    raise AssertionError("fit ended without an error")


@pytest.mark.parametrize(
    ("number", "ends"),
    [
        (signal.SIGTERM, [("SIGTERMException", 4)] * 2),  # all end before the same batch
        (signal.SIGINT, [("RankError", 3), ("SystemExit", 3)]),
    ],
    ids=("SIGTERM", "Ctrl-C"),
)
def test_signals_end_all_stages(number: int, ends: list[tuple[str, int]], disk: Path) -> None:
    outcomes = watch_ranks(signalled, 2, number, disk)
    assert [outcome.value for outcome in outcomes] == ends, outcomes


class Skips(StagedGPT):
    """Adds the first block's output to the last one's."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        first = self.blocks[0](x)
        x = first
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.norm(x + first)


class InnerLoss(StagedGPT):
    """A loss of the first block reaches the model's by a list."""

    def loss(self, batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        handle = self.blocks[0].register_forward_hook(lambda *given: losses.append(given[-1].mean()))
        loss = super().loss(batch)
        handle.remove()
        return loss + 0.01 * sum(losses)


class Counter:
    def __init__(self) -> None:
        self.steps, self.loss = 0, 0.0


class Boxed(StagedGPT):
    """The first block leaves a number in an object, which the loss reads."""

    def build(self) -> None:
        super().build()
        self.counter = Counter()
        self.blocks[0].register_forward_hook(lambda *given: setattr(self.counter, "loss", float(given[-1].mean())))

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = super().loss(batch)
        return loss * (1 + self.counter.loss)


class CountsRuns(StagedGPT):
    """Its step counts before the first block."""

    def build(self) -> None:
        super().build()
        self.counter = Counter()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.counter.steps += 1
        return super().training_step(batch, batch_idx)


class Curriculum(StagedGPT):
    """The last loss decides what the blocks get."""

    last_loss = 1.0

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) * self.last_loss
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        self.last_loss = float(loss.detach())
        return loss


class ByHand(StagedGPT):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Normed(StagedGPT):
    def build(self) -> None:
        super().build()
        self.statistics = torch.nn.BatchNorm1d(32)


def count(block: Any, *_: Any) -> None:
    block.calls.add_(1)


class Counts(StagedGPT):
    """A block's buffer changes in each step."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_buffer("calls", torch.zeros(()))
            block.register_forward_hook(count)


class LogsSometimes(StagedGPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if "once" not in vars(self):
            self.__dict__["once"] = True
            self.log("sometimes", 1.0)
        return loss


class GivesMore(StagedGPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "logits": batch}


REFUSED: dict[str, tuple[type[L.LightningModule], dict[str, Any], str]] = {
    "a skip over stages": (Skips, {}, "on the output of blocks.0, which another pipeline stage computes"),
    "a loss of an early block": (InnerLoss, {}, r"the loss uses a \w+ of it beside the output of blocks.0"),
    "a number that an early block leaves in an object": (
        Boxed,
        {},
        "from the same output of the last block, the loss of a micro-batch is",
    ),
    "a count of runs of blocks": (
        CountsRuns,
        {"schedule": "interleaved"},
        "pipeline_schedule=.interleaved. would train something else than CountsRuns: .* another value in counter.steps",
    ),
    "what a step leaves after the blocks": (
        Curriculum,
        {},
        "argument 0 of blocks.0 is .* here and .* on the last stage",
    ),
    "an encoder and a decoder": (PreciseT5, {}, r"encoder.blocks.0 \(Block\) returned a tuple"),
    "experts with a balance": (PreciseT5MoE, {}, r"encoder.blocks.0 \(Block\) returned a tuple"),
    "manual optimization": (ByHand, {}, "the ByHand uses manual optimization, and a schedule runs all backward passes"),
    "running statistics": (Normed, {}, "keeps running statistics, which only its stage would have"),
    "buffers that change": (Counts, {}, "buffers of .* have changed in a training step"),
    "fewer blocks": (StagedGPT, {"sizes": {"layers": 1}}, "the model has .* blocks? for 2 pipeline stages"),
    "unequal parts": (
        StagedGPT,
        {"micro_batches": 3},
        "micro_batches=3 divides the samples of each batch.* has 8 samples",
    ),
    "a log of some micro-batches": (
        LogsSometimes,
        {},
        r"self.log\('sometimes'\) was called 1 times for 4 micro-batches",
    ),
    "more than a loss": (GivesMore, {}, "training_step returned a dictionary of loss, logits"),
    "averaged weights": (
        StagedGPT,
        {"trainer": {"callbacks": [L.pytorch.callbacks.StochasticWeightAveraging(1e-2)]}},
        "StochasticWeightAveraging with a pipeline_parallel_size above 1",
    ),
}


def refused(name: str, disk: Path) -> str:
    model, options, _ = REFUSED[name]
    options = {**options}
    callbacks = options.pop("trainer", {}).get("callbacks", [])
    try:
        train(StagedRun(2, 2, steps=3, **options), disk, *callbacks, model=model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_stages_is_refused(name: str, disk: Path) -> None:
    outcomes = watch_ranks(refused, 2, name, disk)
    assert all(outcome.end is End.RETURNED for outcome in outcomes), outcomes
    texts = [outcome.value for outcome in outcomes]
    assert any(re.search(REFUSED[name][2], text) for text in texts), texts
    assert all(text.startswith(("ConfigError", "UsageError", "RankError")) for text in texts), texts
