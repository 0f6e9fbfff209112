"""Lock-free runs with real threads: bounded staleness, one version a micro-batch, nothing lost, errors that come through.

That `max_staleness=0` gives the synchronous numbers is tested wherever tests go through all tiers (`lock_free` is one).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.plain_loop import PlainLoop, TrainModule, make_trainer, tokens
from kit.settings import merged
from kit.stacks import Block, ScheduledStack, Stack
from lock_free_runs import BATCHES, WHERE, Gate, Watch, assert_all_applied, built, run
from torch import Tensor, nn

from lightning_ptm import (
    AngelPTMPrecision,
    AngelPTMStrategy,
    ConfigError,
    PageIOError,
    UsageError,
)
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.update.lock_free_buffers import LockFreeBuffers
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.shadow import ShadowOptimizer


@pytest.mark.parametrize("where", WHERE)
def test_compute_goes_on_while_the_disk_serves_nothing(strategy_at, where) -> None:
    gate = Gate()
    strategy = strategy_at(where, lock_free={"max_staleness": 100}, debug={"poison": False})
    strategy.file_ops = gate

    def after(step: int) -> None:
        if step == 2:
            strategy.engine.drain()
            gate.open_.clear()
        if step == 10:
            gate.open_.set()

    watch = Watch(after)
    module = run(strategy, built(), watch)
    assert all(torch.isfinite(loss) for loss in module.losses)
    # Eight steps without the disk: each produced a gradient, and none was applied.
    assert [audit.pending for audit in watch.seen[9][1]] == [8] * len(watch.seen[9][1])
    staleness = watch.seen[9][0].staleness
    assert staleness is not None and staleness.maximum == 7
    assert watch.seen[9][0].stall_s["update"] < 1.0
    assert_all_applied(watch.seen[-1][1], 12)


@pytest.mark.parametrize("where", WHERE)
def test_compute_waits_rather_than_exceed_max_staleness(strategy_at, where) -> None:
    gate = Gate()
    strategy = strategy_at(where, lock_free={"max_staleness": 2}, debug={"poison": False})
    strategy.file_ops = gate
    module = built()
    done_when_opened: list[int] = []

    def open_again() -> None:
        until = time.monotonic() + 30
        while len(module.losses) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.7)  # for a step more, if compute did not wait
        done_when_opened.append(len(module.losses))
        gate.open_.set()

    opener = threading.Thread(target=open_again)

    def after(step: int) -> None:
        if step == 2:
            strategy.engine.drain()
            gate.open_.clear()
            opener.start()

    watch = Watch(after)
    run(strategy, module, watch)
    opener.join()
    # Steps 2, 3 and 4 computed with what they had; step 5 would have lacked three gradients.
    assert done_when_opened == [5]
    statistics, audits = watch.seen[-1]
    assert statistics.staleness is not None and statistics.staleness.maximum == 2
    assert statistics.stall_s["update"] > 0.2
    assert_all_applied(audits, 12)


class HalfUnused(ScheduledStack):
    """In every other step block 1 uses half of its parameters."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        for place, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = x + block.up(x)[..., : x.shape[-1]] if place == 1 and index % 2 else block(x)
        return x


@pytest.mark.parametrize("where", WHERE)
def test_gradients_that_cannot_be_added_are_applied_apart(strategy_at, where) -> None:
    watch = Watch()
    run(strategy_at(where, lock_free={"max_staleness": 16}), built(HalfUnused), watch)
    assert all(audit.balanced for _, audits in watch.seen for audit in audits)
    assert_all_applied(watch.seen[-1][1], 12)


def test_a_bound_of_zero_is_the_synchronous_run_and_of_more_is_not(strategy_at) -> None:
    plain = PlainLoop(ScheduledStack).run(BATCHES)
    zero = run(strategy_at("lock_free", lock_free={"max_staleness": 0}), built())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(zero.losses, plain.losses, strict=True))
    gate = Gate()
    strategy = strategy_at("lock_free", lock_free={"max_staleness": 3}, debug={"poison": False})
    strategy.file_ops = gate
    late = run(
        strategy,
        built(),
        Watch(lambda step: gate.open_.clear() if step == 1 else gate.open_.set() if step == 3 else None),
    )
    assert torch.equal(late.losses[0], plain.losses[0])
    assert not torch.equal(late.losses[2], plain.losses[2])


