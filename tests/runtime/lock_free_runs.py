"""Lock-free runs whose disk can be held up, and what the tests of such runs look at."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from kit.plain_loop import TrainModule, make_trainer, tokens
from kit.stacks import ScheduledStack

from lightning_ptm import AngelPTMStrategy, Statistics, UpdateAudit
from lightning_ptm.memory.disk import FileOps

BATCHES = tokens(12)
WHERE = ["lock_free", "lock_free_three_tiers"]


class Gate(FileOps):
    """A disk that serves nothing while it is closed."""

    def __init__(self) -> None:
        self.open_ = threading.Event()
        self.open_.set()
        self.fault: int | None = None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().pwritev(fd, buffers, offset)

    def _pass(self) -> None:
        assert self.open_.wait(60)
        if self.fault is not None:
            raise OSError(self.fault, os.strerror(self.fault))


class Watch(L.Callback):
    """Keeps the run's statistics and audit as they are after each step; `after` is called with the number of steps done."""

    def __init__(self, after: Callable[[int], object] = lambda step: None) -> None:
        self.after = after
        self.seen: list[tuple[Statistics, tuple[UpdateAudit, ...]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AngelPTMStrategy)
        self.seen.append((strategy.statistics(), strategy.update_audit()))
        self.after(len(self.seen))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.engine.drain()  # type: ignore[attr-defined]
        self.on_train_batch_end(trainer, pl_module)


def run(
    strategy: AngelPTMStrategy,
    module: TrainModule,
    watch: Watch | None = None,
    precision: str = "bf16-mixed",
    **options: Any,
) -> TrainModule:
    callbacks = [watch] if watch is not None else []
    make_trainer(strategy, precision, callbacks=callbacks, **options).fit(module, BATCHES.loader())
    return module


def built(build: Callable[[], TrainModule] = ScheduledStack) -> TrainModule:
    torch.manual_seed(0)
    return build()


def assert_all_applied(audits: Sequence[UpdateAudit], produced: int) -> None:
    assert audits
    for audit in audits:
        assert audit.balanced
        assert (audit.produced, audit.applied + audit.skipped, audit.pending) == (produced, produced, 0)
