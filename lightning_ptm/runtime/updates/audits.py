"""Counts of a lock-free run: what happened to each gradient, and how stale parameters were.

I1: each gradient was produced by one step, and is applied, pending or skipped, once.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateAudit:
    """Counts of the gradients of one flat, each produced by one step.

    Attributes:
        name: name of the flat: its first parameter's, followed by "...".
        produced: gradients that steps have produced.
        applied: gradients that an update has applied.
        pending: gradients that wait for an update.
        skipped: gradients of skipped steps (inf or NaN under a loss scale).
    """

    name: str
    produced: int
    applied: int
    pending: int
    skipped: int

    @property
    def balanced(self) -> bool:
        """Whether no gradient was lost and none was applied twice."""
        return self.produced == self.applied + self.pending + self.skipped


@dataclasses.dataclass(slots=True)
class StalenessStats:
    """Staleness of the units read in training since the run began, in steps, and the number of steps."""

    reads: int = 0
    total: int = 0
    maximum: int = 0
    steps: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.reads if self.reads else 0.0

    def add_read(self, staleness: int) -> None:
        """Counts a read of a unit."""
        self.reads += 1
        self.total += staleness
        self.maximum = max(self.maximum, staleness)

    def add_step(self) -> None:
        """Counts a step."""
        self.steps += 1
