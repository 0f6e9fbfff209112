"""Experts that ranks divide among them: the numbers of plain data parallelism, wherever the experts are.

Against the plain loop of kit/ranks/training.py, which knows one process only. In float64, where what differs (a matrix
product over the tokens of several ranks instead of a sum of products) is far below what any mistake would show.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import WIDTH, MomentumTower
from kit.ranks.training import (
    BATCH,
    TIMEOUT_S,
    Training,
    fit_in_all_tiers,
    loader,
    make_strategy,
    make_trainer,
    outcome_of,
    plain,
    tokens,
)
from test_rank_experts import MoETower
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.events import Event, EventKind
from lightning_ptm.models import T5MoE
from lightning_ptm.runtime.ranks.experts import TokenStats

BOUND = 1e-9


class MomentumMoE(MoETower, MomentumTower):
    """Model with an optimizer that, unlike Adam, is sensitive to the scale of gradients."""


def assert_near(ours: Outcome, theirs: Outcome, bound: float = BOUND) -> None:
    assert all(torch.isfinite(loss) for loss in ours.losses)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=bound)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=bound)


EXPERTS = {"units": ["MixtureOfExperts", "Expert"]}


@pytest.mark.parametrize(
    ("world_size", "size", "settings", "tiers"),
    [
        (2, 2, {}, ["three_tiers"]),
        pytest.param(2, 2, {}, ["ram", "all_on_disk"], marks=pytest.mark.slow),
        pytest.param(2, 2, {"recompute": "all"}, ["masters_on_disk"], marks=pytest.mark.slow),
        pytest.param(2, 2, {"recompute": "all"}, ["lock_free"], marks=pytest.mark.slow),
        # 4, 3 and 3 of the ten experts.
        pytest.param(3, 3, {"units": "auto"}, ["ram"], marks=pytest.mark.slow),
        pytest.param(3, 3, {"units": "auto"}, ["three_tiers"], marks=pytest.mark.slow),
        pytest.param(4, 2, {"recompute": "every 2nd"}, ["lock_free"], marks=pytest.mark.slow),
        pytest.param(4, 2, {"recompute": "every 2nd"}, ["all_on_disk"], marks=pytest.mark.slow),
    ],
)
def test_clipped_training(world_size: int, size: int, settings: dict[str, Any], tiers: list[str], disk: Path) -> None:
    training = Training(MomentumMoE, "64-true", batches=3, clip=0.5)
    theirs = plain(training, world_size)
    given = {**EXPERTS, "expert_parallel_size": size, **settings}
    for rank, outcomes in enumerate(run_ranks(fit_in_all_tiers, world_size, training, world_size, disk, given, tiers)):
        for ours in outcomes.values():
            assert_near(ours, theirs[rank])


def test_clipping_has_an_effect() -> None:
    clipped, free = (plain(Training(MomentumMoE, "64-true", batches=3, clip=clip), 2)[0] for clip in (0.5, None))
    assert abs(clipped.losses[-1] - free.losses[-1]) > 1e3 * BOUND


ACCUMULATING = Training(MomentumMoE, "64-true", accumulate=2)


@pytest.mark.parametrize(
    ("world_size", "training", "settings"),
    [
        (2, Training(MomentumMoE, "64-true", batches=3), {}),  # updated behind the backward pass
        pytest.param(4, Training(MomentumMoE, "64-true", batches=3), {}, marks=pytest.mark.slow),
        pytest.param(2, ACCUMULATING, {}, marks=pytest.mark.slow),
        pytest.param(
            2,
            dataclasses.replace(ACCUMULATING, reduce_once=True),
            {"tuning": {"reduce_gradients": "each_step"}},
            marks=pytest.mark.slow,
        ),
        (4, dataclasses.replace(ACCUMULATING, reduce_once=True), {"tuning": {"reduce_gradients": "each_step"}}),
    ],
    ids=["in_backward", "in_backward_two_groups", "accumulated", "each_step", "each_step_two_groups"],
)
def test_training(world_size: int, training: Training, settings: dict[str, Any], disk: Path) -> None:
    theirs = plain(training, world_size)
    given = {**EXPERTS, "expert_parallel_size": 2, **settings}
    for rank, ours in enumerate(
        run_ranks(fit_in_all_tiers, world_size, training, world_size, disk, given, ["all_on_disk"])
    ):
        assert_near(ours["all_on_disk"], theirs[rank])


def test_mixed_precision(disk: Path) -> None:
    """Sums in another order round differently in 16 bits, so weights may differ by 2% of what is learnt."""
    training = Training(MomentumMoE, "bf16-mixed")
    theirs = plain(training, 2)
    start = plain(dataclasses.replace(training, batches=0), 2)[0].weights
    given = {**EXPERTS, "expert_parallel_size": 2}
    for rank, outcomes in enumerate(run_ranks(fit_in_all_tiers, 2, training, 2, disk, given, ["three_tiers"])):
        ours = outcomes["three_tiers"]
        torch.testing.assert_close(ours.losses, theirs[rank].losses, rtol=0, atol=2e-2)
        for name, weight in theirs[rank].weights.items():
            learnt = (weight - start[name]).norm()
            assert (ours.weights[name] - weight).norm() <= 0.02 * learnt + 1e-6, name


# -- what is moved --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moved:
    """In training, on one rank.

    Attributes:
        experts: names of experts of which any page was copied between tiers.
        copied: bytes between tiers, of experts' pages.
        gathered: bytes of all gathers and reductions.
        exchanged: bytes of token exchanges.
        plans_made: how often the plan was made anew.
        held: names of the experts of this rank.
    """

    experts: set[str]
    copied: int
    gathered: int
    exchanged: int
    tokens: TokenStats | None
    plans_made: int
    held: set[str]


class Watch(L.Callback):
    """Hears of the whole training."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.events: list[Event] = []
        self._block = trainer.strategy.trace_events(self.events.append)
        self._block.__enter__()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        trainer.strategy.engine.drain()
        self._block.__exit__(None, None, None)
        layout = trainer.strategy.engine.blueprint.layout
        names = {f"flat {flat.index}": layout.units[flat.unit].name for flat in layout.flats}
        experts = {flat: name for flat, name in names.items() if ".experts." in name}
        copies = [event for event in self.events if event.kind is EventKind.COPY]
        of_experts = {
            flat: sum(event.bytes for event in copies if event.name.startswith(f"{flat} ")) for flat in experts
        }
        collectives = [event for event in self.events if event.kind is EventKind.COLLECTIVE]
        self.moved = Moved(
            experts={experts[flat] for flat, size in of_experts.items() if size},
            copied=sum(of_experts.values()),
            gathered=sum(event.bytes for event in collectives if event.name != "all_to_all"),
            exchanged=sum(event.bytes for event in collectives if event.name == "all_to_all"),
            tokens=trainer.strategy.statistics().tokens,
            plans_made=trainer.strategy.plans_made,
            held=set(experts.values()),
        )


