"""The record of an iteration: ticks that close each other, the most bytes of each, and the table of tensors."""

from __future__ import annotations

from typing import Any

from small_parts import Model

from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.trace import TensorUse
from lightning_ptm.runtime.fetching.tracer import Tracer
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.terms import Phase

F, B = Phase.FORWARD, Phase.BACKWARD


class Beside:
    """Bytes outside the pools: each reading is the next number."""

    def __init__(self, *readings: int) -> None:
        self._readings = list(readings)

    def __call__(self) -> int:
        return self._readings.pop(0)


class Clock:
    """A device that computes beside the host and comes to its marks at these seconds."""

    has_own_memory = True

    def __init__(self, *at_s: float) -> None:
        self._at_s = list(at_s)
        self.waited: list[float] = []

    def mark(self, *, timed: bool) -> Any:
        assert timed
        return _Mark(self, self._at_s.pop(0))


class _Mark:
    def __init__(self, clock: Clock, at_s: float) -> None:
        self._clock, self.at_s = clock, at_s

    def synchronize(self) -> None:
        self._clock.waited.append(self.at_s)

    def seconds_since(self, earlier: _Mark) -> float:
        return self.at_s - earlier.at_s


def units() -> Any:
    return discover(Model(2), ["OnePage"])


def test_the_largest_reading_of_a_tick_counts() -> None:
    # Of a tick: when it begins, when somebody looks, and when the next one, or the iteration, ends it (I1). Where one tick
    # ends and another begins there is one reading, of both.
    tracer = Tracer(units(), Beside(1, 9, 10, 3, 7), CpuBackend())
    tracer.observe()  # there is no tick yet
    tracer.tick(1, F, (0, 1))
    tracer.observe()
    tracer.tick(2, F, (0, 2))
    tracer.observe()
    trace = tracer.finish()
    assert [tick.non_model_bytes for tick in trace.ticks] == [10, 10]
    assert trace.non_model_peak_bytes == 10


def test_a_look_in_the_middle_of_a_tick_and_one_at_the_end_of_the_iteration_count_for_it_alone() -> None:
    tracer = Tracer(units(), Beside(1, 9, 2, 3, 7), CpuBackend())
    tracer.tick(1, F, (0, 1))
    tracer.observe()
    tracer.tick(2, F, (0, 2))
    tracer.observe()
    trace = tracer.finish()
    assert [tick.non_model_bytes for tick in trace.ticks] == [9, 7]


def test_a_tick_is_closed_by_the_next_one() -> None:
    tracer = Tracer(units(), lambda: 0, CpuBackend())
    tracer.tick(1, F, (0, 1))
    tracer.tick(2, B, (0, 1, 2), passes=3)
    trace = tracer.finish()
    assert [(tick.unit, tick.phase, tick.live, tick.passes) for tick in trace.ticks] == [
        (1, F, (0, 1), 0),
        (2, B, (0, 1, 2), 3),
    ]
    assert all(0 < tick.seconds < 1 for tick in trace.ticks)


def test_the_table_has_each_tensor_from_its_first_live_tick_to_its_last() -> None:
    tracer = Tracer(units(), lambda: 0, CpuBackend())
    for unit, live in ((0, (0,)), (1, (0, 1)), (0, (0, 1)), (1, (1,))):
        tracer.tick(unit, F, live)
    trace = tracer.finish()
    of_unit_1 = sum(tick.seconds for tick in trace.ticks if tick.unit == 1)
    assert trace.tensors == (  # unit 2 was never there
        TensorUse(0, "parts.0.weight", 1, 3, of_unit_1, 0.0),
        TensorUse(1, "parts.0.bias", 1, 3, of_unit_1, 0.0),
    )


def test_seconds_of_a_device_are_by_its_own_clock() -> None:
    clock: Any = Clock(10.0, 10.5, 12.5)
    tracer = Tracer(units(), lambda: 0, clock)
    tracer.tick(1, F, (1,))
    tracer.tick(1, B, (1,))
    trace = tracer.finish()
    assert [tick.seconds for tick in trace.ticks] == [0.5, 2.0]
    assert [use.gpu_time for use in trace.tensors] == [2.5, 2.5]
    assert all(0 < use.cpu_time < 1 for use in trace.tensors)
    assert clock.waited == [12.5]


def test_an_iteration_starts_from_nothing() -> None:
    clock: Any = Clock(1.0, 2.0, 5.0, 6.0)
    tracer = Tracer(units(), lambda: 0, clock)
    tracer.tick(1, F, (1,))
    tracer.finish()
    tracer.start()
    tracer.tick(2, F, (2,))
    trace = tracer.finish()
    assert [(tick.unit, tick.seconds) for tick in trace.ticks] == [(2, 1.0)]
    assert [use.name for use in trace.tensors] == ["parts.1.weight", "parts.1.bias"]
