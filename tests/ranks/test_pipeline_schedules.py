"""Pipeline stages: each schedule skips the same overflows, shows the same weights and goes on with the same checkpoint as one
rank."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.pipeline_models import BATCH, LENGTH, StagedGPT, StagedOutcome, StagedRun, assert_same, train
from kit.ranks.tensor_models import VOCABULARY
from torch import Tensor

from lightning_ptm.comm.stage_link import StageLink
from lightning_ptm.models.gpt import Block

SCHEDULES = ("1f1b", "gpipe", "interleaved", "breadth_first")
OVERFLOWS = (1, 2, 4)
"""Numbers of the batches whose gradients are infinite."""


class Overflows(StagedGPT):
    """Gradients of some batches are larger than float16 can hold."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e20 if batch_idx in OVERFLOWS else loss


class Gathers(L.Callback):
    """Records the loss scale and the full weights, as the user reads them, after each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.scales.append(strategy.precision_plugin.loss_scale.value)
        with strategy.gathered(write=False):
            self.weights.append({name: each.detach().clone() for name, each in module.named_parameters()})


def run_all(hows: Sequence[StagedRun], disk: Path) -> list[tuple[list[float], list[dict[str, Tensor]]]]:
    """Returns the loss scales and the weights after each step of these runs, one after another."""
    found = []
    for how in hows:
        gathers = Gathers()
        train(how, disk, gathers, model=Overflows)
        found.append((gathers.scales, gathers.weights))
    return found


@pytest.mark.parametrize("tier", ["ram", pytest.param("tight", marks=pytest.mark.slow)])
def test_all_schedules_skip_the_overflows_that_one_rank_skips(tier: str, disk: Path) -> None:
    one = StagedRun(precision="16-mixed", steps=6)
    ((scales, weights),) = run_ranks(run_all, 1, [one], disk)[0]
    assert scales == [65536, 32768, 16384, 16384, 8192, 8192]
    hows = [dataclasses.replace(one, ranks=2, stages=2, schedule=each, tier=tier) for each in SCHEDULES]
    for found in run_ranks(run_all, 2, hows, disk, limit_s=180):
        for schedule, (ours, seen) in zip(SCHEDULES, found, strict=True):
            assert ours == scales, schedule
            for step, (now, theirs) in enumerate(zip(seen, weights, strict=True)):
                for name, value in theirs.items():
                    torch.testing.assert_close(now[name], value, rtol=0, atol=2e-3, msg=f"{schedule} {name} {step}")
                    if step in OVERFLOWS:
                        assert torch.equal(now[name], seen[step - 1][name]), (schedule, name, step)


def test_a_stage_keeps_no_more_sent_tensors_than_are_on_their_way(disk: Path) -> None:
    most = run_ranks(most_sent, 2, StagedRun(2, 2, micro_batches=8, steps=2), disk)
    assert max(most) <= 2  # of eight


def most_sent(how: StagedRun, disk: Path) -> int:
    """Returns the most tensors that one link of this rank has kept at once."""
    kept: list[int] = []
    send = StageLink.send

    def counted(link: StageLink, value: Tensor) -> None:
        send(link, value)
        kept.append(len(link._sends))

    with patch.object(StageLink, "send", counted):
        train(how, disk)
    return max(kept)


def hidden_states_left(how: StagedRun, disk: Path) -> list[int]:
    """Returns the tensors of the shape of hidden states that there are after each step."""
    left: list[int] = []

    class Counts(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gc.collect()
            shape = (BATCH // how.micro_batches, LENGTH - 1, 32)
            left.append(sum(type(each) is Tensor and each.shape == shape for each in gc.get_objects()))

    train(how, disk, Counts())
    return left


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("breadth_first", marks=pytest.mark.slow)])
def test_nothing_of_a_micro_batch_is_left_after_its_step(schedule: str, disk: Path) -> None:
    for left in run_ranks(hidden_states_left, 2, StagedRun(2, 2, schedule=schedule, steps=4), disk):
        assert left == [0] * 4


def runs_in_turn(
    runs: Sequence[tuple[int, int, str]], tier: str, disk: Path, folder: Path
) -> tuple[list[float], list[StagedOutcome]]:
    """Runs of three steps each, in the middle of an epoch, which begin with the checkpoint of the one before.

    Args:
        runs: (ranks, stages, schedule).

    Returns:
        The losses of all, and what the last one ends with.
    """
    resumed, outcomes, losses = None, list[StagedOutcome](), list[float]()
    for part, (ranks, stages, schedule) in enumerate(runs, 1):
        saved = str(folder / f"{part}.ckpt")
        how = StagedRun(
            ranks, stages, tier=tier, schedule=schedule, steps=3 * part, saved_to=saved, resumed_from=resumed
        )
        outcomes = run_ranks(train, ranks, how, disk, limit_s=120)
        losses += [sum(each) / ranks for each in zip(*(outcome.losses for outcome in outcomes), strict=True)]
        resumed = saved
    return losses, outcomes


@pytest.mark.parametrize(
    ("tier", "runs"),
    [
        ("tight", ((2, 2, "1f1b"), (2, 2, "interleaved"), (2, 2, "breadth_first"))),
        pytest.param("ram", ((4, 4, "gpipe"), (2, 2, "interleaved"), (4, 2, "breadth_first")), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_with_another_schedule(
    tier: str, runs: Sequence[tuple[int, int, str]], disk: Path, tmp_path: Path
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    losses, (whole,) = runs_in_turn([(1, 1, "1f1b")] * 3, "ram", disk, one)
    ours, outcomes = runs_in_turn(runs, tier, disk, several)
    assert_same(
        [dataclasses.replace(each, losses=ours) for each in outcomes], dataclasses.replace(whole, losses=losses)
    )


class ScaledBlock(Block):
    """Reads a number of the module around it."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x * self.around[0].scale)  # type: ignore[index, union-attr]
        return super().forward(x) * gate


class Scaled(StagedGPT):
    """Sets a number for each micro-batch, which the blocks read."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.__class__ = ScaledBlock
            block.around = [self]  # type: ignore[assignment]

    def loss(self, batch: Tensor) -> Tensor:
        self.scale = float(batch.double().mean()) / VOCABULARY
        return super().loss(batch)


class ScaledInParts(Scaled):
    """Computes the micro-batches of one rank."""

    def loss(self, batch: Tensor) -> Tensor:
        return torch.stack([super(ScaledInParts, self).loss(each) for each in batch.chunk(4)]).mean()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_blocks_are_recomputed_with_the_attributes_of_their_micro_batch(schedule: str, disk: Path) -> None:
    (whole,) = run_ranks(partial(train, model=ScaledInParts), 1, StagedRun(steps=4), disk)
    how = StagedRun(2, 2, schedule=schedule, tier="tight", steps=4, settings={"recompute": "all"})
    assert_same(run_ranks(partial(train, model=Scaled), 2, how, disk), whole)
