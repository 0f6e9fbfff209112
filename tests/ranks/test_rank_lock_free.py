"""Lock-free updates on several ranks: each gradient is applied once, with the hyper-parameters of its own step, whatever the
ranks' disks do meanwhile; and what goes wrong behind one rank's back ends the run on all of them, with the cause.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from kit.ledger import Adversaries, Auditor, ByTurns, Clipped, Ledger, Overflowing, pages_of_zeros
from kit.ranks.harness import run_ranks
from kit.ranks.training import Training, make_strategy, make_trainer
from kit.settings import merged

from lightning_ptm import AngelPTMPrecision, UpdateAudit
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.update.lock_free_buffers import LockFreeBuffers
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.shadow import ShadowOptimizer

STEPS = 12
LATE = {"lock_free": {"max_staleness": 8}}


class Disk(FileOps):
    """Disk that can be closed, and serves nothing then, or broken."""

    def __init__(self) -> None:
        self.open_ = threading.Event()
        self.open_.set()
        self.broken = False

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        self._pass()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self._pass()
        return super().pwritev(fd, buffers, offset)

    def _pass(self) -> None:
        assert self.open_.wait(60)
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@dataclasses.dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        late: the last rank's disk serves nothing in so many batches, behind the first `since`.
        waits: gradients of a flat that have waited at once, at least.
    """

    build: Callable[..., Ledger]
    settings: dict[str, Any]
    precision: str = "bf16-mixed"
    accumulate: int = 1
    late: int = 4
    since: int = 1
    waits: int = 3

    @property
    def steps(self) -> int:
        """Fewer where sums of gradients have three digits."""
        return 8 if self.precision == "16-mixed" else STEPS

    @property
    def error(self) -> float:
        """Far less than the last step books."""
        return 1e-3 if self.precision == "16-mixed" else 1e-5


CASES = {
    "as it comes": Case(Ledger, {"lock_free": {"max_staleness": 4}}),
    "by turns": Case(ByTurns, {"lock_free": {"max_staleness": 4}, "device_memory": "4MiB"}, late=2, waits=2),
    "by turns, accumulated": Case(ByTurns, LATE, accumulate=2, late=3, waits=2),
    "two optimizers": Case(Adversaries, {"lock_free": {"max_staleness": 4}}),
    "clipped": Case(Clipped, LATE, "32-true"),
    "behind a warm-up": Case(Ledger, merged(LATE, lock_free={"warmup_steps": 2}), since=2),
    "overflowing": Case(Overflowing, LATE, "16-mixed", late=3, waits=2),
    "reduced once": Case(Ledger, merged(LATE, tuning={"reduce_gradients": "each_step"}), accumulate=2, late=6),
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """Result of a training on one rank.

    Attributes:
        weights: least and greatest element of each.
        audits: of the end.
        most_pending: gradients of a flat that have waited at once.
        staleness: the greatest.
    """

    weights: dict[str, tuple[float, float]]
    audits: tuple[UpdateAudit, ...]
    most_pending: int
    staleness: int


def train(case: Case, ranks: int, folder: Path) -> Seen:
    disk = Disk()
    strategy = make_strategy(folder, "lock_free", **merged({"debug": {"poison": False}}, case.settings))
    strategy.file_ops = disk

    def after(trainer: L.Trainer, batch: int) -> None:
        if trainer.global_rank == ranks - 1:
            if batch + 1 == case.since:
                strategy.engine.updates.finish_all()
                disk.open_.clear()
            if batch + 1 == case.since + case.late:
                disk.open_.set()

    module, auditor = case.build(case.accumulate), Auditor(after)
    training = Training(Ledger, case.precision, accumulate=case.accumulate, clip=module.clip)
    options: dict[str, Any] = {"callbacks": [auditor]}
    if case.precision == "16-mixed":
        strategy.precision_plugin = AngelPTMPrecision("16-mixed", LossScale(init_scale=8.0))
        training = dataclasses.replace(training, precision=None)
    make_trainer(training, strategy, ranks, **options).fit(module, pages_of_zeros(case.steps * case.accumulate))
    weights = {name: (float(value.min()), float(value.max())) for name, value in module.named_parameters()}
    assert auditor.staleness is not None
    return Seen(weights, strategy.update_audit(), auditor.most_pending, auditor.staleness.maximum)


def train_all(names: list[str], folder: Path) -> tuple[dict[str, Seen], set[str]]:
    """One case after the other, and the threads that have issued collectives."""
    threads: set[str] = set()
    for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "all_reduce"):
        if hasattr(dist, name):
            setattr(dist, name, _noting(getattr(dist, name), threads))
    return {name: train(CASES[name], 2, folder) for name in names}, threads


