"""Promises of lock-free runs, read from weights that show which steps are in them: everything trained is in what is
evaluated, saved, read by hand and left at the end; a micro-batch computes with one version; and the audit can be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ledger import Adversaries, Auditor, ByTurns, Clipped, Ledger, Overflowing, pages_of_zeros
from kit.plain_loop import TrainModule, make_trainer, tokens
from lock_free_runs import Gate
from torch import Tensor, nn

from lightning_ptm import AngelPTMPrecision, AngelPTMStrategy
from lightning_ptm.errors import InternalError
from lightning_ptm.runtime.deciding import budgets
from lightning_ptm.update.loss_scale import LossScale

STEPS = 12
LATE: dict[str, Any] = {"lock_free": {"max_staleness": 16}, "debug": {"poison": False}}
"""The disk serves nothing until what was trained is asked for."""


def late(gate: Gate, last: int) -> Auditor:
    """Closes the disk for three batches of four, when nothing waits, and opens it behind the last one."""

    def after(trainer: L.Trainer, batch: int) -> None:
        if batch == last or batch % 4 == 3:
            gate.open_.set()
        elif batch % 4 == 0:
            trainer.strategy.engine.drain()  # type: ignore[attr-defined]
            gate.open_.clear()

    return Auditor(after)


class Reads(L.Callback):
    """Opens the disk when the weights are about to be needed, saves a checkpoint, and reads the weights by hand."""

    def __init__(self, gate: Gate, folder: Path) -> None:
        self._gate = gate
        self._path = folder / "seven.ckpt"
        self.saved: dict[str, Tensor] = {}
        self.read: dict[str, Tensor] = {}
        self.pending: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._gate.open_.clear()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        self.pending.append(max(audit.pending for audit in strategy.update_audit()))
        if index + 1 in (5, 7, 9, 10, STEPS):
            self._gate.open_.set()
        if index + 1 == 7:
            trainer.save_checkpoint(self._path)
            self.saved = torch.load(self._path, weights_only=False)["state_dict"]
        if index + 1 == 9:
            with strategy.gathered(write=False):
                self.read = {name: value.detach().clone() for name, value in module.named_parameters()}


def assert_booked(weights: dict[str, Tensor], module: Ledger, steps: int, error: float = 1e-5) -> None:
    for name, booked in module.booked(steps, 1).items():
        torch.testing.assert_close(weights[name], torch.full_like(weights[name], booked), rtol=0, atol=error)


@pytest.mark.parametrize("where", ["lock_free", "lock_free_three_tiers"])
def test_all_that_was_trained_is_in_what_is_evaluated_saved_read_and_left(strategy_at, tmp_path, where) -> None:
    strategy = strategy_at(where, **LATE)
    strategy.file_ops = gate = Gate()
    reads, module = Reads(gate, tmp_path), Ledger()
    trainer = make_trainer(strategy, "32-true", callbacks=[reads], val_check_interval=5, limit_val_batches=2)
    trainer.fit(module, pages_of_zeros(STEPS), pages_of_zeros(3))
    assert max(reads.pending) >= 3
    assert_booked(reads.saved, module, 7)
    assert_booked(reads.read, module, 9)
    assert_booked(dict(module.named_parameters()), module, STEPS)  # type: ignore[arg-type]
    for place, account in enumerate(module.accounts):
        assert isinstance(account.read, list) and len(account.read) == 2 * 2
        for index, read in enumerate(account.read):
            booked = module.booked(5 if index < 2 else 10, 1)
            sides = [booked[f"accounts.{place}.{side}"] for side in ("left", "right")]
            assert read == pytest.approx(sides, abs=1e-5)


@pytest.mark.parametrize(
    ("build", "precision", "accumulate"),
    [
        (ByTurns, "bf16-mixed", 2),
        (Clipped, "32-true", 1),
        (Overflowing, "16-mixed", 1),
        (Adversaries, "bf16-mixed", 1),
    ],
)
def test_late_gradients_keep_what_their_own_steps_said(strategy_at, build, precision, accumulate) -> None:
    steps, error = STEPS if precision != "16-mixed" else 8, 1e-5
    module, gate = build(accumulate), Gate()
    auditor = late(gate, steps * accumulate - 1)
    strategy = strategy_at("lock_free", **LATE)
    strategy.file_ops = gate
    if precision == "16-mixed":
        strategy.precision_plugin = AngelPTMPrecision("16-mixed", LossScale(init_scale=8.0))
        precision, error = None, 1e-3  # sums of gradients have three digits
    options: dict[str, Any] = {"gradient_clip_val": module.clip, "accumulate_grad_batches": accumulate}
    make_trainer(strategy, precision, callbacks=[auditor], **options).fit(module, pages_of_zeros(steps * accumulate))
    assert_booked(dict(module.named_parameters()), module, steps, error)
    assert auditor.most_pending >= (1 if build is ByTurns else 3)
    for audit in strategy.update_audit():
        assert audit.pending == 0 and audit.skipped == len(module.overflows) and audit.applied


# -- one version ------------------------------------------------------------------------------------------------------


class Noting(torch.autograd.Function):
    """A product that notes the weights that its forward and its backward see."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, noted: list[Tensor]) -> Tensor:
        noted.append(weight.detach().clone())
        context.noted = noted
        context.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(context: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = context.saved_tensors
        context.noted.append(weight.detach().clone())
        (output,) = outputs
        return output @ weight.T, x.T @ output, None


class Notes(list[Tensor]):
    """A list that a recomputed forward writes to, too: what it does to its module's own lists is forgotten."""


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(72))
        self.noted = Notes()

    def forward(self, x: Tensor) -> Tensor:
        return Noting.apply(x, self.weight, self.noted)  # type: ignore[no-any-return]