UPDATES: dict[str, dict[str, Any]] = {
    "predicted": {"lock_free": {"max_staleness": 3}},
    "not predicted": {"lock_free": {"max_staleness": 3, "predict_weights": False}},
}


@pytest.mark.diagonal
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", UPDATES)
def test_a_warm_up_is_the_synchronous_run_and_what_comes_after_is_not(strategy_at, where, kind) -> None:
    plain = PlainLoop(ScheduledStack, accumulate=2, clip=0.5).run(BATCHES)
    gate = Gate()
    strategy = strategy_at(where, **merged(UPDATES[kind], lock_free={"warmup_steps": 4}, debug={"poison": False}))
    strategy.file_ops = gate

    def after(batch: int) -> None:
        if batch == 9:  # in the fifth step
            gate.open_.clear()
        elif batch == 12:
            gate.open_.set()

    watch = Watch(after)
    ours = run(strategy, built(), watch, accumulate_grad_batches=2, gradient_clip_val=0.5)
    equal = [torch.equal(mine, theirs) for mine, theirs in zip(ours.losses, plain.losses, strict=True)]
    assert all(equal[:8]) and not any(equal[10:]), equal
    assert [seen.staleness.maximum for seen, _ in watch.seen[:8]] == [0] * 8  # type: ignore[union-attr]
    assert watch.seen[-1][0].staleness.maximum > 0  # type: ignore[union-attr]
    assert_all_applied(watch.seen[-1][1], 6)


def test_a_warm_up_of_the_whole_training_goes_on_in_a_run_that_resumes(strategy_at, tmp_path) -> None:
    """The warm-up is over in a run that resumes after its end."""
    settings = {"lock_free": {"max_staleness": 3, "warmup_steps": 24}, "debug": {"poison": False}}
    plain = PlainLoop(ScheduledStack, epochs=3).run(BATCHES)
    path = tmp_path / "last.ckpt"

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(path)

    losses, staleness = [], []
    for epochs in (1, 2, 3):
        gate = Gate()

        def after(batch: int, gate: Gate = gate, late: bool = epochs == 3) -> None:
            if late and batch == 1:
                gate.open_.clear()
            elif batch == 4:
                gate.open_.set()

        watch, module = Watch(after), built()
        strategy = strategy_at("lock_free", **settings)
        strategy.file_ops = gate
        trainer = make_trainer(strategy, callbacks=[watch, Saves()], max_epochs=epochs)
        trainer.fit(module, BATCHES.loader(), ckpt_path=str(path) if epochs > 1 else None)
        losses += module.losses
        staleness.append(watch.seen[-1][0].staleness.maximum)  # type: ignore[union-attr]
    equal = [torch.equal(mine, theirs) for mine, theirs in zip(losses, plain.losses, strict=True)]
    assert all(equal[:24]) and not any(equal[26:]), equal
    assert staleness[:2] == [0, 0] and staleness[2] > 0


