"""The plan: an immutable list of tasks with triggers, and its digest. Data only.

Owns the form of what schedule.py makes, simulate.py checks, render.py shows and the executor carries out.

I1: a task with trigger t is issued at the start of tick t; trigger `tick_count` is after the last tick.
I2: within a trigger, what gives pages back comes first, so no fetch waits for a release behind it; a COMPUTE is last.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass

from lightning_ptm.terms import Kind, Operation

ISSUE_ORDER = (
    Operation.RELEASE,
    Operation.EVICT,
    Operation.REDUCE,
    Operation.OFFLOAD,
    Operation.UPDATE,
    Operation.FETCH,
    Operation.GATHER,
    Operation.COMPUTE,
)
"""The order of operations within one trigger (I1)."""


@dataclass(frozen=True, slots=True)
class Task:
    """One act of the executor on pages [first_page, last_page) of a unit's states of one kind.

    Pages are counted as in `ModelLayout`: page k is this rank's piece of stripe k of the unit's flats; for `Kind.FULL`
    it stands for the whole stripe. A COMPUTE carries all pages of its unit.
    """

    operation: Operation
    unit: int
    kind: Kind
    first_page: int
    last_page: int
    trigger: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks in the order in which they are issued, sorted by trigger; equal on all ranks."""

    tasks: tuple[Task, ...]
    tick_count: int

    def tasks_at(self, trigger: int) -> tuple[Task, ...]:
        """The tasks of one trigger in issue order; trigger `tick_count` is after the last tick."""
        first = bisect_left(self.tasks, trigger, key=_trigger)
        return self.tasks[first : bisect_left(self.tasks, trigger + 1, first, key=_trigger)]

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the plan's canonical text: ranks compare it before they start."""
        text = hashlib.sha256(f"ticks {self.tick_count}\n".encode())
        for task in self.tasks:
            row = f"{task.trigger} {task.operation.value} {task.unit} {task.kind.value} "
            text.update(f"{row}{task.first_page} {task.last_page}\n".encode())
        return text.hexdigest()


def _trigger(task: Task) -> int:
    return task.trigger
