"""The plan: an immutable list of tasks with triggers. Data only.

Owns the format that schedule.py produces, simulate.py checks, plan_table.py prints and the policy of a run issues
(fetch_policy.py). A plan contains only what is issued at its ticks: FETCH, GATHER, RELEASE, EVICT, and the COMPUTE of
each tick. Tasks that the gradients' own events trigger are added where they have to be counted (gradient_tasks.py).

I1: a task with trigger t is issued at the start of tick t; trigger `tick_count` is after the last tick.
I2: within a trigger, tasks that free pages come first, so no fetch waits for a later release; a COMPUTE is last.
I3: frames are counted from the first page for passing values (the inventory's gathered units).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
"""The order of operations within one trigger (I2)."""


@dataclass(frozen=True, slots=True)
class Task:
    """One operation on all pages of a unit's states of one kind; for `Kind.FULL`, on those of its gathered flats.

    Args:
        frames: for a task that brings pages, the first frame of each flat that takes any (I3); empty: any frames.
    """

    operation: Operation
    unit: int
    kind: Kind
    trigger: int
    frames: tuple[int, ...] = ()


class GradientBuffer(enum.Enum):
    """Device pages that a gradient takes when its unit's backward ends."""

    FULL = "full gradient"
    REDUCED = "reduced gradient"
    PASSING = "gradient"
    """Those in which it waits for the update."""
    SUM = "gradient so far"


@dataclass(frozen=True, slots=True)
class GradientFrame:
    """Place of a gradient's pages.

    Args:
        flat: index of the flat.
        pages: which of its pages.
        tick: last tick of the backward pass, at whose end they are taken.
        frame: the first one (I3).
    """

    flat: int
    pages: GradientBuffer
    tick: int
    frame: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks in the order in which they are issued, sorted by trigger; equal on all ranks."""

    tasks: tuple[Task, ...]
    tick_count: int
    gradients: tuple[GradientFrame, ...] = ()
    """Places of the gradients' pages, which no task takes, by flat, pages and tick."""
    at: tuple[tuple[Task, ...], ...] = field(init=False, repr=False, compare=False)
    """Tasks by trigger, in issue order; the last entry is after the last tick."""
    frames: Mapping[tuple[int, GradientBuffer], Sequence[GradientFrame]] = field(init=False, repr=False, compare=False)
    """`gradients` by flat and pages, in the order of ticks."""

    def __post_init__(self) -> None:
        at: list[list[Task]] = [[] for _ in range(self.tick_count + 1)]
        for task in self.tasks:
            if 0 <= task.trigger <= self.tick_count:
                at[task.trigger].append(task)
        object.__setattr__(self, "at", tuple(map(tuple, at)))
        places: dict[tuple[int, GradientBuffer], list[GradientFrame]] = {}
        for place in self.gradients:
            places.setdefault((place.flat, place.pages), []).append(place)
        object.__setattr__(self, "frames", places)

    def with_tasks(self, tasks: Iterable[Task]) -> Plan:
        """Returns a plan with further tasks, in issue order."""
        order = {operation: rank for rank, operation in enumerate(ISSUE_ORDER)}
        return Plan(
            tuple(sorted((*self.tasks, *tasks), key=lambda task: (task.trigger, order[task.operation]))),
            self.tick_count,
            self.gradients,
        )