class Plain(Stack):
    """Model for which a weight prediction is the update itself, but for its rounding: no momentum, one rate, fp32."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("where", WHERE)
def test_a_forecast_makes_up_for_all_that_is_lacking_as_far_as_it_reaches(strategy_at, where) -> None:
    batches = tokens(40)
    plain = PlainLoop(Plain, "32-true").run(batches)
    far = []
    for forecast in (True, False):
        gate = Gate()
        strategy = strategy_at(
            where,
            lock_free={"max_staleness": 2, "warmup_steps": 2, "predict_weights": forecast},
            debug={"poison": False},
        )
        strategy.file_ops = gate

        def after(step: int, gate: Gate = gate, strategy: AngelPTMStrategy = strategy) -> None:
            if step % 10 == 4:
                strategy.engine.drain()
                gate.open_.clear()
            elif step % 10 == 7:  # the next step would lack three gradients
                gate.open_.set()

        watch, module = Watch(after), built(Plain)
        make_trainer(strategy, "32-true", callbacks=[watch]).fit(module, batches.loader())
        assert watch.seen[-1][0].staleness.maximum == 2  # type: ignore[union-attr]
        assert_all_applied(watch.seen[-1][1], 40)
        pairs = zip(module.losses, plain.losses, strict=True)
        far.append(max(abs(float(ours - theirs)) for ours, theirs in pairs))
        if forecast:
            assert all(torch.allclose(ours, plain.weights[name], atol=1e-3) for name, ours in module.named_parameters())
    assert far[0] < 1e-4 and 10 * far[0] + 1e-4 < far[1]  # at best it is 0


def test_so_it_does_for_what_is_accumulated_clipped_recomputed_and_drained_meanwhile(strategy_at) -> None:
    batches = tokens(60)
    plain = PlainLoop(Plain, "32-true", accumulate=2, clip=0.5).run(batches)
    gate = Gate()
    strategy = strategy_at(
        "lock_free", recompute="all", lock_free={"max_staleness": 2, "warmup_steps": 2}, debug={"poison": False}
    )
    strategy.file_ops = gate

    def after(batch: int) -> None:
        if batch % 20 == 8:
            strategy.engine.drain()
            gate.open_.clear()
        elif batch % 20 == 13:  # between two micro-batches
            gate.open_.set()
            if batch == 33:
                strategy.engine.drain()

    watch, module = Watch(after), built(Plain)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    make_trainer(strategy, "32-true", callbacks=[watch], **options).fit(module, batches.loader())
    pairs = zip(module.losses, plain.losses, strict=True)
    assert max(abs(float(ours - theirs)) for ours, theirs in pairs) < 1e-4
    assert watch.seen[-1][0].staleness.maximum == 2  # type: ignore[union-attr]
    assert_all_applied(watch.seen[-1][1], 30)


class Notes(list[Tensor]):
    """A list that a recomputed forward writes to, too: what it does to its module's own lists is forgotten."""


class Seen(Block):
    """Notes the bytes of its weights whenever they are read."""

    reads: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        self.reads.append(self.up.weight.detach().clone())
        return super().forward(x)


class SeesItsWeights(ScheduledStack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Seen() for _ in range(4))
        for block in self.blocks:
            block.reads = Notes()


@pytest.mark.parametrize("where", WHERE)
def test_forward_and_recomputed_forward_see_one_version(strategy_at, where) -> None:
    module = run(strategy_at(where, lock_free={"max_staleness": 3}, recompute="all"), built(SeesItsWeights))
    assert isinstance(module, SeesItsWeights)
    for block in module.blocks:
        assert isinstance(block, Seen)
        reads = block.reads
        assert len(reads) == 2 * 12
        assert all(torch.equal(reads[2 * step], reads[2 * step + 1]) for step in range(12))
        assert not torch.equal(reads[0], reads[-1])


class Validated(ScheduledStack):
    """Checks that evaluation sees what was trained: nothing is pending, and the weights are the masters', rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[int] = []

    def validation_step(self, batch: Tensor, index: int) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, AngelPTMStrategy)
        audits = strategy.update_audit()
        assert all(audit.pending == 0 for audit in audits)
        self.applied.append(audits[0].applied)
        loss = self.loss(batch, index)
        assert loss is not None
        with strategy.gathered(write=False):
            precise = {name: value.detach().clone() for name, value in self.named_parameters()}
        copy = ScheduledStack().requires_grad_(False)
        copy.load_state_dict({name: value.bfloat16() for name, value in precise.items()})
        for parameter in copy.parameters():
            parameter.data = parameter.data.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            expected = copy.loss(batch, index)
        assert expected is not None and torch.equal(loss, expected)


def test_drained_before_validation(strategy_at) -> None:
    module = built(Validated)
    strategy = strategy_at("lock_free", lock_free={"max_staleness": 4})
    trainer = make_trainer(strategy, val_check_interval=4)
    trainer.fit(module, BATCHES.loader(), tokens(2, seed=2).loader())
    assert isinstance(module, Validated)
    assert module.applied == [4, 4, 8, 8, 12, 12]


@pytest.mark.parametrize("restore_weights", [True, False])
def test_what_became_of_gradients_is_told_after_the_run_too(strategy_at, restore_weights) -> None:
    strategy = strategy_at("lock_free", lock_free={"max_staleness": 4}, tuning={"restore_weights": restore_weights})
    assert strategy.update_audit() == ()
    run(strategy, built())
    assert_all_applied(strategy.update_audit(), 12)


class Overflows(ScheduledStack):
    """The gradients of steps 3 and 4 are infinite."""

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().loss(batch, index)
        assert loss is not None
        return loss * (1e38 if index in (3, 4) else 1.0)


def test_steps_that_are_not_taken_are_counted_as_skipped(strategy_at) -> None:
    watch = Watch()
    plugin = AngelPTMPrecision("16-mixed", LossScale(init_scale=8.0))
    trainer = quiet_trainer(
        strategy_at("lock_free", lock_free={"max_staleness": 2}), plugins=[plugin], callbacks=[watch], max_epochs=1
    )
    trainer.fit(built(Overflows), BATCHES.loader())
    audits = watch.seen[-1][1]
    assert_all_applied(audits, 12)
    assert [audit.skipped for audit in audits] == [2] * len(audits)


class Steady(TrainModule):
    """Each element has the same gradient at all steps: of the first half so small that float16 holds it only scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(4096))
        self.large = nn.Parameter(torch.ones(4096))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-15)

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        return (self.small.float() * 1e-8).sum() + (self.large.float() * 1e-4).sum()


