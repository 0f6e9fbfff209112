"""Ranks that do different things in one step: nothing hangs, and a rank without a gradient counts as zeros.

With two ranks halves are exact, so even gradients that reach the others in two rounds give the bits of one; with three
the order of additions shows, and the difference is bounded.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.models import (
    BonusOnOneRank,
    ByHand,
    MomentumTower,
    NobodyUsesABlock,
    NothingOnAnyRank,
    NothingOnOneRank,
    Reversed,
    SkipsABlock,
    StepsAtEverySecond,
    Tower,
    UsesOneBlockEach,
)
from kit.ranks.training import (
    TIERS_TOGETHER,
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
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.planning.plan import Plan
from lightning_ptm.terms import Mode, Phase


def in_its_turn(build: Any) -> Any:
    return pytest.param(build, marks=pytest.mark.slow)


DIFFERENT = [
    SkipsABlock,
    UsesOneBlockEach,
    NobodyUsesABlock,
    Reversed,
    BonusOnOneRank,
    NothingOnOneRank,
    NothingOnAnyRank,
]


SOME = [each if each in (SkipsABlock, Reversed, NothingOnOneRank) else in_its_turn(each) for each in DIFFERENT]


def assert_plain(training: Training, settings: dict[str, Any], tiers: Sequence[str], folder: Path) -> None:
    """Bit for bit, on each of two ranks."""
    expected = plain(training, 2)
    for rank, outcomes in enumerate(run_ranks(fit_in_all_tiers, 2, training, 2, folder, settings, tiers)):
        for ours in outcomes.values():
            ours.assert_equal(expected[rank])


@pytest.mark.diagonal
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@TIERS_TOGETHER
@pytest.mark.parametrize("build", DIFFERENT)
def test_two_ranks(build: Any, tiers: list[str], precision: str, disk: Path) -> None:
    assert_plain(Training(build, precision, batches=5), {}, tiers, disk)


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ["ram", "three_tiers"])
@pytest.mark.parametrize("build", SOME)
def test_two_ranks_recomputed(build: Any, tier: str, disk: Path) -> None:
    assert_plain(Training(build, batches=5), {"recompute": "all"}, [tier], disk)


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


@pytest.mark.diagonal
@pytest.mark.parametrize("reduced", ["each_backward", "each_step"])
@pytest.mark.parametrize(
    "build", [in_its_turn(MomentumSkips), MomentumEach, in_its_turn(MomentumReversed), MomentumBonus]
)
def test_two_ranks_with_accumulation(build: Any, reduced: str, disk: Path) -> None:
    """Gradients are reduced after each micro-batch, or once a step."""
    training = Training(build, batches=6, accumulate=2, reduce_once=reduced == "each_step")
    theirs = plain(training, 2)
    settings, tiers = {"tuning": {"reduce_gradients": reduced}}, ["ram", "all_on_disk"]
    per_rank = run_ranks(fit_in_all_tiers, 2, training, 2, disk, settings, tiers)
    for rank, outcomes in enumerate(per_rank):
        for ours in outcomes.values():
            torch.testing.assert_close(ours.weights, theirs[rank].weights, rtol=0, atol=1e-6)
            ours.assert_same_weights(per_rank[0]["ram"])


@pytest.mark.parametrize(
    "build", [MomentumSkips, in_its_turn(MomentumEach), in_its_turn(MomentumReversed), MomentumNothing]
)
def test_three_ranks(build: Any, disk: Path) -> None:
    training = Training(build, batches=5)
    theirs = plain(training, 3)
    several = run_ranks(fit, 3, training, 3, disk)
    for rank, ours in enumerate(several):
        torch.testing.assert_close(ours.weights, theirs[rank].weights, rtol=0, atol=1e-6)
        ours.assert_same_weights(several[0])


class WiderOnRankOne(Tower):
    """Model that is wider on rank 1; `HIDDEN` is the width on rank 0."""

    def __init__(self) -> None:
        super().__init__(hidden=(256, 640, 320 + 64 * int(os.environ["RANK"])))


def at_home_elsewhere(folder: Path) -> None:
    fit(Training(Tower), 2, folder, "three_tiers", offload_parameters=("host", "device")[int(os.environ["RANK"])])


@pytest.mark.parametrize(
    ("body", "args", "says"),
    [
        (
            fit,
            (Training(WiderOnRankOne), 2),
            "rank 1 has blocks.2.up.weight of shape (384, 64), float32, trained by optimizer 0, at element 192 of flat "
            "3, where rank 0 has blocks.2.up.weight of shape (320, 64), float32, trained by optimizer 0, at element "
            "192 of flat 3; their collectives would deadlock",
        ),
        (at_home_elsewhere, (), "rank 1 has "),
    ],
    ids=["model", "setting"],
)
def test_what_ranks_build_or_plan_otherwise_is_named_on_all_of_them(
    body: Any, args: Sequence[Any], says: str, disk: Path
) -> None:
    ended = watch_ranks(body, 2, *args, disk)
    assert {each.end for each in ended} == {End.RAISED}
    assert all(says in each.error for each in ended), ended


class StepsInside(ByHand):
    """Where gradients wait to be reduced."""

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        loss = self.loss(batch, self.trainer.global_rank, index)
        assert loss is not None
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(loss)
            self.optimizers().step()  # type: ignore[union-attr]


def refused(training: Training, folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        fit(training, 2, folder, "masters_on_disk", tuning={"reduce_gradients": "each_step"})
    return str(caught.value)


def test_a_step_where_gradients_wait_to_be_reduced_is_an_error_of_all(disk: Path) -> None:
    for text in run_ranks(refused, 2, Training(StepsInside, batches=1), disk):
        assert text.startswith("optimizer.step(), clipping or gradient_norm() was called inside no_sync()")


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


class Seen(L.Callback):
    """Record of how the parts of the engine treated the run.

    Attributes:
        at_steps: by step, the units that are updated when the optimizer's step begins.
        order: of units and phases, in the trace that the plan followed last was made for.
        digest: of that plan.
        plans_made: how often.
    """

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.at_steps: list[set[str]] = []
        engine: Any = trainer.strategy.engine
        step = engine.updates.step  # hooks of the optimizer come before its closure, and so before the backward pass

        def looked_at(*args: Any, **kwargs: Any) -> None:
            self.look(engine)
            step(*args, **kwargs)

        engine.updates.step = looked_at

    def look(self, engine: Any) -> None:
        updated = {unit for unit, flats in enumerate(engine.flats) if any(flat.gradient.handed for flat in flats)}
        self.at_steps.append({engine.blueprint.units[unit].name for unit in updated})

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        plan, trace = trainer.strategy.engine.executor.plans.planned(Mode.TRAIN)
        self.order = [(tick.unit, tick.phase) for tick in trace.ticks]
        self.plan = plan
        self.plans_made = trainer.strategy.plans_made


@dataclasses.dataclass(frozen=True)
class Report:
    outcome: Outcome
    at_steps: list[set[str]]
    order: list[tuple[int, Phase]]
    plan: Plan
    plans_made: int


def seen(training: Training, folder: Path, tier: str, **settings: Any) -> Report:
    torch.manual_seed(0)
    module, watch = training.build(), Seen()
    trainer = make_trainer(training, make_strategy(folder, tier, **settings), 2, callbacks=[watch])
    trainer.fit(module, loader(tokens(training, 2), 2))
    return Report(outcome_of(module), watch.at_steps, watch.order, watch.plan, watch.plans_made)


@pytest.mark.parametrize("tier", ["masters_on_disk", "lock_free"])
def test_only_the_unit_that_some_ranks_leave_out_is_updated_late(tier: str, disk: Path) -> None:
    training = Training(SkipsABlock, batches=4)
    theirs = plain(training, 2)
    everything = {"", "blocks.0", "blocks.1", "blocks.2"}
    for rank, ours in enumerate(run_ranks(seen, 2, training, disk, tier)):
        assert ours.at_steps == 2 * [everything, everything - {"blocks.1"}]
        ours.outcome.assert_equal(theirs[rank])


def test_the_plan_is_for_one_trace_on_all_ranks(disk: Path) -> None:
    """Also on the rank that goes through its blocks in another order, and is not traced again and again for it."""
    training = Training(Reversed, batches=6)
    first, second = run_ranks(seen, 2, training, disk, "all_on_disk")
    assert first.plan == second.plan
    assert first.order == second.order
    assert [unit for unit, phase in first.order if phase is Phase.FORWARD] == [0, 1, 2, 3]
    assert first.plans_made == second.plans_made == 1


class SeveralPasses(Reversed):
    """A batch goes through the blocks three times, as a text that is continued token by token does."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        for _ in range(3):
            super().validation_step(batch, index)


def plans_of_validation(folder: Path) -> int:
    torch.manual_seed(0)
    training = Training(SeveralPasses, batches=4)
    strategy, made = make_strategy(folder, "all_on_disk"), []
    watch = L.pytorch.callbacks.LambdaCallback(on_validation_end=lambda *_: made.append(strategy.plans_made))
    trainer = make_trainer(training, strategy, 2, callbacks=[watch])
    trainer.validate(training.build(), loader(tokens(training, 2), 2), verbose=False)
    return made[0]


def test_several_passes_in_another_order_are_planned_once(disk: Path) -> None:
    assert run_ranks(plans_of_validation, 2, disk) == [1, 1]