def _noting(call: Callable[..., Any], threads: set[str]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread().name)
        return call(*args, **kwargs)

    return noting


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_gradient_is_applied_once_with_what_its_own_step_said(first: int, disk: Path) -> None:
    """Tests every second case."""
    names = list(CASES)[first::2]
    for rank, (results, threads) in enumerate(run_ranks(train_all, 2, names, disk)):
        assert list(results) == names
        assert threads == {"MainThread"}  # no collective comes from a thread in the background
        for name, seen in results.items():
            case, told = CASES[name], f"rank {rank}, {name}: {seen}"
            module = case.build(case.accumulate)
            for parameter, booked in module.booked(case.steps, 2).items():
                assert seen.weights[parameter] == pytest.approx((booked, booked), abs=case.error), told
            for audit in seen.audits:
                assert audit.applied and audit.balanced and not audit.pending, told
                assert audit.skipped == len(module.overflows), told
            assert seen.staleness <= case.settings["lock_free"]["max_staleness"], told
            if rank:
                assert seen.most_pending >= case.waits, told
                assert seen.staleness >= case.late // case.accumulate - 1, told


# -- what goes wrong behind one rank's back ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something breaks on the last rank when so many batches have ended, and updates wait.

    Attributes:
        dies: a method that raises from then on; by default the disk fails.
        needed: all ranks need what waits then: `gathered` asks for it.
        before: batches that may have ended when the run does.
    """

    settings: dict[str, Any]
    batch: int
    before: int
    dies: tuple[type, str] | None = None
    needed: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


FAULTS = {
    "far from the bound": Fault(LATE, 3, STEPS),
    "at the end": Fault(LATE, STEPS, STEPS),
    "nothing given back at the end": Fault(merged(LATE, tuning={"restore_weights": False}), STEPS, STEPS),
    "before a validation": Fault(LATE, 5, 5, options={"val_check_interval": 5, "limit_val_batches": 1}),
    "when weights are read": Fault(LATE, 5, 5, needed=True),
    "buffering thread": Fault({"lock_free": {"max_staleness": 2}}, 3, 3 + 2 + 1, dies=(LockFreeBuffers, "finish")),
    "updating thread, far from the bound": Fault(LATE, 3, STEPS, dies=(ShadowOptimizer, "step")),
}


def dies(*_: Any, **__: Any) -> None:
    raise RuntimeError("slipped on a banana")


def fail(fault: Fault, folder: Path) -> tuple[str, int]:
    """Returns the error with which the run ended on this rank, and how many batches had ended."""
    disk, monkeypatch = Disk(), pytest.MonkeyPatch()
    strategy = make_strategy(folder, "lock_free", debug={"poison": False}, **fault.settings)
    strategy.file_ops = disk

    def after(trainer: L.Trainer, batch: int) -> None:
        if batch + 2 == fault.batch and trainer.global_rank == 1:
            disk.open_.clear()
        if batch + 1 == fault.batch:
            if trainer.global_rank == 1:
                disk.broken = fault.dies is None
                disk.open_.set()
                if fault.dies is not None:
                    monkeypatch.setattr(*fault.dies, dies)
            if fault.needed:
                with strategy.gathered(write=False):
                    pass

    module, auditor = Ledger(), Auditor(after)
    trainer = make_trainer(Training(Ledger), strategy, 2, callbacks=[auditor], **fault.options)
    try:
        trainer.fit(module, pages_of_zeros(STEPS), pages_of_zeros(2) if fault.options else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}", len(auditor.audits)
    finally:
        monkeypatch.undo()
    raise AssertionError("fit ended without an error")


def fail_in_all_ways(folder: Path) -> dict[str, tuple[str, int]]:
    return {name: fail(fault, folder) for name, fault in FAULTS.items()}


def test_an_error_behind_one_rank_ends_the_run_on_all_with_the_cause(disk: Path) -> None:
    first, second = run_ranks(fail_in_all_ways, 2, disk)
    for name, fault in FAULTS.items():
        cause = "PageIOError: " if fault.dies is None else "RuntimeError: slipped on a banana"
        assert second[name][0].startswith(cause), (name, second[name])
        assert first[name][0].startswith(f"RankError: rank 1 failed with {cause}"), (name, first[name])
        assert max(first[name][1], second[name][1]) <= fault.before, name
