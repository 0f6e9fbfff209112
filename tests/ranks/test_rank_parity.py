"""On several ranks too, where model states live changes no bit, and the numbers are those of plain data parallelism."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import MomentumTower, SkipsAnother, Tower, Uneven
from kit.ranks.training import (
    PLACES,
    TIERS_TOGETHER,
    ClippedInFp64,
    Training,
    expected,
    fit,
    fit_in_all_tiers,
    fit_whole_batches,
    loader,
    make_trainer,
    tiers_together,
    tokens,
)

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.runtime.autograd import activation_policy, offload
from lightning_ptm.runtime.engine.engine import Engine

PRECISIONS = ["bf16-mixed", "32-true"]


def outcomes(training: Training, world_size: int, folder: Path, tiers: Sequence[str], **settings: Any) -> list[Outcome]:
    """The outcome on each rank; checks that all of `tiers` are alike, and the weights of all ranks."""
    per_rank = run_ranks(fit_in_all_tiers, world_size, training, world_size, folder, settings, tiers)
    for of_rank in per_rank:
        for tier in tiers:
            of_rank[tier].assert_equal(of_rank[tiers[0]])
            of_rank[tier].assert_same_weights(per_rank[0][tier])
    return [of_rank[tiers[0]] for of_rank in per_rank]


def fit_with_activations_on_disk(training: Training, world_size: int, folder: Path, tier: str) -> Outcome:
    offload.LEAST_BYTES = 512
    return fit(training, world_size, folder, tier, offload_activations="disk")


@pytest.mark.parametrize("tier", ["ram", "tight"])
def test_activations_of_two_ranks_on_disk(tier: str, disk: Path) -> None:
    training = Training(Tower, "bf16-mixed", accumulate=2)
    found = run_ranks(fit_with_activations_on_disk, 2, training, 2, disk, tier)
    for ours, theirs in zip(found, expected(training, 2), strict=True):
        ours.assert_equal(theirs)


def fit_where_one_rank_has_no_room(training: Training, world_size: int, folder: Path, to: str) -> Outcome:
    """Rank 1 keeps its activations; rank 0 finds memory short at every second call."""
    offload.LEAST_BYTES = 512
    activation_policy._LOOK_S = 0.0
    room = itertools.cycle((1 << 20, 1 << 10) if os.environ.get("RANK", "0") == "0" else (1 << 20,))
    Engine._activation_room = lambda engine: lambda: next(room)  # type: ignore[method-assign]
    return fit(training, world_size, folder, "tight", offload_activations=to, recompute="auto")


@pytest.mark.parametrize("to", ["auto", "none"])
def test_ranks_need_not_agree_on_what_becomes_of_activations(to: str, disk: Path) -> None:
    training = Training(Tower, "bf16-mixed", accumulate=2)
    found = run_ranks(fit_where_one_rank_has_no_room, 2, training, 2, disk, to)
    for ours, theirs in zip(found, expected(training, 2), strict=True):
        ours.assert_equal(theirs)


def test_each_tier_is_among_those_that_are_tried_together() -> None:
    assert sorted(itertools.chain(*(case.values[0] for case in TIERS_TOGETHER.args[1]))) == sorted(PLACES)
    assert not any(case.marks for case in TIERS_TOGETHER.args[1])


@pytest.mark.diagonal
@TIERS_TOGETHER
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("build", [Tower, Uneven])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_tier_is_plain_data_parallelism(
    world_size: int, build: Any, precision: str, tiers: list[str], disk: Path
) -> None:
    training = Training(build, precision)
    ours = outcomes(training, world_size, disk, tiers)
    for rank, theirs in enumerate(expected(training, world_size)):
        ours[rank].assert_equal(theirs)
    # The ranks have different batches.
    assert not torch.equal(ours[0].losses[0], ours[1].losses[0])


@pytest.mark.slow_unless("32-true-three_tiers+tight")
@tiers_together("masters_on_disk+lock_free", "three_tiers+tight")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_changes_no_bit(precision: str, tiers: list[str], disk: Path) -> None:
    training = Training(Tower, precision)
    ours = outcomes(training, 2, disk, tiers, recompute="all")
    for rank, theirs in enumerate(expected(training, 2)):
        ours[rank].assert_equal(theirs)


@pytest.mark.slow_unless("2-32-true-three_tiers+tight")
@tiers_together("ram+all_on_disk", "three_tiers+tight")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation(world_size: int, precision: str, tiers: list[str], disk: Path) -> None:
    training = Training(Tower, precision, batches=6, accumulate=3)
    ours = outcomes(training, world_size, disk, tiers, recompute="every 2nd")
    for rank, theirs in enumerate(expected(training, world_size)):
        ours[rank].assert_equal(theirs)


@pytest.mark.slow_unless("Uneven-32-true-three_tiers+tight")
@TIERS_TOGETHER
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("build", [Tower, Uneven, SkipsAnother])
def test_accumulation_that_is_reduced_once_a_step(build: Any, precision: str, tiers: list[str], disk: Path) -> None:
    training = Training(build, precision, batches=6, accumulate=3, reduce_once=True)
    ours = outcomes(training, 2, disk, tiers, tuning={"reduce_gradients": "each_step"})
    for rank, theirs in enumerate(expected(training, 2)):
        ours[rank].assert_equal(theirs)


def reductions(training: Training, folder: Path, reduce_gradients: str) -> int:
    """How often one rank's units were reduced in a fit."""
    from lightning_ptm.comm import ProcessGroupCommunicator

    count, reduce_scatter = 0, ProcessGroupCommunicator.reduce_scatter

    def counted(self: ProcessGroupCommunicator, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        return reduce_scatter(self, *arguments)

    torch.manual_seed(0)
    strategy = AngelPTMStrategy(page_size="64KiB", tuning={"reduce_gradients": reduce_gradients})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCommunicator, "reduce_scatter", counted)
        make_trainer(training, strategy, 2).fit(training.build(), loader(tokens(training, 2), 2))
    return count


def test_reductions_that_are_not_needed_are_not_made(disk: Path) -> None:
    training = Training(Tower, batches=6, accumulate=3)
    often, seldom = (run_ranks(reductions, 2, training, disk, each)[0] for each in ("each_backward", "each_step"))
    assert often == 3 * seldom > 0


@pytest.mark.diagonal
@tiers_together("masters_on_disk+lock_free", "three_tiers+tight")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipping_by_norm(precision: str, accumulate: int, tiers: list[str], disk: Path) -> None:
    training = Training(MomentumTower, precision, accumulate=accumulate, clip=0.2)
    theirs = ClippedInFp64(training, 2).run(tokens(training, 2))
    for ours, plain in zip(outcomes(training, 2, disk, tiers, recompute="all"), theirs, strict=True):
        ours.assert_equal(plain)


@pytest.mark.diagonal
@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-14), ("32-true", 1e-6)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_with_one_rank_on_the_same_global_batch(
    world_size: int, precision: str, tolerance: float, disk: Path
) -> None:
    """Equal but for the order in which a batch's gradients are added up."""
    training = Training(MomentumTower, precision, clip=1.0)
    several = run_ranks(fit, world_size, training, world_size, disk)
    (one,) = run_ranks(fit_whole_batches, 1, training, disk, world_size)
    for name, weight in several[0].weights.items():
        assert (weight - one.weights[name]).abs().max() <= tolerance, name
    for step, loss in enumerate(one.losses):
        mean = torch.stack([outcome.losses[step] for outcome in several]).mean()
        assert abs(mean - loss) <= tolerance * 10
