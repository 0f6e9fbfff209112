"""Ranks with different numbers of batches: evaluation goes on with those that are left, training ends with the cause."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import BATCH, Training, loader, make_strategy, make_trainer, outcome_of, plain, tokens
from test_rank_experts import MoETower
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

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


class Measures(Tower):
    """Metrics that reduce themselves: one that Lightning reads, one that the user does."""

    def __init__(self) -> None:
        super().__init__()
        self.logged, self.reduced_by_user = MeanMetric(), MeanMetric()
        self.read: list[Tensor] = []

    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        for metric in (self.logged, self.reduced_by_user):
            metric.update(self.validation_losses[-1])
        self.log("mean", self.logged)

    def on_validation_epoch_end(self) -> None:
        self.read.append(self.reduced_by_user.compute())
        self.reduced_by_user.reset()

    def on_validation_end(self) -> None:
        assert torch.equal(self.trainer.callback_metrics["mean"], self.read[-1])


class MeasuresByHand(Measures):
    def log(self, *args: Any, **kwargs: Any) -> None:
        """Lightning knows of no metric, and asks for none."""

    def on_validation_end(self) -> None:
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
        pytest.param(Logs, (3, 1), "all_on_disk", False, marks=pytest.mark.slow),
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


def metrics_read(build: Any, *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the results of each evaluation, and this rank's losses."""
    modules: list[Measures] = []

    def built() -> Measures:
        modules.append(build())
        return modules[-1]

    losses = evaluate(Training(built, batches=4), *arguments).validation_losses
    return modules[0].read, losses


@pytest.mark.parametrize(("build", "batches"), [(Measures, (3, 1)), (MeasuresByHand, (1, 3))])
def test_metrics_are_of_all_batches_of_all_ranks(build: Any, batches: tuple[int, ...], disk: Path) -> None:
    ranks = run_ranks(metrics_read, 2, build, disk, batches, "all_on_disk", {}, False, limit_s=30.0)
    for read, _ in ranks:
        assert len(read) == 2
        for index, mean in enumerate(read):
            of_all = [
                losses[each + index * count]
                for (_, losses), count in zip(ranks, batches, strict=True)
                for each in range(count)
            ]
            torch.testing.assert_close(mean, torch.stack(of_all).mean())


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
        assert "rank 0 waits in exchange" in text
        assert text.endswith("in the same order, in as many batches, on all ranks of a group")


def test_a_rank_without_what_others_reduce_ends_the_run(disk: Path) -> None:
    """The rank without a batch has nothing to log."""
    first, second = run_ranks(refused, 2, Logs, disk, (0, 2), {}, limit_s=30.0)
    assert first.startswith("rank 0 has ended its evaluation and another rank is in a collective")
    assert second.startswith("rank 1 is in a collective (a barrier, a reduction) and another rank has ended its")


def test_a_collective_of_one_rank_alone_ends_the_run(disk: Path) -> None:
    told = run_ranks(refused, 2, Impatient, disk, (1, 1), {}, limit_s=30.0)
    for text in told:
        assert "rank 1 is in an optimizer step and another rank is in a collective (a barrier, a reduction)" in text


def test_a_rank_without_a_metric_that_others_compute_ends_the_run(disk: Path) -> None:
    first, second = run_ranks(refused, 2, Measures, disk, (0, 2), {}, limit_s=30.0)
    assert first.startswith("rank 0 has ended its evaluation and another rank is in a collective")
    assert second.startswith(
        "rank 1 is in a collective (a barrier, a reduction) and another rank has ended its evaluation"
    )


def train(folder: Path, batches: tuple[int, ...], options: dict[str, Any], validation: tuple[int, ...]) -> str:
    """Returns the error of training on so many batches a rank."""
    torch.manual_seed(0)
    training = Training(Tower)
    trainer = make_trainer(training, make_strategy(folder, "all_on_disk"), len(batches), **options)
    with pytest.raises(RankError) as caught:
        trainer.fit(training.build(), stream(batches), stream(validation) if validation else None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("batches", "doing"),
    [
        pytest.param(
            (3, 1),
            ("goes on to another training batch", "has ended its training epoch"),
            marks=pytest.mark.slow,
        ),
        ((1, 3), ("has ended its training epoch", "goes on to another training batch")),
        ((0, 2), ("has ended its training epoch", "begins a training step")),
    ],
)
def test_training_needs_as_many_batches_on_all_ranks(
    batches: tuple[int, ...], doing: tuple[str, str], disk: Path
) -> None:
    for rank, text in enumerate(run_ranks(train, 2, disk, batches, {}, (), limit_s=30.0)):
        told = f"rank {rank} {doing[rank]} and another rank {doing[1 - rank]}: they got different numbers of training batches"
        assert text.startswith(told)
        assert "(a DistributedSampler(drop_last=True), or limit_train_batches of the fewest) [rank 0 at " in text


@pytest.mark.parametrize(
    ("options", "validation", "doing"),
    [
        ({}, (1, 1), "goes on to another training batch"),
        (
            {"accumulate_grad_batches": 2},
            (),
            "rank 1 is in an optimizer step and another rank goes on to another training",
        ),
    ],
)
def test_training_needs_as_many_batches_whatever_follows_the_last(
    options: dict[str, Any], validation: tuple[int, ...], doing: str, disk: Path
) -> None:
    for text in run_ranks(train, 2, disk, (3, 1), options, validation, limit_s=30.0):
        assert doing in text
        assert "give all of them as many training batches" in text