@pytest.mark.parametrize("where", WHERE)
def test_small_gradients_of_several_steps_are_not_lost_in_float16(strategy_at, where) -> None:
    def after(step: int) -> None:
        if step in (1, 8):
            (gate.open_.clear if step == 1 else gate.open_.set)()

    gate = Gate()
    plugin = AngelPTMPrecision("16-mixed")
    strategy = strategy_at(
        where,
        lock_free={"max_staleness": 8, "predict_weights": False},
        debug={"poison": False},
        precision_plugin=plugin,
    )
    strategy.file_ops = gate
    module = built(Steady)
    make_trainer(strategy, None, callbacks=[Watch(after)]).fit(module, tokens(12).loader())  # type: ignore[arg-type]
    assert isinstance(module, Steady)
    for weight in (module.small, module.large):  # each step of Adam is one learning rate
        torch.testing.assert_close(weight.detach(), torch.full((4096,), 1 - 12 * 1e-2), rtol=1e-4, atol=0.0)


class TwoOptimizers(ScheduledStack):
    """Manual optimization: blocks and the rest, in turns; block 1 is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        blocks = [p for block in self.blocks for p in block.parameters() if p.requires_grad]
        rest = [*self.embedding.parameters(), *self.norm.parameters(), *self.head.parameters()]
        return torch.optim.SGD(blocks, lr=1e-2, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)

    def training_step(self, batch: Tensor, index: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.loss(batch, index)
            assert loss is not None
            self.losses.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.diagonal
@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("where", WHERE)
def test_several_optimizers_and_frozen_parameters(strategy_at, where, staleness) -> None:
    watch = Watch()
    module = run(strategy_at(where, lock_free={"max_staleness": staleness}), built(TwoOptimizers), watch)
    expected = run(strategy_at("ram"), built(TwoOptimizers))
    assert_all_applied(watch.seen[-1][1], 12)
    same = [torch.equal(ours, theirs) for ours, theirs in zip(module.losses, expected.losses, strict=True)]
    assert all(same) if staleness == 0 else all(torch.isfinite(loss) for loss in module.losses)


@pytest.mark.slow_unless("7")
@pytest.mark.parametrize("steps", [1, 7, pytest.param(8, marks=pytest.mark.slow)])
def test_a_batch_of_several_steps_in_which_a_warm_up_ends_is_synchronous_to_its_end(strategy_at, steps) -> None:
    """The first batch of a run too, of which nobody knows how many steps it will take."""
    ours = run(strategy_at("lock_free", lock_free={"max_staleness": 3, "warmup_steps": steps}), built(TwoOptimizers))
    theirs = run(strategy_at("ram"), built(TwoOptimizers))
    equal = [torch.equal(one, other) for one, other in zip(ours.losses, theirs.losses, strict=True)]
    assert all(equal[: steps + steps % 2]) and not all(equal), equal


class StepsBeforeTheOthersBackward(TwoOptimizers):
    """The second loss's graph is older than the first optimizer's step, and must keep what it was built from."""

    def training_step(self, batch: Tensor, index: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x.detach())
        inner = x.float().square().mean()
        outer = self.score(batch, self.embedding(batch[:, :-1]))
        self.losses.append((inner + outer).detach().clone())
        for optimizer, loss in ((first, inner), (second, outer)):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.parametrize("where", WHERE)
def test_a_graph_that_is_older_than_another_optimizers_step(strategy_at, where) -> None:
    watch = Watch()
    ours = run(strategy_at(where, lock_free={"max_staleness": 0}), built(StepsBeforeTheOthersBackward), watch)
    theirs = run(strategy_at("ram"), built(StepsBeforeTheOthersBackward))
    assert all(torch.equal(one, other) for one, other in zip(ours.losses, theirs.losses, strict=True))
    assert_all_applied([audit for audit in watch.seen[-1][1] if "blocks" not in audit.name], 12)


@pytest.mark.parametrize("where", WHERE)
def test_accumulation_and_clipping(strategy_at, where) -> None:
    watch = Watch()
    run(
        strategy_at(where, lock_free={"max_staleness": 2}),
        built(),
        watch,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
    )
    assert_all_applied(watch.seen[-1][1], 4)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
}


OFTEN = ("Adagrad", "NAdam", "RMSprop", "plain SGD")
"""AdamW is what others train with."""


@pytest.mark.slow_unless("NAdam", "RMSprop")
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_every_optimizer(strategy_at, name) -> None:
    class WithIt(Stack):
        def make_optimizer(self) -> torch.optim.Optimizer:
            return OPTIMIZERS[name](self.parameters())

    ours = run(strategy_at("lock_free", lock_free={"max_staleness": 0}), built(WithIt))
    theirs = run(strategy_at("ram"), built(WithIt))
    assert all(torch.equal(one, other) for one, other in zip(ours.losses, theirs.losses, strict=True))
    watch = Watch()
    run(strategy_at("lock_free", lock_free={"max_staleness": 3}), built(WithIt), watch)
    assert_all_applied(watch.seen[-1][1], 12)


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC])
def test_a_disk_error_in_the_background_ends_the_run(strategy_at, fault, disk) -> None:
    gate = Gate()
    strategy = strategy_at("lock_free", debug={"poison": False}, lock_free={"max_staleness": 2})
    strategy.file_ops = gate

    def after(step: int) -> None:
        if step == 3:
            gate.fault = fault

    module = built()
    with pytest.raises(PageIOError, match=os.strerror(fault)) as caught:
        run(strategy, module, Watch(after))
    assert caught.value.path == str(disk) and caught.value.errno == fault
    assert len(module.losses) <= 3 + 2 + 1


@pytest.mark.parametrize(("owner", "method"), [(LockFreeBuffers, "finish"), (ShadowOptimizer, "step")])
def test_a_thread_that_dies_ends_the_run(strategy_at, monkeypatch, owner, method) -> None:
    """The buffering thread, and the updating thread."""

    def dies(*_: Any) -> None:
        raise RuntimeError("slipped on a banana")

    def after(step: int) -> None:
        if step == 3:
            monkeypatch.setattr(owner, method, dies)

    module = built()
    with pytest.raises(RuntimeError, match="slipped on a banana"):
        run(strategy_at("lock_free", lock_free={"max_staleness": 2}), module, Watch(after))
    assert len(module.losses) <= 3 + 2 + 1


def test_checkpoints_hold_all_that_was_trained(strategy_at, tmp_path) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "seven.ckpt")

    for bound in (0, 3, 16):
        make_trainer(strategy_at("lock_free", lock_free={"max_staleness": bound}), callbacks=[Saves()]).fit(
            built(), BATCHES.loader()
        )
        saved = torch.load(tmp_path / "seven.ckpt", weights_only=False)
        states = saved["optimizer_states"][0]["state"]
        assert len(states) == len(list(built().parameters()))
        # Several steps' gradients may be one update, which counts as many steps.
        assert {float(state["step"]) for state in states.values()} == {7.0}


class GathersInMidPass(ScheduledStack):
    """Reads weights between the forward and its backward."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        with self.trainer.strategy.gathered(self.blocks[0], write=False):  # type: ignore[attr-defined]
            pass
        return loss


