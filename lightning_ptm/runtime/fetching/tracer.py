"""Tracer of an iteration: which unit computed at each tick, for how long, with how many bytes outside the page pools.

This is the paper's Tracer. Owns the record of the iteration in progress.

I1: a tick is closed by the next one or by `finish`.
I2: `non_model_bytes` counts bytes outside the page pools, so the planner may subtract it from a budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from time import perf_counter

from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.device_work import DeviceEvent
from lightning_ptm.planning.trace import TensorUse, Tick, Trace
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.terms import Phase


@dataclasses.dataclass(slots=True)
class _OpenTick:
    unit: int
    phase: Phase
    live: tuple[int, ...]
    non_model_bytes: int
    started_s: float
    passes: int
    cpu_s: float = 0.0
    mark: DeviceEvent | None = None


class Tracer:
    """Records ticks.

    Args:
        units: the units, for the table of tensors.
        non_model_bytes: returns the bytes that are outside the page pools now.
        backend: the compute device; if it is asynchronous to the host, seconds are measured by its own clock.
    """

    def __init__(self, units: tuple[Unit, ...], non_model_bytes: Callable[[], int], backend: Backend) -> None:
        self._units = units
        self._non_model_bytes = non_model_bytes
        self._backend = backend
        self._ticks: list[_OpenTick] = []
        self._end: DeviceEvent | None = None

    def start(self) -> None:
        """Clears the record."""
        self._ticks = []
        self._end = None

    def tick(self, unit: int, phase: Phase, live: tuple[int, ...], passes: int = 0) -> None:
        """Begins a tick, after `passes` complete backward passes, and ends the one before."""
        now = perf_counter()
        beside = (
            self._non_model_bytes()
        )  # one reading for both ticks: it is slow, since it walks the allocator's free list
        if self._ticks:
            self._close(self._ticks[-1], now, beside)
        opened = _OpenTick(unit, phase, live, beside, now, passes)
        if self._backend.has_own_memory:
            opened.mark = self._backend.mark(timed=True)
        self._ticks.append(opened)

    def observe(self) -> None:
        """Reads the bytes outside the pools once more for the tick in progress; the larger reading counts."""
        if self._ticks:
            self._ticks[-1].non_model_bytes = max(self._ticks[-1].non_model_bytes, self._non_model_bytes())

    def finish(self) -> Trace:
        """Returns the trace of the iteration, which ends here."""
        if self._ticks:
            self._close(self._ticks[-1], perf_counter(), self._non_model_bytes())
            if self._backend.has_own_memory:
                self._end = self._backend.mark(timed=True)
                self._end.synchronize()
        seconds = [self._device_seconds(index) or tick.cpu_s for index, tick in enumerate(self._ticks)]
        ticks = tuple(
            Tick(tick.unit, tick.phase, tick.live, tick.non_model_bytes, spent, tick.passes)
            for tick, spent in zip(self._ticks, seconds, strict=True)
        )
        return Trace(ticks, self._tensors(seconds))

    def _close(self, tick: _OpenTick, now: float, beside: int) -> None:
        tick.cpu_s = now - tick.started_s
        tick.non_model_bytes = max(tick.non_model_bytes, beside)

    def _device_seconds(self, index: int) -> float:
        start = self._ticks[index].mark
        end = self._ticks[index + 1].mark if index + 1 < len(self._ticks) else self._end
        if start is None or end is None:
            return 0.0
        return end.seconds_since(start)

    def _tensors(self, seconds: list[float]) -> tuple[TensorUse, ...]:
        uses: list[TensorUse] = []
        for unit in self._units:
            at = [index for index, tick in enumerate(self._ticks) if unit.index in tick.live]
            own = [index for index, tick in enumerate(self._ticks) if unit.index == tick.unit]
            if not at:
                continue
            cpu_s = sum(self._ticks[index].cpu_s for index in own)
            gpu_s = sum(seconds[index] for index in own) if self._backend.has_own_memory else 0.0
            for item in unit.parameters:
                uses.append(
                    TensorUse(
                        tensor_id=len(uses),
                        name=item.name,
                        first_id=at[0],
                        end_id=at[-1],
                        cpu_time=cpu_s,
                        gpu_time=gpu_s,
                    )
                )
        return tuple(uses)
