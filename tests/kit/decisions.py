"""Fetches, evictions and device pages of a run, tick by tick, and those of the same iterations in a virtual run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L

from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.virtual_run import VirtualRun
from lightning_ptm.terms import Mode, Operation, Phase, Tier


class Listens(L.Callback):
    """Writes down what a run decides, which plan it follows in each iteration, and the most device pages of each tick. It
    waits for updates before the next iteration, since in a virtual run none is late."""

    def __init__(self) -> None:
        self.issued: list[Task] = []
        self.plans: list[tuple[Plan, Trace]] = []
        """The plan of each iteration, and the trace that it was made for."""
        self.blueprint: Any = None
        self.trace: Trace | None = None
        """The newest."""
        self.pages: list[list[int]] = []
        """By iteration and tick, the most device pages up to the next tick."""
        self._starts: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        self.blueprint = engine.blueprint
        engine.executor.fetching.on_decision = self.issued.append
        enter = engine.executor.enter

        def entered(unit: int, phase: Phase) -> None:
            self._begin_tick(engine)
            enter(unit, phase)

        engine.executor.enter = entered
        # In a virtual run reductions take no time: their pages are free when the run looks for ended ones.
        engine.executor.fetching._reclaim = lambda wait: engine._in_flight.release(True)

    def _begin_tick(self, engine: Any) -> None:
        if self.pages:
            self.pages[-1].append(engine.allocator.peak_bytes(Tier.DEVICE) // engine.allocator.page_size)
        engine._in_flight.release(True)
        engine.allocator.begin_peak(Tier.DEVICE)

    def on_train_batch_start(self, *args: Any) -> None:
        self._starts.append(len(self.issued))
        self.pages.append([])

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        self._begin_tick(engine)
        del self.pages[-1][0]  # before the first tick
        self.plans.append(engine.executor.plans.planned(Mode.TRAIN))
        self.trace = engine.executor.plans.trace(Mode.TRAIN)
        engine.updates.finish_all()

    def traces(self) -> list[Trace]:
        """Returns the trace of each iteration: the newest trace, or, in another order, forwards up to the root's
        backward."""
        found = []
        parts = self.blueprint.by_need
        for start, end in zip(self._starts, [*self._starts[1:], len(self.issued)], strict=True):
            units = [each.unit for each in self.issued[start:end] if each.operation is Operation.COMPUTE]
            if self.trace is not None and units == [tick.unit for tick in self.trace.ticks]:
                found.append(self.trace)
                continue
            phases = [Phase.BACKWARD if 0 in units[1 : at + 1] else Phase.FORWARD for at in range(len(units))]
            ticks = list(zip(units, phases, strict=True))
            for at in range(len(ticks) - 1):  # a trace has a unit's backward behind those of its parts
                if Phase.BACKWARD is ticks[at][1] and ticks[at][0] not in parts and ticks[at + 1][0] in parts:
                    end = next((each for each in range(at + 1, len(ticks)) if ticks[each][0] not in parts), len(ticks))
                    ticks.insert(end - 1, ticks.pop(at))
            found.append(Trace(tuple(Tick(unit, phase, tuple(sorted({0, unit}))) for unit, phase in ticks)))
        return found


def in_virtual_run(
    seen: Listens, accumulate: int = 1, *, recomputed: bool = False
) -> tuple[list[Task], list[list[int]]]:
    """Returns the decisions of a virtual run in the same iterations, and the most device pages of each tick."""
    blueprint: Blueprint = seen.blueprint
    found: list[Task] = []
    virtual = VirtualRun(blueprint, blueprint.by_need if recomputed else ())
    virtual.fetching.on_decision = found.append
    pages: list[list[int]] = []
    for step, ((plan, planned), trace) in enumerate(zip(seen.plans, seen.traces(), strict=True), start=1):
        beside = virtual.run(plan, trace, planned, steps=step % accumulate == 0)
        pages.append([virtual.fixed_pages + each for each in beside[:-1]])
    return up_to_last_compute(found), pages


def up_to_last_compute(decisions: Sequence[Task]) -> list[Task]:
    """Returns the decisions without those after the last compute: a run's last iteration ends with the run."""
    last = max(at for at, each in enumerate(decisions) if each.operation is Operation.COMPUTE)
    return list(decisions[: last + 1])
