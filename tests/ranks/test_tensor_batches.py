"""Under tensor parallelism, the ranks that share a model's layers get the same batches, or are told that they do not."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.tensor_blocks import WIDTH, Blocks, module_of, rows, trainer_of
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler


class Seeing(Blocks):
    """Remembers the batches of each epoch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.seen.append([])
        self.seen[-1].append(batch.clone())
        return super().training_step(batch, batch_idx)


class Augmented(Dataset[Tensor]):
    """Rows with noise that whoever loads them draws."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return rows(16)[index] + torch.rand(WIDTH, dtype=torch.float64)


class Streamed(IterableDataset[Tensor]):
    """Some rows, in order; as many as `count`."""

    def __init__(self, count: int = 16) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(rows(self.count))


def loaded(ranks: int, tensor: int, kind: str, unseeded: bool) -> list[list[Tensor]]:
    """The batches of each epoch of one rank."""
    rank = int(os.environ.get("RANK", 0))
    if not unseeded:
        L.seed_everything(1, workers=True)
    torch.manual_seed(rank if unseeded else 0)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    module = Seeing()
    loaders: dict[str, Any] = {
        "shuffled": lambda: DataLoader(rows(16), 2, shuffle=True),  # type: ignore[arg-type]
        "streamed": lambda: DataLoader(Streamed(), 2),
        "sampler": lambda: DataLoader(rows(16), 2, sampler=RandomSampler(rows(16))),  # type: ignore[arg-type]
        "workers": lambda: DataLoader(Augmented(), 2, num_workers=2),
    }
    trainer_of(ranks, tensor, max_epochs=2, limit_train_batches=4 if unseeded else 1.0).fit(module, loaders[kind]())
    return module.seen


def equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return len(one) == len(other) and all(
        len(first) == len(second) and all(map(torch.equal, first, second))
        for first, second in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "kind",
    ["streamed", "sampler", *(pytest.param(each, marks=pytest.mark.slow) for each in ("shuffled", "workers"))],
)
def test_ranks_of_a_group_get_what_one_rank_would(kind: str) -> None:
    cut = run_ranks(loaded, 4, 4, 2, kind, False, limit_s=240)
    plain = run_ranks(loaded, 2, 2, 1, kind, False)
    for rank, seen in enumerate(cut):
        assert equal(seen, plain[rank // 2]), rank
    assert len(cut[0]) == 2
    assert kind == "streamed" or not equal(cut[0], cut[2])
    assert kind == "streamed" or not equal(cut[0][:1], cut[0][1:])


def test_without_a_seed_the_ranks_of_a_group_shuffle_alike() -> None:
    first, second = run_ranks(loaded, 2, 2, 2, "sampler", True)
    assert equal(first, second)


# -- what differs -----------------------------------------------------------------------------------------------------


class ByRank(IterableDataset[Tensor]):
    """Other rows on each rank, from a certain batch of a certain pass on."""

    def __init__(self, first: int, passes: int = 0) -> None:
        self.first, self.passes = first, passes

    def __iter__(self) -> Iterator[Tensor]:
        rank, self.passes = int(os.environ["RANK"]), self.passes - 1
        for index, row in enumerate(rows(20)):
            yield row + rank * (self.passes < 0 and index // 2 >= self.first)


def fit_different(first: int, passes: int) -> None:
    trainer_of(2, 2, max_epochs=2).fit(module_of(), DataLoader(ByRank(first, passes), 2))


@pytest.mark.parametrize(("first", "passes", "batch"), [(0, 0, 0), (2, 0, 2), (0, 1, 0)])
def test_different_batches_are_refused_on_both_ranks(first: int, passes: int, batch: int) -> None:
    for each in watch_ranks(fit_different, 2, first, passes):
        assert each.end is End.RAISED, each
        assert "UsageError: ranks 0, 1 have to compute the same batch (tensor_parallel_size=2)" in each.error
        assert f"different batches (train, loader 0, batch {batch}): rank 1 has other ones than rank 0" in each.error
        assert "**trainer.strategy.distributed_sampler_kwargs" in each.error


def fit_different_later(tensor: int, first: int, settings: Any) -> None:
    trainer_of(int(os.environ["WORLD_SIZE"]), tensor, settings).fit(module_of(), DataLoader(ByGroup(first), 2))


class ByGroup(ByRank):
    """As that, but ranks 0 and 2 have the same rows, and so have all before."""

    def __iter__(self) -> Iterator[Tensor]:
        odd = int(os.environ["RANK"]) == 1
        return (row + odd * (index // 2 >= self.first) for index, row in enumerate(rows(20)))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings", [{}, {"recompute": "all", "offload_parameters": "disk", "offload_optimizer": "disk"}]
)
def test_batches_that_come_apart_later_are_refused_before_anything_is_exchanged(
    ranks: int, settings: Any, disk: Path
) -> None:
    found = watch_ranks(fit_different_later, ranks, 2, 7, {**settings, "disk_path": str(disk)})
    assert all(each.end is End.RAISED for each in found), found
    for each in found[:2]:
        assert "RankError: ranks 0 and 1 have to compute the same batch and compute different things" in each.error
        assert "rank 0 has come to batch 7 (train, loader 0; digest " in each.error
        assert "trainer.strategy.distributed_sampler_kwargs" in each.error


def evaluate_different_later() -> None:
    trainer_of(2, 2).validate(module_of(), DataLoader(ByGroup(5), 2), verbose=False)


def test_batches_of_an_evaluation_that_come_apart_later_are_refused() -> None:
    for each in watch_ranks(evaluate_different_later, 2):
        assert each.end is End.RAISED, each
        assert "compute different things: rank 0 has come to batch 5 (validate, loader 0; digest " in each.error


def evaluate_different(count: int) -> None:
    others = DataLoader(rows(4 + count * int(os.environ["RANK"])), 2)  # type: ignore[arg-type]
    same = DataLoader(rows(4), 2)  # type: ignore[arg-type]

    class Validating(Blocks):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> Tensor:
            return super().validation_step(batch + dataloader_idx * int(os.environ["RANK"]) * (count == 0), batch_idx)

        def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            return batch + dataloader_idx * int(os.environ["RANK"]) * (count == 0)

    trainer_of(2, 2, use_distributed_sampler=False).validate(Validating(), [same, others], verbose=False)


def test_different_batches_of_a_second_loader_are_refused_in_an_evaluation() -> None:
    for each in watch_ranks(evaluate_different, 2, 0):
        assert each.end is End.RAISED, each
        assert "different batches (validate, loader 1, batch 0)" in each.error


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 16])
def test_a_rank_with_more_batches_than_its_group_is_told_and_does_not_hang(count: int) -> None:
    for each in watch_ranks(evaluate_different, 2, count):
        assert each.end is End.RAISED, each
        assert "would wait for each other for ever" in each.error


def fit_uneven(count: int) -> None:
    data = Streamed(4 + count * int(os.environ["RANK"]))
    trainer_of(2, 2).fit(module_of(), DataLoader(data, 2))


@pytest.mark.parametrize("count", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_a_rank_with_more_training_batches_than_its_group_is_told_and_does_not_hang(count: int) -> None:
    for each in watch_ranks(fit_uneven, 2, count):
        assert each.end is End.RAISED, each
        assert "different numbers of training batches" in each.error


class DrawsAlone(L.Callback):
    def __init__(self, first: int) -> None:
        self.first = first

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if int(os.environ["RANK"]) == 1 and batch_idx >= self.first:
            torch.rand(1)


def fit_drawing_alone(first: int) -> None:
    trainer_of(2, 2, callbacks=[DrawsAlone(first)]).fit(module_of(), DataLoader(rows(16), 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (0, "different states of torch's random numbers (train, loader 0, batch 1)"),
        (
            5,
            "ranks 0 and 1 have to compute the same batch and compute different things: rank 0 has come to batch 6 (train",
        ),
    ],
)
def test_random_numbers_that_one_rank_draws_alone_are_refused(first: int, told: str) -> None:
    for each in watch_ranks(fit_drawing_alone, 2, first):
        assert each.end is End.RAISED, each
        assert told in each.error and "draw" in each.error.lower()
