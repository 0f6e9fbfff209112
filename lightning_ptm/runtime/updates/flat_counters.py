"""A flat's gradients and versions as compute counts them in a lock-free run.

Compute alone writes here; the buffering thread has counts of its own (update/buffering_thread.py), and a drain compares.
"""

from __future__ import annotations

import dataclasses

from lightning_ptm.planning.version_policy import Reading
from lightning_ptm.runtime.updates.updates import FlatUpdate
from lightning_ptm.update.lock_free_buffers import Contribution, Version, predict_weights
from lightning_ptm.update.weight_prediction import WeightPrediction


@dataclasses.dataclass(slots=True, kw_only=True)
class FlatCounters(Reading):
    """`received` are gradients that were handed over."""

    flat: FlatUpdate
    skipped: int = 0
    forecast: WeightPrediction | None = None
    exact: bool = True
    """Whether nothing is forecast in the version that compute reads."""
    changed: int = 0
    """How many were handed over when the last came that could not be added to the one before."""
    which: tuple[bool, ...] | None = None
    """The parameters that the last was for."""
    needed: int = 0
    """Contributions that the version that is read next must include, whatever the bound (versions.py, I3)."""
    hurried: int = 0
    """Those that the buffering thread was last asked for."""

    @property
    def produced(self) -> int:
        """Gradients of steps, those that were not taken included."""
        return self.received + self.skipped

    def skip(self) -> None:
        """A step was not taken that had a gradient."""
        self.skipped += 1

    def hurry(self, contributions: int) -> None:
        """The buffering thread was asked for so many."""
        self.hurried = contributions

    def need(self, contributions: int) -> None:
        """The version that is read next must include so many of what has come."""
        self.needed = max(self.needed, min(self.received, contributions))

    def hand_over(self, contribution: Contribution) -> None:
        """One is handed over."""
        self.receive()
        if contribution.source.which != self.which:
            self.which, self.changed = contribution.source.which, self.received

    def must_include(self, bound: int) -> int:
        """Contributions that the version that is read next must include, where it may lack so many."""
        return max(self.received - bound, self.needed)

    def take(self, version: Version) -> None:
        """Compute reads this one from now on."""
        self.adopt(version.applied, version.seen, learned=version.prediction is not None)
        self.forecast, self.exact = version.prediction, version.exact

    def add_forecast(self, contribution: Contribution) -> None:
        """Brings the parameters, which nobody reads now, to where a contribution is expected to take them."""
        assert self.forecast is not None
        store = self.flat.store
        contribution.settle()
        store.await_reads()
        store.binding.values_will_change()
        predict_weights(self.forecast, store.home.tensor(), contribution)
        store.binding.values_have_changed()
        self.see(len(contribution.origins))
        self.exact = False