def watched(training: Training, world_size: int, folder: Path, settings: dict[str, Any]) -> Moved:
    torch.manual_seed(0)
    watch = Watch()
    trainer = make_trainer(training, make_strategy(folder, "all_on_disk", **settings), world_size, callbacks=[watch])
    trainer.fit(training.build(), loader(tokens(training, world_size), world_size))
    return watch.moved


def test_only_experts_with_tokens_move_and_only_where_they_are(disk: Path) -> None:
    training = Training(MoETower, "64-true", batches=4)
    start, end = plain(dataclasses.replace(training, batches=0), 2)[0].weights, plain(training, 2)[0].weights
    touched = {
        name.rpartition(".")[0]
        for name, weight in end.items()
        if ".experts." in name and not torch.equal(weight, start[name])
    }
    divided = run_ranks(watched, 2, training, 2, disk, {**EXPERTS, "expert_parallel_size": 2})
    assert [len(moved.held) for moved in divided] == [10, 10]
    for moved in divided:
        assert moved.experts == moved.held & touched < moved.held
    assert divided[0].experts | divided[1].experts == touched

    # Each exchange: ten counts, rows there, results back, and the gradients of both; 64 numbers of 8 bytes a row.
    stats = [moved.tokens for moved in divided]
    for moved, counts in zip(divided, stats, strict=True):
        assert counts is not None and counts.exchanges == 2 * training.batches
        assert moved.exchanged == counts.exchanges * 10 * 8 + 2 * (counts.sent + counts.received) * WIDTH * 8
    assert sum(counts.sent for counts in stats) == sum(counts.received for counts in stats)

    # Without division each rank gathers every expert that any has tokens for, and reduces its gradient.
    for moved, undivided in zip(divided, run_ranks(watched, 2, training, 2, disk, EXPERTS), strict=True):
        assert undivided.tokens is None and undivided.exchanged == 0
        assert moved.plans_made == 1 < undivided.plans_made  # other experts are no other order of units
        assert moved.gathered < undivided.gathered / 7
        assert moved.gathered + moved.exchanged < undivided.gathered / 3


