"""Pipeline parallelism: ranks that have blocks in stages learn what one rank learns from the same batches."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
from kit.ranks.harness import run_ranks
from kit.ranks.pipeline_models import StagedGPT, StagedOutcome, StagedRun, assert_same, train
from torch import Tensor

from lightning_ptm.forecasting.pipeline import most_graphs
from lightning_ptm.planning.inventory import What
from lightning_ptm.planning.schedules import chunks_of
from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
from lightning_ptm.runtime.units.store import FlatStore


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StagedOutcome:
    """Returns the outcome of one rank, which computes batches whole."""
    return run_ranks(train, 1, StagedRun(), tmp_path_factory.mktemp("disk"))[0]


RECOMPUTED = {"recompute": "all"}
CASES = {
    # The first one hangs where ranks of a stage ask all ranks for a prefetch, and others listen to their stage alone (P1).
    "with data in three tiers": StagedRun(4, 2, tier="three_tiers"),
    "in ram": StagedRun(2, 2, schedule="gpipe"),
    "in the least memory, recomputed": StagedRun(2, 2, tier="tight", settings=RECOMPUTED),
    "masters on disk": StagedRun(2, 2, tier="masters_on_disk"),
    "all passes forward first, in the least memory": StagedRun(2, 2, schedule="gpipe", tier="tight"),
    "three tiers": StagedRun(2, 2, tier="three_tiers"),
    "with data in the least memory": StagedRun(4, 2, tier="tight"),
    "blocks given": StagedRun(2, 2, tier="tight", settings={"pipeline_blocks": [1, 3]}),
    "breadth first in the least memory": StagedRun(2, 2, schedule="breadth_first", tier="tight"),
    "breadth first with data, recomputed": StagedRun(
        4, 2, schedule="breadth_first", tier="three_tiers", settings=RECOMPUTED
    ),
    "interleaved in ram": StagedRun(2, 2, schedule="interleaved"),
    "interleaved in the least memory": StagedRun(2, 2, schedule="interleaved", tier="tight"),
    "interleaved with data": StagedRun(4, 2, schedule="interleaved", tier="all_on_disk"),
    "four stages": StagedRun(4, 4, micro_batches=8),
    "four stages on disk": StagedRun(4, 4, tier="all_on_disk"),
    "with tensor parallelism": StagedRun(4, 2, tensor=2),
    "with tensor parallelism in the least memory": StagedRun(4, 2, tensor=2, tier="tight", settings=RECOMPUTED),
    "units given up at random": StagedRun(4, 2, tier="all_on_disk", evictions=0),
    "units given up at random, all passes forward first": StagedRun(
        4, 2, schedule="gpipe", tier="all_on_disk", evictions=1
    ),
}
QUICK = (
    "with data in three tiers",
    "in ram",
    "in the least memory, recomputed",
    "with tensor parallelism",
    "breadth first in the least memory",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_it_learns_what_one_rank_learns(name: str, whole: StagedOutcome, disk: Path) -> None:
    how = CASES[name]
    outcomes = run_ranks(train, how.ranks, how, disk, limit_s=120)
    assert_same(outcomes, whole)
    stages = [how.stages - 1 - rank * how.stages // how.ranks for rank in range(how.ranks)]
    most = most_graphs(how.schedule, how.stages, how.micro_batches, chunks_of(how.schedule, how.stages, 4))
    assert [each.most_graphs for each in outcomes] == [most[stage] for stage in stages]
    for each in outcomes:  # what callbacks see is the same on all ranks, and one rank's
        assert each.metrics.keys() == whole.metrics.keys()
        assert {name: pytest.approx(value, abs=1e-6) for name, value in whole.metrics.items()} == each.metrics
    # Each rank has its part of all states: a stage's blocks over the ranks of the stage, all else over all ranks.
    for states, of_all in whole.bytes.items() if "pipeline_blocks" not in how.settings else ():
        assert all(each.bytes[states] < 1.01 * of_all / how.ranks for each in outcomes), (states, outcomes[0].bytes)


class Reads(L.Callback):
    """Counts the bytes of blocks that are brought from disk in each step."""

    def __init__(self) -> None:
        self.bytes = 0
        self.of_steps: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.bytes = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.of_steps.append(self.bytes)


def bytes_of_blocks(how: StagedRun, disk: Path) -> tuple[list[int], int]:
    """Returns the bytes of blocks that this rank has brought from disk in each step, and those of its blocks."""
    reads, blocks, fill = Reads(), {}, FlatStore.fill

    def counted(store: FlatStore) -> None:
        if store.layout.unit:
            blocks[store.layout.unit] = store.full_bytes
            reads.bytes += store.full_bytes
        fill(store)

    with patch.object(FlatStore, "fill", counted):
        train(how, disk, reads)
    return reads.of_steps, sum(blocks.values())


def test_breadth_first_reads_each_weight_once_in_each_direction(disk: Path) -> None:
    # Two pages more than the least: a unit is kept while the sum of its gradients is read and written.
    settings = {"spare_pages": 2}
    how = StagedRun(2, 2, schedule="breadth_first", tier="tight", steps=4, sizes={"layers": 6}, settings=settings)
    for of_steps, blocks in run_ranks(bytes_of_blocks, 2, how, disk):
        assert blocks < of_steps[-1] <= 2 * blocks  # the last block is kept from the forward to the backward


class OfRoot(L.Callback):
    """Counts gathers of the root unit, and its reductions, in each step, and its bytes at home on this rank."""

    def __init__(self) -> None:
        self.counted = {"gathers": 0, "reductions": 0}
        self.of_steps: list[dict[str, int]] = []
        self.bytes: dict[What, int] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self.counted = dict.fromkeys(self.counted, 0)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.of_steps.append(self.counted)
        blueprint = trainer.strategy.engine.blueprint  # type: ignore[attr-defined]
        for what in (What.PARAMETERS, What.STATES, What.GRADIENTS):
            rows = [
                row for flat in blueprint.layout.flats_of(0) for row in blueprint.inventory.of_flat(what, flat.index)
            ]
            self.bytes[what] = sum(row.numel * row.item_bytes * row.count for row in rows)


def root_of(how: StagedRun, disk: Path) -> tuple[list[dict[str, int]], dict[What, int]]:
    root, fill, collect = OfRoot(), FlatStore.fill, FlatGradient.collect

    def filled(store: FlatStore) -> None:
        root.counted["gathers"] += store.layout.unit == 0
        fill(store)

    def collected(gradient: FlatGradient, present: Any = None) -> None:
        root.counted["reductions"] += gradient.store.layout.unit == 0
        collect(gradient, present)

    with patch.object(FlatStore, "fill", filled), patch.object(FlatGradient, "collect", collected):
        train(how, disk, root)
    return root.of_steps, root.bytes


def test_a_stage_has_its_part_of_the_roots_states_and_gathers_and_reduces_it_once_a_step(disk: Path) -> None:
    """Also one between the first and the last, which has neither gradients of the embedding nor of the head."""
    sizes = {"vocab_size": 512}
    ((_, whole),) = run_ranks(root_of, 1, StagedRun(steps=4, sizes=sizes, tier="ram"), disk)
    for of_steps, part in run_ranks(root_of, 4, StagedRun(4, 4, steps=4, sizes=sizes, tier="ram"), disk):
        assert of_steps[-1] == {"gathers": 1, "reductions": 1}  # in a step in which stages are not compared
        for what in (What.PARAMETERS, What.STATES):
            assert 0 < part[what] <= 1.1 * whole[what] / 4, what
        assert 0 < part[What.GRADIENTS] <= 1.1 * whole[What.PARAMETERS] / 4


@pytest.mark.parametrize("tier", ["ram", pytest.param("tight", marks=pytest.mark.slow)])
def test_a_tied_head_accumulated_and_clipped_by_norm(tier: str, disk: Path) -> None:
    trainer = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "max_steps": 6}
    one = StagedRun(sizes={"tie_head": True}, trainer=trainer)
    (whole,) = run_ranks(train, 1, one, disk)
    assert_same(run_ranks(train, 2, dataclasses.replace(one, ranks=2, stages=2, tier=tier), disk), whole)


class WithoutIndex(StagedGPT):
    """A module whose training_step takes no batch_idx."""

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_a_training_step_need_not_take_the_index_of_the_batch(disk: Path) -> None:
    one = StagedRun(trainer={"accumulate_grad_batches": 2, "max_steps": 3})
    (whole,) = run_ranks(partial(train, model=WithoutIndex), 1, one, disk)
    two = dataclasses.replace(one, ranks=2, stages=2)
    assert_same(run_ranks(partial(train, model=WithoutIndex), 2, two, disk), whole)


@pytest.mark.slow
def test_gradients_of_blocks_reduced_at_the_step(disk: Path) -> None:
    settings = {"tuning": {"reduce_gradients": "each_step"}}
    (whole,) = run_ranks(train, 1, StagedRun(), disk)
    assert_same(run_ranks(train, 4, StagedRun(4, 2, settings=settings), disk), whole)


@pytest.mark.slow
def test_a_loss_scale_and_overflows_are_one_ranks(disk: Path) -> None:
    """The first steps overflow, and are left out on all ranks."""
    one = StagedRun(precision="16-mixed", steps=8)
    (whole,) = run_ranks(train, 1, one, disk)
    outcomes = run_ranks(train, 2, dataclasses.replace(one, ranks=2, stages=2), disk)
    assert_same(outcomes, whole, losses=2e-2, weights=2e-3)


@pytest.mark.parametrize(
    ("kind", "tier", "sizes"),
    [
        ("full", "ram", ((2, 2), (1, 1), (4, 2))),
        pytest.param("sharded", "all_on_disk", ((1, 1), (2, 2), (2, 2)), marks=pytest.mark.slow),
        pytest.param("sharded", "ram", ((4, 2), (2, 1), (4, 4)), marks=pytest.mark.slow),
        pytest.param("async", "tight", ((2, 2), (4, 2), (1, 1)), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_with_other_sizes(
    kind: str, tier: str, sizes: tuple[tuple[int, int], ...], in_turn: list[StagedOutcome], tmp_path: Path
) -> None:
    checkpoints = {"state_dict_type": "full" if kind == "full" else "sharded", "async_save": kind == "async"}
    assert_same(runs_in_turn(tmp_path, sizes, tier=tier, settings={"checkpoints": checkpoints}), in_turn[0])


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> list[StagedOutcome]:
    return runs_in_turn(tmp_path_factory.mktemp("one"), 3 * ((1, 1),))


def runs_in_turn(folder: Path, sizes: tuple[tuple[int, int], ...], **options: Any) -> list[StagedOutcome]:
    """Runs of four steps each, in the middle of an epoch, of (ranks, stages), which begin with the checkpoint of the one
    before; returns what the last one ends with, and the losses of all."""
    resumed, outcomes, losses = None, [], []
    for part, (ranks, stages) in enumerate(sizes, 1):
        how = StagedRun(ranks, stages, steps=4 * part, saved_to=f"{part}.ckpt", resumed_from=resumed, **options)
        outcomes = run_ranks(train, ranks, how, folder, limit_s=120)
        losses += [sum(each) / ranks for each in zip(*(outcome.losses for outcome in outcomes), strict=True)]
        resumed = str(folder / f"{part}.ckpt")
    return [dataclasses.replace(each, losses=losses) for each in outcomes]