class NewerInBetween(TrainModule):
    """From the second step on, newer versions come between the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noted() for _ in range(4))
        self.gate = Gate()
        self.came = 0

    def on_train_start(self) -> None:
        self.gate.open_.clear()

    def on_train_end(self) -> None:
        self.gate.open_.set()

    def loss(self, batch: Any, index: int) -> Tensor:
        x = torch.ones(2, 72)
        for block in self.blocks:
            x = block(x)
        if index:
            updates: Any = self.trainer.strategy.engine.updates  # type: ignore[attr-defined]
            buffering = updates._buffering
            self.gate.open_.set()
            buffering.wait(lambda: any(map(buffering.published, range(len(self.blocks)))))
            self.gate.open_.clear()
            self.came += 1
        return x.square().mean()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize(
    ("where", "settings"),
    [("lock_free", {}), ("lock_free", {"recompute": "all"}), ("lock_free_three_tiers", {"device_memory": "448KiB"})],
)
def test_forward_and_backward_of_a_micro_batch_see_one_version(strategy_at, where, settings, forecast) -> None:
    module = NewerInBetween()
    strategy = strategy_at(where, lock_free={"max_staleness": 16, "predict_weights": forecast}, **settings)
    strategy.file_ops = module.gate
    make_trainer(strategy, "32-true").fit(module, tokens(8).loader())
    assert module.came == 7
    for block in module.blocks:
        times = 3 if "recompute" in settings else 2
        assert len(block.noted) == times * 8  # type: ignore[arg-type]
        steps = [block.noted[place : place + times] for place in range(0, times * 8, times)]  # type: ignore[index]
        assert all(torch.equal(noted[0], each) for noted in steps for each in noted)
        assert not torch.equal(steps[0][0], steps[-1][0])


# -- the bound --------------------------------------------------------------------------------------------------------


class SecondIsLate(Ledger):
    """Step 2 does not use the first account, so that step 3 may read that one and has to wait for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def loss(self, accounts: Any, step: int) -> Tensor:
        x = torch.zeros(())
        for place, account in enumerate(accounts):
            if (step, place) == (3, 1):
                self.gate.open_.set()
            if (step, place) != (2, 0):
                x = account(x, self.sides(step), self.factor(step, 0))
        return x


@pytest.mark.timeout(20)
def test_the_last_spare_pages_serve_what_exceeds_the_bound(strategy_at, monkeypatch) -> None:
    """The first account's update is older, and its version, which nobody can take now, would have the last pages."""

    def after(trainer: L.Trainer, batch: int) -> None:
        if batch == 0:
            strategy.engine.drain()
            module.gate.open_.clear()

    monkeypatch.setattr(budgets, "_SPARE_PAGES", 0)  # two, for three accounts
    module, auditor = SecondIsLate(), Auditor(after)
    strategy = strategy_at(
        "lock_free", lock_free={"max_staleness": 1, "predict_weights": False}, debug={"poison": False}
    )
    strategy.file_ops = module.gate
    make_trainer(strategy, "32-true", callbacks=[auditor]).fit(module, pages_of_zeros(4))
    assert auditor.staleness is not None and auditor.staleness.maximum == 1
    assert [(audit.applied, audit.pending) for audit in strategy.update_audit()] == [(3, 0), (4, 0), (4, 0)]


# -- the audit --------------------------------------------------------------------------------------------------------


def test_the_audit_can_be_read_before_in_and_after_a_run(strategy_at) -> None:
    strategy = strategy_at("lock_free", **LATE)
    strategy.file_ops = gate = Gate()
    assert strategy.update_audit() == ()
    auditor, module = late(gate, STEPS - 1), Ledger()
    trainer = make_trainer(strategy, callbacks=[auditor])
    trainer.fit(module, pages_of_zeros(STEPS))
    for step, audits in enumerate(auditor.audits, start=1):
        assert len(audits) == 3
        assert all(audit.produced == step == audit.applied + audit.pending for audit in audits)
    assert auditor.most_pending >= 3
    audits = strategy.update_audit()
    assert [(audit.produced, audit.applied, audit.pending) for audit in audits] == [(STEPS, STEPS, 0)] * 3
    trainer.validate(module, pages_of_zeros(1), verbose=False)
    assert strategy.update_audit() == audits  # that run has trained nothing


@pytest.mark.parametrize("drain", ["gathered", "validation", "end"])
def test_a_count_that_does_not_add_up_ends_the_run(strategy_at, drain) -> None:
    """The count of received gradients is one too high: the audit at a drain notices it and ends the run."""

    def after(trainer: L.Trainer, batch: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AngelPTMStrategy)
        if batch == 3:
            updates: Any = strategy.engine.updates
            updates._counters[1].received += 1
            if drain == "gathered":
                with strategy.gathered(write=False):
                    pass

    class Spoils(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            after(trainer, index)

    options = {"val_check_interval": 4, "limit_val_batches": 1} if drain == "validation" else {}
    # A forecast of the gradient that never comes would be waited for, did the run go on.
    strategy = strategy_at("lock_free", lock_free={"max_staleness": 2, "predict_weights": False})
    trainer = make_trainer(strategy, callbacks=[Spoils()], **options)
    with pytest.raises(InternalError, match=r"gradients were lost or applied twice: UpdateAudit\(name='accounts"):
        trainer.fit(Ledger(), pages_of_zeros(STEPS if drain != "end" else 4), pages_of_zeros(1))
