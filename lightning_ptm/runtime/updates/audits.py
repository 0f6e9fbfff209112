"""What became of gradients in a lock-free run, and how old parameters were, in numbers.

I1: each gradient was produced by one step, and is applied, pending or skipped, once.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateAudit:
    """What became of the gradients of one flat: each was produced by one step.

    Attributes:
        name: the flat, by its unit and its first parameter.
        produced: gradients that steps have produced.
        applied: those that an update has applied.
        pending: those that wait for one.
        skipped: those of steps that were not taken: inf or NaN under a loss scale.
    """

    name: str
    produced: int
    applied: int
    pending: int
    skipped: int

    @property
    def balanced(self) -> bool:
        """Whether none was lost and none was applied twice."""
        return self.produced == self.applied + self.pending + self.skipped


@dataclasses.dataclass(slots=True)
class StalenessStats:
    """Staleness of the units read in training since the run began, in steps, and how many steps there were."""

    reads: int = 0
    total: int = 0
    maximum: int = 0
    steps: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.reads if self.reads else 0.0

    def add_read(self, staleness: int) -> None:
        """Count a unit that was read."""
        self.reads += 1
        self.total += staleness
        self.maximum = max(self.maximum, staleness)

    def add_step(self) -> None:
        """Count a step."""
        self.steps += 1
