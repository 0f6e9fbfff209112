"""Ranks that do different things in one step: nothing hangs, and a rank without a gradient counts as zeros.

With two ranks halves are exact, so even gradients that reach the others in two rounds give the bits of one; with three
the order of additions shows, and the difference is bounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rank_harness import run_ranks
from rank_models import (
    BonusOnOneRank,
    MomentumTower,
    NobodyUsesABlock,
    NothingOnAnyRank,
    NothingOnOneRank,
    Reversed,
    SkipsABlock,
    StepsAtEverySecond,
    UsesOneBlockEach,
)
from rank_training import (
    TIERS,
    Outcome,
    Training,
    fit,
    fit_in_all_tiers,
    loader,
    make_strategy,
    make_trainer,
    outcome_of,
    plain,
    tokens,
)

DIFFERENT = [
    SkipsABlock,
    UsesOneBlockEach,
    NobodyUsesABlock,
    Reversed,
    BonusOnOneRank,
    NothingOnOneRank,
    NothingOnAnyRank,
]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("build", DIFFERENT)
def test_two_ranks(build: Any, precision: str, disk: Path) -> None:
    training = Training(build, precision, batches=5)
    theirs = plain(training, 2)
    per_rank = run_ranks(fit_in_all_tiers, 2, training, 2, disk, {}, list(TIERS))
    for rank, tiers in enumerate(per_rank):
        for ours in tiers.values():
            ours.assert_equal(theirs[rank])


@pytest.mark.parametrize(
    "settings", [{"recompute": "all"}, {"update_in_backward": False}], ids=["recompute", "no_early"]
)
@pytest.mark.parametrize("build", DIFFERENT)
def test_two_ranks_with_other_settings(build: Any, settings: dict[str, Any], disk: Path) -> None:
    training = Training(build, batches=5)
    theirs = plain(training, 2)
    per_rank = run_ranks(fit_in_all_tiers, 2, training, 2, disk, settings, ["ram", "three_tiers"])
    for rank, tiers in enumerate(per_rank):
        for ours in tiers.values():
            ours.assert_equal(theirs[rank])


class MomentumSkips(SkipsABlock, MomentumTower):
    pass


class MomentumEach(UsesOneBlockEach, MomentumTower):
    pass


class MomentumReversed(Reversed, MomentumTower):
    pass


class MomentumBonus(BonusOnOneRank, MomentumTower):
    pass


class MomentumNothing(NothingOnOneRank, MomentumTower):
    pass


@pytest.mark.parametrize("build", [MomentumSkips, MomentumEach, MomentumReversed, MomentumBonus])
def test_two_ranks_with_accumulation(build: Any, disk: Path) -> None:
    training = Training(build, batches=6, accumulate=2)
    theirs = plain(training, 2)
    per_rank = run_ranks(fit_in_all_tiers, 2, training, 2, disk, {}, ["ram", "all_on_disk"])
    for rank, tiers in enumerate(per_rank):
        for ours in tiers.values():
            torch.testing.assert_close(ours.weights, theirs[rank].weights, rtol=0, atol=1e-6)
            ours.assert_same_weights(per_rank[0]["ram"])


@pytest.mark.parametrize("build", [MomentumSkips, MomentumEach, MomentumReversed, MomentumBonus])
def test_two_ranks_that_reduce_once_a_step(build: Any, disk: Path) -> None:
    training = Training(build, batches=6, accumulate=2, reduce_once=True)
    theirs = plain(training, 2)
    settings = {"reduce_gradients": "each_step"}
    per_rank = run_ranks(fit_in_all_tiers, 2, training, 2, disk, settings, ["ram", "all_on_disk"])
    for rank, tiers in enumerate(per_rank):
        for ours in tiers.values():
            torch.testing.assert_close(ours.weights, theirs[rank].weights, rtol=0, atol=1e-6)
            ours.assert_same_weights(per_rank[0]["ram"])


@pytest.mark.parametrize("build", [MomentumSkips, MomentumEach, MomentumReversed, MomentumNothing])
def test_three_ranks(build: Any, disk: Path) -> None:
    training = Training(build, batches=5)
    theirs = plain(training, 3)
    several = run_ranks(fit, 3, training, 3, disk)
    for rank, ours in enumerate(several):
        torch.testing.assert_close(ours.weights, theirs[rank].weights, rtol=0, atol=1e-6)
        ours.assert_same_weights(several[0])


class ReadEveryBatch(L.Callback):
    def __init__(self) -> None:
        self.read: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *rest: Any) -> None:
        with trainer.strategy.gathered(module.blocks[2], write=False):
            self.read.append(module.blocks[2].up.weight.detach().clone())


def read_every_batch(training: Training, folder: Path, tier: str) -> tuple[Outcome, list[torch.Tensor]]:
    torch.manual_seed(0)
    module, reader = training.build(), ReadEveryBatch()
    trainer = make_trainer(training, make_strategy(folder, tier), 2, callbacks=[reader], accumulate_grad_batches=1)
    trainer.fit(module, loader(tokens(training, 2), 2))
    return outcome_of(module), reader.read


@pytest.mark.parametrize("tier", ["ram", "all_on_disk"])
def test_weights_are_read_while_one_rank_has_skipped_its_backward(tier: str, disk: Path) -> None:
    """The other is at the end of its backward pass then, and must not take the reading for a collective of it."""
    training = Training(StepsAtEverySecond, batches=6, accumulate=2)
    theirs = plain(training, 2)
    for rank, (ours, read) in enumerate(run_ranks(read_every_batch, 2, training, disk, tier)):
        ours.assert_equal(theirs[rank])
        assert torch.equal(read[-1], ours.weights["blocks.2.up.weight"])
        assert torch.equal(read[2], read[1])
        assert not torch.equal(read[3], read[2])
