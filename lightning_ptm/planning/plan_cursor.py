"""Position of the iteration in progress within its plan, and within the trace that it may repeat.

Owns the tick counter, and whether the iteration has followed the plan and repeated the trace so far. Returns the plan's
tasks for each tick; issues none (planning/fetch_policy.py does), and knows units by number only.

I1: an iteration that has left the plan's order does not follow it again, and one that has left the trace's order does
    not repeat it again.
I2: the tick is valid after the iteration, until another begins; plan and trace are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Phase


class PlanCursor:
    """The position in one iteration; `begin` resets it."""

    def __init__(self) -> None:
        self._planned: tuple[Plan, Trace] | None = None
        self._traced: Trace | None = None
        self._may_repeat = False
        self._following = False
        self._repeating = False
        self.tick = 0
        """Number of ticks that have begun. Others read it."""
        self.now = 0
        """Index of the tick in progress; 0 before the first. Others read it, more than once a tick."""

    def begin(self, planned: tuple[Plan, Trace] | None, traced: Trace | None, *, may_repeat: bool) -> None:
        """Starts an iteration.

        Args:
            planned: the plan to follow, and the trace that it is for.
            traced: this rank's own newest trace.
            may_repeat: after the end of the plan or trace, the iteration may continue at the tick after the root's,
                as if it had ended and another had begun, while the root stays live (token-by-token generation).
        """
        self._planned, self._traced, self._may_repeat = planned, traced, may_repeat
        self.tick = self.now = 0
        self._following, self._repeating = planned is not None, traced is not None

    def forget(self) -> None:
        """Drops plan and trace: the iteration is over, or has failed."""
        self._planned = self._traced = None
        self._may_repeat = self._following = self._repeating = False

    @property
    def followed(self) -> bool:
        """Whether the iteration in progress has followed its plan, tick by tick, to the end."""
        return self._following and self._planned is not None and self.tick == self._planned[0].tick_count

    @property
    def repeated(self) -> bool:
        """Whether the iteration has repeated this rank's newest trace, tick by tick, to the end."""
        return self._repeating and self._traced is not None and self.tick == len(self._traced.ticks)

    def step(self, unit: int, phase: Phase) -> Sequence[Task]:
        """Begins a tick; returns the plan's tasks for it, none where the plan is not followed."""
        self.now = index = self.tick
        self.tick += 1
        if self._repeating and self._traced is not None:
            self._repeating = _is_at(self._traced, index, unit, phase)
        if self._following and self._planned is not None:
            self._following = _is_at(self._planned[1], index, unit, phase)
            if self._following:
                return self._planned[0].tasks_at(index)
        return ()

    def last_tasks(self) -> Sequence[Task]:
        """Returns the tasks after the plan's last tick, if the plan was followed to the end."""
        return self._planned[0].tasks_at(self.tick) if self.followed and self._planned is not None else ()

    def begins_next_round(self, unit: int, phase: Phase) -> bool:
        """Returns whether the tick that begins is the second tick of another round."""
        if not self._may_repeat:
            return False
        if self.followed:
            return self._planned is not None and _is_at(self._planned[1], 1, unit, phase)
        return self.repeated and self._traced is not None and _is_at(self._traced, 1, unit, phase)

    def first_tasks(self) -> Sequence[Task]:
        """Returns the tasks of the plan's first tick, with which another round begins.

        Returns none if the plan was not followed to the end.
        """
        return self._planned[0].tasks_at(0) if self.followed and self._planned is not None else ()

    def start_next_round(self) -> None:
        """Moves to the position after the first tick of another round."""
        self.tick, self.now = 1, 0

    def next_use(self, unit: int) -> int:
        """Returns the index of the tick in which a unit is needed next, counted on into the next iteration.

        Without a plan, it returns the unit's number.
        """
        if self._planned is None:
            return unit
        ticks = self._planned[1].ticks
        for index in range(self.tick, len(ticks)):
            if unit in ticks[index].live:
                return index
        return len(ticks) + next((i for i, tick in enumerate(ticks) if unit in tick.live), len(ticks))


def _is_at(trace: Trace, index: int, unit: int, phase: Phase) -> bool:
    """Returns whether tick `index` of a trace is this unit and phase."""
    return index < len(trace.ticks) and (trace.ticks[index].unit, trace.ticks[index].phase) == (unit, phase)
