"""Which plan is followed next, by kind of iteration, and what was traced since plans were made.

Owns, for each mode, the plan that is followed with the trace that it was made for, and this rank's newest complete trace.
Making plans is collective, so traces wait until all ranks are together (executor.py, I3).

I1: a trace is planned at most once, in the order in which iterations were traced.
I2: a trace that fits no plan leaves the old one.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace, one_pass
from lightning_ptm.terms import Mode


class PlanSelection:
    """Of one rank.

    Args:
        replan: makes a plan from a trace, and tells what trace the plan is for; None: it fits in no plan. Collective.
    """

    def __init__(self, replan: Callable[[Mode, Trace], tuple[Plan, Trace] | None]) -> None:
        self._replan = replan
        # state
        self._made: dict[Mode, tuple[Plan, Trace]] = {}
        self._traced: dict[Mode, Trace] = {}
        self._due: list[tuple[Mode, Trace]] = []
        self.remade = 0
        """How many were made of traces. Others read it."""

    def adopt(self, mode: Mode, plan: Plan, trace: Trace) -> None:
        """From the next iteration of `mode` on, `plan` is followed, which was made for `trace`."""
        self._made[mode] = (plan, trace)

    def planned(self, mode: Mode) -> tuple[Plan, Trace] | None:
        """The plan that is followed, and the trace that it was made for."""
        return self._made.get(mode)

    def trace(self, mode: Mode) -> Trace | None:
        """The newest complete trace of an iteration of `mode`, until one has not followed its plan."""
        return self._traced.get(mode)

    def has_come(self, mode: Mode, trace: Trace) -> None:
        """An iteration was traced to its end: a plan is due."""
        if mode is Mode.FORWARD:
            trace = one_pass(trace)
        self._traced[mode] = trace
        self._due.append((mode, trace))

    def order_changed(self, mode: Mode) -> None:
        """An iteration has gone another way than its plan and the newest trace: the next is to be traced."""
        self._traced.pop(mode, None)

    def make(self) -> None:
        """Collective: makes the plans that are due."""
        due, self._due = self._due, []
        for mode, trace in due:
            made = self._replan(mode, trace)
            if made is not None:
                self._made[mode] = made
                self.remade += 1
