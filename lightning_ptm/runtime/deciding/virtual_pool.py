"""Page counts of a virtual run's device pool, and the record of tasks for units that no plan contains.

Owns the number of pages in use, and its peak in the present tick.

I1: the number never exceeds the pool's size if callers check first (`check_room`).
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.plan import Task
from lightning_ptm.terms import Kind, Operation


class VirtualPool:
    """Count of the device pages that are allocated and freed during iterations.

    Args:
        room: number of pages in the pool.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        # state
        self._used = 0
        self._peak = 0

    def begin_tick(self) -> None:
        """Begins a tick: resets the peak."""
        self._peak = self._used

    @property
    def worst(self) -> int:
        """Peak of the pages in use during the tick, at most the pool's size."""
        return min(self._peak, self.room)

    def take(self, pages: int) -> None:
        """Allocates pages."""
        self._used += pages
        self._peak = max(self._peak, self._used)

    def give_back(self, pages: int) -> None:
        """Frees pages."""
        self._used -= pages

    def has(self, pages: int) -> bool:
        """Whether so many pages are free."""
        return self._used + pages <= self.room

    def check_room(self, pages: int) -> None:
        """Raises CapacityError if fewer pages are free."""
        if not self.has(pages):
            raise CapacityError(
                f"the simulated step needs {pages} more pages of the device tier, and {self._used} of {self.room} are "
                "in use; raise device_memory (host_memory without a GPU)"
            )


class DoneByNeed:
    """Record of the tasks done for units that no plan contains, in order, each with its trigger.

    Args:
        by_need: units that no plan contains.
    """

    def __init__(self, by_need: Collection[int]) -> None:
        self._by_need = frozenset(by_need)
        # state
        self.trigger = 0
        """Tick at which the next tasks are issued."""
        self.tasks: list[Task] = []

    def at(self, trigger: int) -> None:
        """Sets the tick at which the next tasks are issued."""
        self.trigger = trigger

    def add(self, operation: Operation, unit: int, kind: Kind) -> None:
        """Records a task of a unit of `by_need`; ignores other units, whose tasks are in the plan."""
        if unit in self._by_need:
            self.tasks.append(Task(operation, unit, kind, self.trigger))
