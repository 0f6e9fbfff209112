"""Plans and traces by kind of iteration, with a planner that writes down what it is asked."""

from __future__ import annotations

from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.fetching.plan_selection import PlanSelection
from lightning_ptm.terms import Mode, Phase

TRAIN, FORWARD = Mode.TRAIN, Mode.FORWARD


def trace(*units: int) -> Trace:
    return Trace(tuple(Tick(unit, Phase.FORWARD, tuple(sorted({0, unit}))) for unit in units))


class Planner:
    def __init__(self) -> None:
        self.asked: list[tuple[Mode, Trace]] = []
        self.fits = True
        self.plans = PlanSelection(self.plan)

    def plan(self, mode: Mode, seen: Trace) -> tuple[Plan, Trace] | None:
        self.asked.append((mode, seen))
        return (Plan((), len(seen.ticks)), seen) if self.fits else None


def test_a_trace_is_planned_once_when_ranks_are_together() -> None:
    it = Planner()
    it.plans.add_trace(TRAIN, trace(0, 1))
    it.plans.add_trace(TRAIN, trace(0, 2))
    assert it.asked == [] and it.plans.planned(TRAIN) is None and it.plans.trace(TRAIN) == trace(0, 2)
    it.plans.make()
    it.plans.make()
    assert it.asked == [(TRAIN, trace(0, 1)), (TRAIN, trace(0, 2))] and it.plans.remade == 2
    assert it.plans.planned(TRAIN) == (Plan((), 2), trace(0, 2)) and it.plans.planned(FORWARD) is None


def test_what_fits_in_no_plan_leaves_the_old_one() -> None:
    it = Planner()
    it.plans.adopt(TRAIN, Plan((), 1), trace(0))
    it.fits = False
    it.plans.add_trace(TRAIN, trace(0, 1))
    it.plans.make()
    assert it.plans.planned(TRAIN) == (Plan((), 1), trace(0)) and it.plans.remade == 0


def test_of_equal_forward_passes_one_is_planned() -> None:
    it = Planner()
    for mode in (TRAIN, FORWARD):
        it.plans.add_trace(mode, trace(0, 1, 2, 1, 2))
    assert it.plans.trace(TRAIN) == trace(0, 1, 2, 1, 2) and it.plans.trace(FORWARD) == trace(0, 1, 2)
    it.plans.make()
    assert it.asked[1] == (FORWARD, trace(0, 1, 2))


def test_a_changed_order_forgets_the_trace_and_keeps_the_plan() -> None:
    it = Planner()
    it.plans.add_trace(TRAIN, trace(0, 1))
    it.plans.make()
    it.plans.order_changed(TRAIN)
    it.plans.order_changed(TRAIN)
    assert it.plans.trace(TRAIN) is None and it.plans.planned(TRAIN) is not None
