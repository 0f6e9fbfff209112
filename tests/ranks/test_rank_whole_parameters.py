"""Optimizers that update whole parameters (Muon, Adafactor, LAMB...) on several ranks, each of which owns some parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import NobodyUsesABlock, SkipsABlock
from kit.ranks.training import (
    PLACES,
    Training,
    expected,
    fit,
    fit_in_all_tiers,
    fit_whole_batches,
    loader,
    make_strategy,
    make_trainer,
    tiers_together,
    tokens,
)
from kit.ranks.whole_parameters import KINDS, Hybrid, WithAdafactor, WithHybrid
from test_rank_inventory import Weighed, cases, every_third, weigh_all

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.checkpoints import restore
from lightning_ptm.errors import UsageError
from lightning_ptm.planning.inventory import What
from lightning_ptm.terms import TIERS as ALL_TIERS


def assert_as_plain(training: Training, world_size: int, disk: Path, tiers: list[str]) -> None:
    # Device pages are handed out first fit. In the least memory it depends on the other rank's pace which ones are free, and
    # the largest gradient then may find no contiguous run.
    spare = {"spare_pages": 8}
    per_rank = run_ranks(fit_in_all_tiers, world_size, training, world_size, disk, spare, tiers)
    for rank, of_rank in enumerate(per_rank):
        for ours in of_rank.values():
            ours.assert_equal(expected(training, world_size)[rank])


@pytest.mark.parametrize(
    ("world_size", "build"),
    [
        pytest.param(ranks, kind, marks=[] if (ranks, kind) == (2, WithHybrid) else [pytest.mark.slow])
        for ranks in (2, 4)
        for kind in KINDS
    ],
)
def test_every_tier_is_plain_data_parallelism(world_size: int, build: Any, disk: Path) -> None:
    assert_as_plain(Training(build), world_size, disk, list(PLACES))


class SkipsAtTimes(WithHybrid, SkipsABlock):
    """Rank 1 has no gradient of a block at every second step."""


class NobodysAtTimes(WithAdafactor, NobodyUsesABlock):
    """Nobody has one at a step."""


@pytest.mark.slow
@pytest.mark.parametrize("build", [SkipsAtTimes, NobodysAtTimes])
def test_gradients_that_some_or_all_ranks_lack(build: Any, disk: Path) -> None:
    assert_as_plain(Training(build), 2, disk, list(PLACES))


@pytest.mark.slow_unless("bf16-mixed-WithHybrid-three_tiers+tight")
@tiers_together("masters_on_disk+lock_free", "three_tiers+tight")
@pytest.mark.parametrize("build", [WithAdafactor, WithHybrid])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_accumulation(precision: str, build: Any, tiers: list[str], disk: Path) -> None:
    assert_as_plain(Training(build, precision, batches=6, accumulate=3), 2, disk, tiers)


@pytest.mark.parametrize(
    ("world_size", "build"),
    [(2, WithAdafactor), *(pytest.param(ranks, kind, marks=pytest.mark.slow) for ranks in (3, 4) for kind in KINDS)],
)
def test_any_number_of_ranks_has_the_weights_of_one(world_size: int, build: Any, disk: Path) -> None:
    """Tests clipping by a norm of all ranks' parameters; equal up to the order in which gradients are added up."""
    training = Training(build, "64-true", clip=0.2)
    several = run_ranks(fit, world_size, training, world_size, disk)
    (one,) = run_ranks(fit_whole_batches, 1, training, disk, world_size)
    for name, weight in several[0].weights.items():
        assert (weight - one.weights[name]).abs().max() <= 1e-9, name
    for step, loss in enumerate(one.losses):
        mean = torch.stack([outcome.losses[step] for outcome in several]).mean()
        assert abs(mean - loss) <= 1e-12


class Owns(L.Callback):
    """Bytes of a rank's master parameters and optimizer states, and of the largest parameter's."""

    def __init__(self) -> None:
        self.states, self.largest = 0, 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, AngelPTMStrategy)
        blueprint = trainer.strategy.engine.blueprint
        rows = blueprint.inventory.rows
        self.states = sum(
            row.count * row.numel * row.item_bytes for row in rows if row.what in (What.MASTERS, What.STATES)
        )
        self.largest = max(slot.spec.states_bytes for flat in blueprint.layout.flats for slot in flat.slots)


def states_of_a_rank(training: Training, world_size: int, folder: Path) -> tuple[int, int]:
    torch.manual_seed(0)
    owns = Owns()
    trainer = make_trainer(training, make_strategy(folder), world_size, callbacks=[owns])
    trainer.fit(training.build(), loader(tokens(training, world_size), world_size))
    return owns.states, owns.largest


def test_of_two_ranks_each_has_half_of_the_states(disk: Path) -> None:
    training = Training(WithHybrid, "bf16-mixed", batches=1)
    ((all_of_them, largest),) = run_ranks(states_of_a_rank, 1, training, 1, disk)
    for ours, _ in run_ranks(states_of_a_rank, 2, training, 2, disk):
        assert ours <= 0.52 * all_of_them + largest
        assert ours < 0.8 * all_of_them, "the largest parameter is small here"


@pytest.mark.parametrize("third", [*(pytest.param(third, marks=pytest.mark.slow) for third in (0, 1)), 2])
def test_pages_are_taken_as_planned(third: int, disk: Path) -> None:
    named = every_third(cases(WithHybrid, {}), third)
    wrong: list[tuple[int, str, Weighed]] = []
    for rank, found in enumerate(run_ranks(weigh_all, 2, list(named.values()), 2, disk, limit_s=300)):
        for name, weighed in zip(named, found, strict=True):
            assert len(weighed) == 2 * len(ALL_TIERS)
            wrong += [(rank, name, each) for each in weighed if (each.pool, each.taken) != (each.rows, each.rows_held)]
    assert not wrong, "\n".join(map(str, wrong))


class TrainsOneMatrix(WithHybrid):
    """So one rank owns all that is trained."""

    optimizer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False).blocks[1].up.weight.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        self.optimizer = Hybrid([self.blocks[1].up.weight])
        return self.optimizer


def room_for_weights_alone() -> int:
    """Free RAM as the end of a run sees it: none when states are to be given back."""
    return 0 if sys._getframe(2).f_code.co_name == restore.optimizer_states.__name__ else 1 << 40


def asks_for_states_afterwards(training: Training, world_size: int, folder: Path) -> str:
    torch.manual_seed(0)
    module: Any = training.build()
    trainer = make_trainer(training, make_strategy(folder, "masters_on_disk"), world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "free_host_bytes", room_for_weights_alone)
        trainer.fit(module, loader(tokens(training, world_size), world_size))
    with pytest.raises(UsageError) as told:
        module.optimizer.state_dict()
    return str(told.value)


def test_a_rank_that_owns_nothing_says_too_that_an_optimizers_states_have_ended(disk: Path) -> None:
    told = run_ranks(asks_for_states_afterwards, 2, Training(TrainsOneMatrix, batches=1), 2, disk)
    assert len(set(told)) == 1
    assert "states of this Hybrid were lost at the end of an earlier run" in told[0]
