"""A flat's gradients and versions as compute counts them in a lock-free run.

Compute alone writes here; the buffering thread has counts of its own (update/buffering_thread.py), and a drain compares.

I1: what is held is a part of what was received, and has not been offered.
"""

from __future__ import annotations

import dataclasses

from lightning_ptm.planning.version_policy import Reading
from lightning_ptm.runtime.updates.updates import FlatUpdate
from lightning_ptm.update.lock_free_buffers import Contribution, Version, predict_weights
from lightning_ptm.update.weight_prediction import WeightPrediction


@dataclasses.dataclass(slots=True, kw_only=True)
class FlatCounters(Reading):
    """`received` are gradients that were handed over, or are held."""

    flat: FlatUpdate
    skipped: int = 0
    forecast: WeightPrediction | None = None
    exact: bool = True
    """Whether nothing is forecast in the version that compute reads."""
    held: Contribution | None = None
    """Gradients that were not handed over yet (lock_free.py, I3)."""

    offers: int = 0
    """Contributions that were handed over, each as one, whatever it was added up from."""
    changed: int = 0
    """How many these were when the last came that could not be added to the one before."""
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

    @property
    def held_steps(self) -> int:
        return len(self.held.origins) if self.held is not None else 0

    @property
    def offered(self) -> int:
        """Contributions that the buffering thread knows of, or soon will."""
        return self.received - self.held_steps

    def skip(self) -> None:
        """A step was not taken that had a gradient."""
        self.skipped += 1

    def hold(self, contribution: Contribution | None) -> None:
        """One waits to be handed over; None: none does any more."""
        self.held = contribution

    def hurry(self, contributions: int) -> None:
        """The buffering thread was asked for so many."""
        self.hurried = contributions

    def need(self, contributions: int) -> None:
        """The version that is read next must include so many of what has come."""
        self.needed = max(self.needed, min(self.received, contributions))

    def offer(self, contribution: Contribution) -> None:
        """One is handed over."""
        self.offers += 1
        if contribution.source.which != self.which:
            self.which, self.changed = contribution.source.which, self.offers

    def must_include(self, bound: int) -> int:
        """Contributions that the version that is read next must include, where it may lack so many."""
        return max(self.received - bound, self.needed)

    def take(self, version: Version) -> None:
        """Compute reads this one from now on."""
        self.adopt(version.applied, version.seen, learned=version.forecast is not None)
        self.forecast, self.exact = version.forecast, version.exact

    def add_forecast(self, contribution: Contribution, earlier: Contribution | None = None) -> None:
        """Brings the parameters, which nobody reads now, to where a contribution is expected to take them.

        Args:
            earlier: the sum that it will be added to, where forecasts follow that.
        """
        assert self.forecast is not None
        store = self.flat.store
        contribution.settle()
        store.await_reads()
        store.binding.values_will_change()
        predict_weights(self.forecast, store.home.tensor(), contribution, earlier)
        store.binding.values_have_changed()
        self.see(len(contribution.origins))
        self.exact = False
