"""Where an iteration is in the plan that it follows, and in the trace that it may repeat: the clock of ticks.

Owns the tick, and until when the plan and the trace were gone through in their order. Decides which of the plan's tasks come
now; issues none (planning/fetch_policy.py does), and knows nothing of units but their numbers.

I1: what has left the plan's order does not follow it any more in this iteration, nor what has left the trace's repeat that.
I2: the tick outlives the iteration, until another begins; plan and trace do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Phase


class PlanCursor:
    """Of one iteration after the other."""

    def __init__(self) -> None:
        self._made: tuple[Plan, Trace] | None = None
        self._traced: Trace | None = None
        self._begins_again = False
        self._following = False
        self._repeating = False
        self.tick = 0
        """Ticks that have begun. Others read it."""
        self.now = 0
        """The tick in progress, by its number; 0 before the first. Others read it, more than once a tick."""

    def begin(self, made: tuple[Plan, Trace] | None, traced: Trace | None, *, begins_again: bool) -> None:
        """An iteration starts.

        Args:
            made: the plan to follow, and the trace that it is for.
            traced: this rank's own newest trace.
            begins_again: where plan, or trace, has been gone through to its end, it may begin anew behind the root's tick, as
                if the iteration ended and another one began, but the root stays.
        """
        self._made, self._traced, self._begins_again = made, traced, begins_again
        self.tick = self.now = 0
        self._following, self._repeating = made is not None, traced is not None

    def forget(self) -> None:
        """The iteration is over, or has failed."""
        self._made = self._traced = None
        self._begins_again = self._following = self._repeating = False

    @property
    def followed(self) -> bool:
        """Whether the iteration in progress has gone through its plan, tick by tick, to the end."""
        return self._following and self._made is not None and self.tick == self._made[0].tick_count

    @property
    def repeated(self) -> bool:
        """Whether it has gone through the ticks of this rank's newest trace, to the end."""
        return self._repeating and self._traced is not None and self.tick == len(self._traced.ticks)

    def step(self, unit: int, phase: Phase) -> Sequence[Task]:
        """A tick begins: the plan's tasks for it, none where the plan is not followed."""
        self.now = index = self.tick
        self.tick += 1
        if self._repeating and self._traced is not None:
            self._repeating = _is_at(self._traced, index, unit, phase)
        if self._following and self._made is not None:
            self._following = _is_at(self._made[1], index, unit, phase)
            if self._following:
                return self._made[0].tasks_at(index)
        return ()

    def last_tasks(self) -> Sequence[Task]:
        """Those behind the plan's last tick, where it was followed to the end."""
        return self._made[0].tasks_at(self.tick) if self.followed and self._made is not None else ()

    def goes_round(self, unit: int, phase: Phase) -> bool:
        """Whether the tick that begins is the second of another round."""
        if not self._begins_again:
            return False
        if self.followed:
            return self._made is not None and _is_at(self._made[1], 1, unit, phase)
        return self.repeated and self._traced is not None and _is_at(self._traced, 1, unit, phase)

    def first_tasks(self) -> Sequence[Task]:
        """Those of the plan's first tick, where it was followed to the end: another round begins with them."""
        return self._made[0].tasks_at(0) if self.followed and self._made is not None else ()

    def go_round(self) -> None:
        """Behind the first tick of another round."""
        self.tick, self.now = 1, 0

    def next_use(self, unit: int) -> int:
        """The place of the tick in which a unit is needed next, counted on into the next iteration; without a plan, its own
        number."""
        if self._made is None:
            return unit
        ticks = self._made[1].ticks
        for index in range(self.tick, len(ticks)):
            if unit in ticks[index].live:
                return index
        return len(ticks) + next((i for i, tick in enumerate(ticks) if unit in tick.live), len(ticks))


def _is_at(trace: Trace, index: int, unit: int, phase: Phase) -> bool:
    """Whether a trace has this tick at this place."""
    return index < len(trace.ticks) and (trace.ticks[index].unit, trace.ticks[index].phase) == (unit, phase)