# -- around training ------------------------------------------------------------------------------------------------------

EDITED = "blocks.0.experts.9.project"
"""Name of an expert that rank 1 holds and rank 0 edits; no token goes to it."""


class Edit(L.Callback):
    """Reads and edits weights of experts that are elsewhere, and calls one."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        strategy, expert = trainer.strategy, module.blocks[0].experts[9]
        if strategy.global_rank == 0:
            with pytest.raises(
                UsageError, match=r"blocks.0.experts.9 \(Expert\) was called on a rank that does not hold it"
            ):
                expert(torch.zeros(1, WIDTH, dtype=torch.float64))
        with strategy.gathered(expert), torch.no_grad():
            self.read = expert.project.detach().clone()
            expert.project.fill_(0.25)
        with pytest.raises(UsageError, match=r"project was read or written"):
            expert.project.sum()


def around(training: Training, folder: Path) -> tuple[Outcome, Tensor]:
    torch.manual_seed(0)
    module, edit = training.build(), Edit()
    strategy = make_strategy(folder, "three_tiers", **EXPERTS, expert_parallel_size=2)
    trainer = make_trainer(training, strategy, 2, callbacks=[edit])
    trainer.fit(module, loader(tokens(training, 2), 2))
    learnt = outcome_of(module)
    trainer.validate(module, loader(tokens(training, 2, seed=2), 2))
    return dataclasses.replace(outcome_of(module), losses=learnt.losses), edit.read


def test_weights_are_read_edited_and_evaluated_wherever_they_are(disk: Path) -> None:
    training = Training(MoETower, "64-true", batches=2)
    torch.manual_seed(0)
    before = training.build().get_parameter(EDITED)
    theirs = plain(training, 2)
    for rank, (ours, read) in enumerate(run_ranks(around, 2, training, disk)):
        assert torch.equal(read, before.double())
        assert torch.equal(ours.weights[EDITED], torch.full_like(read, 0.25))
        edited = {EDITED: ours.weights[EDITED]}
        assert_near(
            dataclasses.replace(ours, validation_losses=[]),
            dataclasses.replace(theirs[rank], weights=theirs[rank].weights | edited),
        )
        module = training.build().double()
        module.load_state_dict(ours.weights)
        module.eval()
        rows = tokens(training, 2, seed=2)[rank::2]
        with torch.no_grad():
            expected = [module.loss(rows[index * BATCH : (index + 1) * BATCH], rank, 0) for index in range(2)]
        torch.testing.assert_close(ours.validation_losses, expected, rtol=0, atol=BOUND)


class UsesOthersWeights(MoETower):
    """Outside of any call."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        x = torch.nn.functional.linear(self.embedding(batch[:, 0]), self.blocks[0].experts[9 - 9 * rank].expand)
        return super().loss(batch, rank, step) + x.sum()


