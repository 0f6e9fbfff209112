"""Decisions of the policy of chunks in a run and in its forecast, with a disk that serves both at the same moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest

from lightning_ptm.forecasting.clock import Clock
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.transfer import Transfer
from lightning_ptm.planning.chunks import ChunkAct, ChunkEvent
from lightning_ptm.planning.gradient_tasks import gradient_tasks
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Mode
from lightning_ptm.update.pipeline import Pipeline

INSTANT = Hardware("no limits", *[math.inf] * 7, shared_cores=True)
SLOW = replace(INSTANT, disk_read_bytes_per_s=1.0, disk_write_bytes_per_s=1.0, disk_both_bytes_per_s=1.0)

Entry = tuple[str, int, int, int]
"""One decision, its flat, and the place: start and elements."""


class Disk:
    """Chunks of a run come and go in order: when somebody asks, or, of a slow disk, not before somebody waits for them."""

    def __init__(self, patch: pytest.MonkeyPatch, *, slow: bool) -> None:
        self._transfers: dict[int, Transfer] = {}
        self._chunk_of: dict[int, int] = {}
        self._begun = 0
        """Reads and writes of chunks."""
        self._landed = -1
        """The last of them that has ended."""
        copy_all, done, wait = Allocator.copy_all, Transfer.done, Transfer.wait

        def issue(*args: Any) -> list[Transfer]:
            transfers = copy_all(*args)
            for transfer in transfers:
                self._transfers[id(transfer)] = transfer
                self._chunk_of[id(transfer)] = self._begun
            return transfers

        def has_landed(transfer: Transfer) -> bool:
            chunk = self._chunk_of.get(id(transfer))
            if chunk is None:
                return done(transfer)
            if slow and chunk > self._landed:
                return False
            wait(transfer)
            return True

        def land(transfer: Transfer, host: bool = True) -> None:
            self._landed = max(self._landed, self._chunk_of.get(id(transfer), -1))
            wait(transfer, host)

        patch.setattr(Allocator, "copy_all", issue)
        patch.setattr(Transfer, "done", has_landed)
        patch.setattr(Transfer, "wait", land)
        for name in ("read", "update"):
            patch.setattr(Pipeline, name, self._counting(getattr(Pipeline, name)))

    def _counting(self, method: Callable[..., bool]) -> Callable[..., bool]:
        def counted(*args: Any) -> bool:
            self._begun += 1
            return method(*args)

        return counted


class Log(L.Callback):
    """Records a run's decisions."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.engine: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.engine = trainer.strategy.engine  # type: ignore[attr-defined]
        self.engine.updater._pipeline.policy.on_decision = self._hear

    def on_train_end(self, *_: Any) -> None:
        self.engine.updater._pipeline.policy.on_decision = None

    def _hear(self, act: ChunkAct[Any]) -> None:
        self.entries.append(entry(act, act.flat.flat.index))


def entry(act: ChunkAct[Any], flat: int) -> Entry:
    return (act.event.value, flat, act.start, act.numel)


def planned(log: Log, hardware: Hardware, steps: int) -> list[Entry]:
    """Returns the forecast's decisions for steps of the recorded run."""
    blueprint = log.engine.blueprint
    plan, trace = log.engine.executor.plans.planned(Mode.TRAIN)
    chunks = blueprint.staging_chunks if blueprint.placement.staging_bytes else float("inf")
    room = blueprint.gradient_room_bytes
    clock = Clock(
        blueprint.layout,
        blueprint.placement,
        blueprint.budget,
        hardware,
        staging_chunks=chunks,
        gradient_room_bytes=room,
    )
    found: list[Entry] = []
    clock.chunks.on_decision = lambda act: found.append(entry(act, act.flat.index))
    timed = Trace(tuple(replace(tick, seconds=1e-12) for tick in trace.ticks))
    for _ in range(steps):
        clock.step(plan.with_tasks(gradient_tasks(blueprint.layout, blueprint.placement, trace)), timed)
    return found


def between(entries: list[Entry], steps: int, before: int) -> list[Entry]:
    """From the first update of step `before` to the first of the last of `steps`."""
    submitted = [place for place, each in enumerate(entries) if each[0] == ChunkEvent.SUBMITTED.value]
    first = [place for place in submitted if entries[place] == entries[submitted[-1]]]
    assert len(first) == steps
    return _joined(entries[first[before] : first[-1]])


def _joined(entries: list[Entry]) -> list[Entry]:
    """Chunks of one flat that are computed one after the other, as one: of what does not stream a forecast computes all."""
    found: list[Entry] = []
    for doing, flat, start, numel in entries:
        last = found[-1] if found else None
        if doing == ChunkEvent.COMPUTED.value and last is not None and last[:2] == (doing, flat):
            found[-1] = (doing, flat, last[2], last[3] + numel)
        else:
            found.append((doing, flat, start, numel))
    return found
