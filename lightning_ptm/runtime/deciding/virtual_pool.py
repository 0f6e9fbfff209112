"""Numbers of device pages on paper, and what was done for units that are in no plan.

Owns how many pages are in use, and how many were at the worst moment of a tick.

I1: never more than the pool has, where it was asked first (`check_room`).
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.plan import Task
from lightning_ptm.terms import Kind, Operation


class VirtualPool:
    """Device pages beside those that are taken once.

    Args:
        room: how many there are.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        # state
        self._used = 0
        self._peak = 0

    def begin_tick(self) -> None:
        """Another tick: the worst of its moments is yet to come."""
        self._peak = self._used

    @property
    def worst(self) -> int:
        """Pages at the worst moment of the tick, as far as there are so many."""
        return min(self._peak, self.room)

    def take(self, pages: int) -> None:
        """So many are in use from here on."""
        self._used += pages
        self._peak = max(self._peak, self._used)

    def give_back(self, pages: int) -> None:
        """So many are not in use any more."""
        self._used -= pages

    def has(self, pages: int) -> bool:
        """Whether there is room for so many."""
        return self._used + pages <= self.room

    def check_room(self, pages: int) -> None:
        """Raises CapacityError: there is no room for so many."""
        if not self.has(pages):
            raise CapacityError(f"{pages} pages do not fit beside {self._used} of {self.room}")


class DoneByNeed:
    """What was done for units that are in no plan, in order, each at its trigger.

    Args:
        by_need: these units.
    """

    def __init__(self, by_need: Collection[int]) -> None:
        self._by_need = frozenset(by_need)
        # state
        self.trigger = 0
        """The tick at which what is done from here on is issued."""
        self.tasks: list[Task] = []

    def at(self, trigger: int) -> None:
        """What is done from here on is issued at this tick."""
        self.trigger = trigger

    def add(self, operation: Operation, unit: int, kind: Kind) -> None:
        """Something was done for a unit; nothing is written down where a plan tells it."""
        if unit in self._by_need:
            self.tasks.append(Task(operation, unit, kind, self.trigger))