class GathersLater(GathersInMidPass):
    """Not before step 2, which lacks the gradient of step 1."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        return super().training_step(batch, index) if index > 1 else ScheduledStack.training_step(self, batch, index)


@pytest.mark.parametrize("where", WHERE)
def test_weights_cannot_be_gathered_over_a_graph_that_needs_older_ones(strategy_at, where) -> None:
    """Without staleness no graph needs older weights, and gathering works."""
    run(strategy_at(where, lock_free={"max_staleness": 0}), built(GathersInMidPass))
    gate = Gate()
    strategy = strategy_at(where, lock_free={"max_staleness": 3}, debug={"poison": False})
    strategy.file_ops = gate

    timer = threading.Timer(1.0, gate.open_.set)  # the end of the run needs the disk

    def after(step: int) -> None:
        if step == 1:
            gate.open_.clear()
            timer.start()

    with pytest.raises(UsageError, match="between a forward and its backward"):
        run(strategy, built(GathersLater), Watch(after))
    timer.join()


@pytest.mark.slow_unless("bf16-true")
@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("32-true", marks=pytest.mark.slow), "bf16-mixed"])
def test_weights_come_back_in_the_dtype_of_a_synchronous_run(strategy_at, precision) -> None:
    ours = run(strategy_at("lock_free"), built(), precision=precision)
    theirs = run(strategy_at("masters_on_disk"), built(), precision=precision)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.dtype is other.dtype and torch.equal(mine, other)


class SometimesUnused(ScheduledStack):
    """Block 1 takes part in every other step."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        for place, block in enumerate(self.blocks):
            if place != 1 or index % 2:
                x = block(x)
        return x


