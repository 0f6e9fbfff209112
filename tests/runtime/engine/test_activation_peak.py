"""Peaks of steps without the gradients that wait in `.grad`, from what a device has counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decided_by_hand import PAGE
from engine_by_hand import HOMES, run

from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.engine.activation_peak import ActivationPeak, PeaksByWaitingUnits, planned_below_peak
from lightning_ptm.terms import Phase


class Device(CpuBackend):
    """A device whose peak is what a test says."""

    peak = now = 0

    def bytes_outside_region(self, region_bytes: int) -> int:
        return Device.now

    def peak_outside_region(self, region_bytes: int) -> int:
        return Device.peak - region_bytes

    def begin_peak(self) -> None:
        self.next_peak()

    def next_peak(self) -> None:
        Device.peak = 0


class Measured:
    """A measurement in a layout of 16 pages, of the gradients of a backward that is over."""

    def __init__(self, engine: Any, *, by_tick: bool = True) -> None:
        self.peak = ActivationPeak(Device(), 16 * PAGE, 3 * PAGE, engine.flats)
        self.peak.begin(by_tick=by_tick)

    def tick(self, pages: int, ended: int | None = None) -> None:
        """A tick takes so many pages at its peak, and ends the backward of a unit."""
        Device.peak = max(Device.peak, (16 + pages) * PAGE)
        if ended is not None:
            self.peak.gradients_came(ended)
        self.peak.tick()

    @property
    def pages(self) -> float:
        return self.peak.bytes() / PAGE


def test_gradients_that_came_are_taken_off_the_peaks_after_them() -> None:
    with run(keep_gradients=True) as it:
        it.backward()
        found = Measured(it.engine)
        found.peak.begin_iteration(counts=True)
        for pages, ended in ((3, 2), (5, 1), (5, 0)):
            found.tick(pages, ended)
        assert found.peak.gradients_now() == 3 * PAGE
        assert found.pages == 4  # the second tick, with one page of gradients
        found.tick(8)
        assert found.pages == 5  # the step, with three
        found.peak.begin_iteration(counts=True)
        found.tick(6)
        assert found.pages == 6  # a micro-batch later, they may have been removed


def test_with_manual_optimization_all_bytes_count() -> None:
    with run(keep_gradients=True) as it:
        it.backward()
        found = Measured(it.engine)
        found.peak.begin_iteration(counts=False)
        found.tick(3, 2)
        found.tick(5)
        assert found.pages == 5


def test_gradients_that_updates_use_in_the_backward_are_not_taken_off(disk: Path) -> None:
    """They may have been freed before the peak."""
    with run(disk, **HOMES["masters on disk"]) as it:
        it.backward()
        found = Measured(it.engine)
        found.peak.begin_iteration(counts=True)
        found.tick(3, 2)
        found.tick(5)
        assert found.pages == 5


def test_as_a_whole_no_more_is_left_than_the_gradients_at_most() -> None:
    with run(keep_gradients=True) as it:
        it.backward()
        found = Measured(it.engine, by_tick=False)
        found.peak.begin_iteration(counts=True)
        found.tick(5, 2)
        found.tick(4)
        assert found.pages == 2


def test_bytes_that_a_forward_keeps_are_known_by_unit() -> None:
    with run() as it:
        peak = Measured(it.engine).peak
        for now, unit, phase in (
            (2, 0, Phase.FORWARD),
            (3, 1, Phase.FORWARD),
            (7, 1, Phase.FORWARD),
            (9, 2, Phase.FORWARD),
            (8, 2, Phase.BACKWARD),
            (1, 1, Phase.BACKWARD),
            (0, None, None),
        ):
            Device.now = now
            peak.tick(unit, phase)
        assert peak.kept == {0: 1, 1: 4, 2: 0}
        peak.begin(by_tick=True)
        assert not peak.kept


def test_an_engine_measures_its_own_iterations() -> None:
    """Each unit's backward ends in a tick of its own, and the next iteration counts none of the gradients."""
    with run(keep_gradients=True) as it:
        seen: list[int] = []
        measuring = it.engine.activation_peak
        measuring.begin(by_tick=True)
        came = measuring.gradients_came
        measuring.gradients_came = lambda unit: (seen.append(unit), came(unit))  # type: ignore[method-assign]
        it.engine.backwards._watch = measuring
        it.backward()
        assert seen == [2, 1, 0] and sorted(measuring._in_grad.values()) == [PAGE] * 3
        it.forward()
        assert not measuring._in_grad


