"""Counters of one flat's gradients and versions in a lock-free run, on the compute side.

Only the compute thread writes these. The buffering thread has counters of its own (update/buffering_thread.py), and a
drain compares both.
"""

from __future__ import annotations

import dataclasses

from lightning_ptm.planning.version_policy import Reading
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.update.lock_free_buffers import Contribution, Version, predict_weights
from lightning_ptm.update.weight_prediction import WeightPrediction


@dataclasses.dataclass(slots=True, kw_only=True)
class FlatCounters(Reading):
    """Counters of one flat. `received` counts the gradients that were handed to the buffering thread."""

    flat: FlatUpdate
    skipped: int = 0
    prediction: WeightPrediction | None = None
    exact: bool = True
    """Whether the version that compute reads includes no weight prediction."""
    changed: int = 0
    """The count of `received` when a gradient last came for other parameters than the one before, so that the two
    cannot be added."""
    which: tuple[bool, ...] | None = None
    """The parameters that the last gradient was for."""
    needed: int = 0
    """Number of contributions that the next version to be read must include, whatever the bound (versions.py, I3)."""
    prioritized: int = 0
    """Number of contributions last requested from the buffering thread."""

    @property
    def produced(self) -> int:
        """Number of gradients of steps, including skipped steps."""
        return self.received + self.skipped

    def skip(self) -> None:
        """Counts a skipped step that had a gradient."""
        self.skipped += 1

    def prioritize(self, contributions: int) -> None:
        """Records the number of contributions that the buffering thread was asked to apply."""
        self.prioritized = contributions

    def need(self, contributions: int) -> None:
        """Requires the next version to be read to include this many of the contributions received."""
        self.needed = max(self.needed, min(self.received, contributions))

    def hand_over(self, contribution: Contribution) -> None:
        """Counts a contribution handed to the buffering thread."""
        self.receive()
        if contribution.source.which != self.which:
            self.which, self.changed = contribution.source.which, self.received

    def must_include(self, bound: int) -> int:
        """Number of contributions that the next version to be read must include, if it may lack `bound`."""
        return max(self.received - bound, self.needed)

    def take(self, version: Version) -> None:
        """Records the version that compute reads from now on."""
        self.adopt(version.applied, version.seen, learned=version.prediction is not None)
        self.prediction, self.exact = version.prediction, version.exact

    def add_prediction(self, contribution: Contribution) -> None:
        """Moves the parameters, which nothing reads now, by the predicted effect of a contribution."""
        assert self.prediction is not None
        store = self.flat.store
        contribution.settle()
        store.await_reads()
        store.binding.values_will_change()
        predict_weights(self.prediction, store.home.tensor(), contribution)
        store.binding.values_have_changed()
        self.see(len(contribution.origins))
        self.exact = False
