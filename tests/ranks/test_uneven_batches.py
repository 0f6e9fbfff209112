"""Ranks with different numbers of batches: evaluation goes on with those that are left, training ends with the cause."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rank_harness import run_ranks
from rank_models import Tower
from rank_training import BATCH, Outcome, Training, loader, make_strategy, make_trainer, outcome_of, plain, tokens
from test_rank_experts import MoETower
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ptm.errors import RankError

EXPERTS = {"units": ["MixtureOfExperts", "Expert"], "expert_parallel_size": 2}


class Stream(IterableDataset[Tensor]):
    """So many batches on this rank; Lightning cannot know."""

    def __init__(self, rows: Tensor, batches: tuple[int, ...]) -> None:
        self._rows = rows[: BATCH * batches[int(os.environ["RANK"])]]

    def __iter__(self) -> Any:
        return iter(self._rows)


def stream(batches: tuple[int, ...]) -> DataLoader[Tensor]:
    rows = tokens(Training(Tower, batches=max(batches)), 1, seed=3)
    return DataLoader(Stream(rows, batches), batch_size=BATCH)


class Logs(Tower):
    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        self.log("loss", self.validation_losses[-1], sync_dist=True)


class LogsExperts(Logs, MoETower):
    pass


class Read(L.Callback):
    """The weights are read between training steps, too."""

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        with trainer.strategy.gathered(module, write=False):
            assert not module.head.weight.isnan().any()


def evaluate(
    training: Training, folder: Path, batches: tuple[int, ...], tier: str, settings: dict[str, Any], reads: bool
) -> Outcome:
    """Validation after every second training step."""
    torch.manual_seed(0)
    module, ranks = training.build(), len(batches)
    options: dict[str, Any] = {"val_check_interval": 2, "callbacks": [Read()] if reads else []}
    trainer = make_trainer(training, make_strategy(folder, tier, **settings), ranks, **options)
    trainer.fit(module, loader(tokens(training, ranks), ranks), stream(batches))
    return outcome_of(module)


@pytest.mark.parametrize(
    ("build", "batches", "tier", "reads"),
    [
        (Logs, (3, 1), "all_on_disk", False),
        (Logs, (1, 3), "lock_free", True),
        (Tower, (0, 2), "three_tiers", False),
    ],
)
def test_evaluation_goes_on_where_there_are_batches(
    build: Any, batches: tuple[int, ...], tier: str, reads: bool, disk: Path
) -> None:
    training = Training(build, batches=4)
    theirs = plain(training, 2)
    for rank, ours in enumerate(run_ranks(evaluate, 2, training, disk, batches, tier, {}, reads, limit_s=30.0)):
        assert len(ours.validation_losses) == 2 * batches[rank]
        assert all(torch.isfinite(loss) for loss in ours.validation_losses)
        ours.assert_same_weights(theirs[rank])
        assert all(torch.equal(one, other) for one, other in zip(ours.losses, theirs[rank].losses, strict=True))


def test_each_group_of_ranks_with_experts_may_have_its_own_number(disk: Path) -> None:
    training = Training(LogsExperts, "64-true", batches=2)
    arguments = (training, disk, (2, 2, 1, 1), "all_on_disk", EXPERTS, False)
    for rank, ours in enumerate(run_ranks(evaluate, 4, *arguments, limit_s=30.0)):
        assert len(ours.validation_losses) == (2 if rank < 2 else 1)


class Impatient(Logs):
    """One rank calls a barrier that others do not."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        if rank == 0 and step == 1:
            self.trainer.strategy.barrier()
        return super().loss(batch, rank, step)


def refused(build: Any, folder: Path, batches: tuple[int, ...], settings: dict[str, Any]) -> str:
    with pytest.raises(RankError) as caught:
        evaluate(Training(build, batches=4), folder, batches, "all_on_disk", settings, False)
    return str(caught.value)


def test_evaluation_within_a_group_that_divides_experts_needs_as_many_batches(disk: Path) -> None:
    for text in run_ranks(refused, 2, LogsExperts, disk, (3, 1), EXPERTS, limit_s=30.0):
        assert "rank 0 waits with exchange" in text
        assert text.endswith("must call the same layers with experts in the same order, in as many batches")


def test_a_rank_without_what_others_reduce_ends_the_run(disk: Path) -> None:
    """It has no batch to log anything of."""
    first, second = run_ranks(refused, 2, Logs, disk, (0, 2), {}, limit_s=30.0)
    assert first.startswith("rank 0 has ended its evaluation and another rank is in a collective")
    assert second.startswith("rank 1 is in a collective (a barrier, a reduction) and another rank has ended its")


def test_a_collective_of_one_rank_alone_ends_the_run(disk: Path) -> None:
    told = run_ranks(refused, 2, Impatient, disk, (1, 1), {}, limit_s=30.0)
    for text in told:
        assert "rank 1 is in an optimizer step and another rank is in a collective (a barrier, a reduction)" in text
