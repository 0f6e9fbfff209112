"""Plans in use by kind of iteration, and the traces from which the next plans are made.

Owns, for each mode, the plan in use with the trace that it was made for, and this rank's newest complete trace. Making
plans is collective, so traces are queued until all ranks take part (executor.py, I3).

I1: a trace is planned at most once, in the order in which iterations were traced.
I2: a trace for which no plan fits leaves the old plan in use.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace, one_pass
from lightning_ptm.terms import Mode


class PlanSelection:
    """The plans and traces of one rank.

    Args:
        replan: makes a plan from a trace, and returns it with the trace that it is for; None: no plan fits. Collective.
    """

    def __init__(self, replan: Callable[[Mode, Trace], tuple[Plan, Trace] | None]) -> None:
        self._replan = replan
        # state
        self._made: dict[Mode, tuple[Plan, Trace]] = {}
        self._traced: dict[Mode, Trace] = {}
        self._due: list[tuple[Mode, Trace]] = []
        self.remade = 0
        """Number of plans made from traces. Others read it."""

    def adopt(self, mode: Mode, plan: Plan, trace: Trace) -> None:
        """Uses `plan`, which was made for `trace`, from the next iteration of `mode` on."""
        self._made[mode] = (plan, trace)

    def planned(self, mode: Mode) -> tuple[Plan, Trace] | None:
        """Returns the plan in use, and the trace that it was made for."""
        return self._made.get(mode)

    def trace(self, mode: Mode) -> Trace | None:
        """Returns the newest complete trace of an iteration of `mode`; None after an iteration of another order."""
        return self._traced.get(mode)

    def add_trace(self, mode: Mode, trace: Trace) -> None:
        """Queues the trace of a complete iteration for planning."""
        if mode is Mode.FORWARD:
            trace = one_pass(trace)
        self._traced[mode] = trace
        self._due.append((mode, trace))

    def order_changed(self, mode: Mode) -> None:
        """Drops the newest trace, so that the next iteration is traced.

        Called after an iteration that followed neither its plan nor that trace.
        """
        self._traced.pop(mode, None)

    def make(self) -> None:
        """Makes the plans of the queued traces. Collective."""
        due, self._due = self._due, []
        for mode, trace in due:
            made = self._replan(mode, trace)
            if made is not None:
                self._made[mode] = made
                self.remade += 1
