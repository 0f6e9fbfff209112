"""The plan: an immutable list of tasks with triggers. Data only.

Owns the form of what schedule.py makes, simulate.py checks, plan_table.py shows and the policy of a run issues
(fetch_policy.py).
A plan holds what is issued at its ticks, and only that: FETCH, GATHER, RELEASE, EVICT, and the COMPUTE of each. What follows
the gradients' own events is put beside it where somebody counts it (gradient_tasks.py).

I1: a task with trigger t is issued at the start of tick t; trigger `tick_count` is after the last tick.
I2: within a trigger, what gives pages back comes first, so no fetch waits for a release behind it; a COMPUTE is last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
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
    """One act on all pages of a unit's states of one kind; of `Kind.FULL`, on those of its gathered flats."""

    operation: Operation
    unit: int
    kind: Kind
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

    def beside(self, tasks: Iterable[Task]) -> Plan:
        """The plan's tasks and others, in issue order."""
        order = {operation: rank for rank, operation in enumerate(ISSUE_ORDER)}
        return Plan(
            tuple(sorted((*self.tasks, *tasks), key=lambda task: (task.trigger, order[task.operation]))),
            self.tick_count,
        )


def _trigger(task: Task) -> int:
    return task.trigger