class FailsBetweenExchanges(MoETower):
    """Rank 1 at step 1, when the others of its group wait for its tokens."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        if rank == 1 and step == 1:
            self.blocks[1].router.register_forward_pre_hook(self.fail)
        return super().loss(batch, rank, step)

    def fail(self, module: Any, args: Any) -> None:
        raise ValueError("this rank has had enough")


def fail(training: Training, folder: Path) -> tuple[str, float]:
    module = training.build()
    trainer = make_trainer(training, make_strategy(folder, "all_on_disk", **EXPERTS, expert_parallel_size=2), 2)
    started_s = time.monotonic()
    with pytest.raises((ValueError, RankError, UsageError)) as caught:
        trainer.fit(module, loader(tokens(training, 2), 2))
    assert all(layer.expert_group is None for layer in module.blocks)
    return str(caught.value), time.monotonic() - started_s


def test_a_rank_that_fails_between_exchanges_takes_its_group_with_it(disk: Path) -> None:
    told = run_ranks(fail, 2, Training(FailsBetweenExchanges), disk)
    assert told[1][0] == "this rank has had enough"
    assert told[0][0].startswith("rank 1 failed with ValueError: this rank has had enough")
    assert all(seconds < TIMEOUT_S / 2 for _, seconds in told)


def test_weights_of_other_ranks_experts_are_not_used_by_accident(disk: Path) -> None:
    for text, _ in run_ranks(fail, 2, Training(UsesOthersWeights), disk):
        assert re.match(r"blocks\.0\.experts\.\d+\.\w+ was read or written outside of its module's forward", text)
        assert "to compute with it, call the module that it belongs to" in text


def stale(training: Training, folder: Path) -> tuple[Outcome, bool]:
    torch.manual_seed(0)
    module = training.build()
    settings = {**EXPERTS, "expert_parallel_size": 2, "lock_free": {"max_staleness": 2}}
    strategy = make_strategy(folder, "lock_free", **settings)
    balanced: list[bool] = []

    class Audit(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
            strategy.engine.drain()
            balanced.extend(audit.balanced and not audit.pending for audit in strategy.update_audit())

    trainer = make_trainer(training, strategy, 2, callbacks=[Audit()])
    trainer.fit(module, loader(tokens(training, 2), 2))
    return outcome_of(module), bool(balanced) and all(balanced)


def test_updates_may_be_late(disk: Path) -> None:
    """Each rank's experts go on as its disk allows; every gradient counts once, and the loss is near that of plain steps."""
    training = Training(MoETower, "64-true", batches=6)
    theirs = plain(training, 2)
    for rank, (ours, balanced) in enumerate(run_ranks(stale, 2, training, disk)):
        assert balanced
        torch.testing.assert_close(ours.losses[-1], theirs[rank].losses[-1], rtol=0.1, atol=0)


def job(folder: Path, size: int) -> list[float]:
    """T5-MoE built on the meta device."""
    torch.manual_seed(0)
    options = {"vocab_size": 64, "width": 64, "layers": 2, "heads": 4, "dropout": 0.0, "warmup_steps": 1}
    model = T5MoE(**options, experts=5, feed_forward_width=64, choices=2, gated=True, meta=True)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    rows = TensorDataset(*(torch.randint(1, 64, (12, length), generator=generator) for length in (12, 6)))
    strategy = make_strategy(folder, "masters_on_disk", units=["Block", "Expert"], expert_parallel_size=size)
    losses: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *rest: Any) -> None:
            losses.append(float(outputs["loss"]))

    trainer = make_trainer(Training(MoETower), strategy, 2, callbacks=[Watch()])
    trainer.fit(model, DataLoader(rows, batch_size=4))
    return losses


def test_t5_moe_with_experts_that_start_on_the_meta_device(disk: Path) -> None:
    undivided, divided = (run_ranks(job, 2, disk, size) for size in (1, 2))
    for ours, theirs in zip(divided, undivided, strict=True):
        assert len(ours) == 3
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert divided[0] != divided[1]