@pytest.mark.parametrize("where", WHERE)
def test_a_unit_that_takes_part_in_some_steps_only(strategy_at, where) -> None:
    watch = Watch()
    run(strategy_at(where, lock_free={"max_staleness": 2}), built(SometimesUnused), watch)
    produced = {audit.name: (audit.produced, audit.applied, audit.pending) for audit in watch.seen[-1][1]}
    assert produced.pop("blocks.1.up.weight...") == (6, 6, 0)
    assert set(produced.values()) == {(12, 12, 0)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lock_free": True, "offload_parameters": "disk"},
            "lock_free=True keeps the parameters that compute uses in RAM",
        ),
        ({"lock_free": {"max_staleness": -1}}, r"max_staleness=-1\): give a number of steps, 0 or more"),
        ({"lock_free": {"warmup_steps": -1}}, r"warmup_steps=-1\): give a number of steps, 0 or more"),
        ({"lock_free": {"warmup_steps": True}}, r"warmup_steps=True\): give a number of steps"),
        ({"lock_free": {"max_staleness": 1.5}}, r"max_staleness=1.5\): give a number of steps"),
    ],
)
def test_settings_that_cannot_work(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        AngelPTMStrategy(**settings)


def test_statistics_need_a_run(disk) -> None:
    with pytest.raises(UsageError, match="this call needs a run in progress"):
        AngelPTMStrategy(disk_path=str(disk)).statistics()


class SlowDisk(FileOps):
    """A step's two writes (parameters, momentum) take until the second one behind it has computed. The next step's update
    reads what they write, so it is no sooner done: each step computes without the last one's gradient."""

    def __init__(self) -> None:
        self.steps = 0
        self.changed = threading.Condition()
        self._writes = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self.changed:
            if self.steps:  # else the first values are written
                enough = self._writes // 2 + 3
                self._writes += 1
                self.changed.wait_for(lambda: self.steps >= enough, timeout=0.5)  # behind the last ones comes no other
        return super().pwritev(fd, buffers, offset)


class Valley(TrainModule):
    """A quadratic: with momentum 0.9 and a curvature of 5 / lr, stable without delay and unstable with a delay of a step."""

    def __init__(self, disk: SlowDisk) -> None:
        super().__init__()
        self.place = torch.nn.Linear(64, 64, bias=False)
        self.disk = disk

    def forward(self, x: Tensor) -> Tensor:
        return self.place(x)

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        result = self(torch.eye(64))
        with self.disk.changed:
            self.disk.steps += 1
            self.disk.changed.notify_all()
        return 2.5 * result.square().sum()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9, dampening=0.9)


@pytest.mark.diagonal
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("forecast", [True, False])
def test_a_forecast_makes_up_for_staleness(strategy_at, where, forecast) -> None:
    strategy = strategy_at(where, lock_free={"max_staleness": 1, "predict_weights": forecast}, units=["Linear"])
    disk = strategy.file_ops = SlowDisk()
    watch = Watch()
    module = built(lambda: Valley(disk))
    make_trainer(strategy, "32-true", callbacks=[watch]).fit(module, tokens(60).loader())
    assert watch.seen[-1][0].staleness.mean > 0.9  # type: ignore[union-attr]
    first, last = float(module.losses[0]), float(module.losses[-1])
    assert last < 0.5 * first if forecast else last > 1e3 * first