@pytest.mark.parametrize("outlive", [False, True])
def test_peaks_are_kept_by_the_units_whose_gradients_may_wait(outlive: bool) -> None:
    """In the forward those of the step before, until a unit's forward is over, or all forwards, if they outlive the step; in
    the backward those that have come."""
    with run(keep_gradients=True) as it:
        it.backward()
        found = Measured(it.engine)
        peak = found.peak
        peak._waiting = PeaksByWaitingUnits({0, 1, 2}, {0, 1, 2} if outlive else ())
        peak.begin_iteration(counts=True)
        for pages, unit in enumerate((0, 1, 2), start=1):
            peak.tick(unit, Phase.FORWARD)
            Device.peak = (16 + pages) * PAGE
        peak.pass_begins()
        peak.tick(2, Phase.BACKWARD)
        Device.peak = (16 + 9) * PAGE
        peak.gradients_came(2)
        Device.peak = (16 + 5) * PAGE
        peak.tick(1, Phase.FORWARD)  # recomputed
        before = {(0, 1, 2): 3} if outlive else {(0, 1, 2): 1, (1, 2): 2}
        found_peaks = {tuple(sorted(units)): size / PAGE for units, size in peak.peaks().items()}
        assert found_peaks == {**before, (2,): 4, (): 9}
        assert peak.passes == 1


def test_a_plan_has_the_peaks_that_a_run_of_its_trace_measures() -> None:
    with run(keep_gradients=True) as it:
        it.backward()
        trace = it.engine.blueprint.trace
        pages = [5 + 3 * at % 7 for at in range(len(trace.ticks))]
        found = Measured(it.engine).peak
        found.begin_iteration(counts=True)
        for tick, taken in zip(trace.ticks, pages, strict=True):
            if tick.phase is Phase.BACKWARD and not found.passes:
                found.pass_begins()
            found.tick(tick.unit, tick.phase)
            came = sum(found._in_grad.values())
            Device.peak = (16 + taken) * PAGE + came
            if tick.phase is Phase.BACKWARD:
                found.gradients_came(tick.unit)
                Device.peak = 0  # the next tick begins
        measured = {units: taken for units, taken in found.peaks().items() if taken > 0}
        below = {units: max(measured.values()) - taken for units, taken in measured.items()}
        planned = planned_below_peak(trace, [each * PAGE for each in pages], {0, 1, 2}, {0, 1, 2})
        assert planned == below


@pytest.mark.parametrize("outlive", [False, True])
def test_very_many_units_have_few_sets_which_err_on_the_safe_side(outlive: bool) -> None:
    count = 1000
    ticks = [Tick(unit, phase, (unit,)) for phase in (Phase.FORWARD, Phase.BACKWARD) for unit in range(count)]
    taken = [(7 * at) % 1000 + 1 for at in range(2 * count)]
    outliving = range(0, count, 2) if outlive else ()
    found = planned_below_peak(Trace(tuple(ticks)), taken, range(count), outliving)
    assert len(found) <= 2 * (128 + 1)
    before, came = set(range(count)), set[int]()
    for at, (tick, size) in enumerate(zip(ticks, taken, strict=True)):
        if tick.phase is Phase.BACKWARD:
            before -= set(outliving)
        waits = before | came
        assert any(waits <= units and max(taken) - below >= size for units, below in found.items()), at
        if tick.phase is Phase.FORWARD and tick.unit not in outliving:
            before.discard(tick.unit)
        if tick.phase is Phase.BACKWARD:
            came.add(tick.unit)
