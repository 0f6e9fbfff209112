"""Adoption of parameter versions by compute in a lock-free run, with bounded staleness.

Owns the set of flats that the micro-batch in progress has read, the bound, and the staleness statistics. The buffering
thread (update/buffering_thread.py) makes the versions.

I1: a unit that is read for the first time in a micro-batch gets the newest version, and keeps it until the micro-batch
    ends: forward, recomputed forward and backward read one version.
I2: parameters that are read lack the gradients of at most `bound` steps; compute waits otherwise. If weights are
    predicted, the version predicts the effect of all lacking gradients.
I3: of a flat that is read, gradients of at most one kind are pending: gradients that cannot be added to each other (of
    different parameters) are applied before, while versions can still be adopted. So while compute waits for gradient
    pages, some flats that have several kinds pending are no longer read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.audits import StalenessStats
from lightning_ptm.runtime.updates.flat_counters import FlatCounters
from lightning_ptm.update.buffering_thread import BufferingThread
from lightning_ptm.update.lock_free_buffers import Contribution


class Versions:
    """The versions of all flats that compute reads.

    Args:
        units: stores by unit.
        counters: counters of the flats, by place.
        places: places of each unit's flats.
        buffering: publishes versions.
        bound: see `set_bound`.
    """

    def __init__(
        self,
        units: Sequence[UnitStore],
        counters: Sequence[FlatCounters],
        places: Sequence[Sequence[int]],
        buffering: BufferingThread,
        *,
        bound: int,
    ) -> None:
        self._units = units
        self._counters = counters
        self._places = places
        self._buffering = buffering
        # state
        self._read: set[int] = set()
        """Flats, by place, that the micro-batch in progress has read."""
        self._training = False
        self.bound = bound
        """Number of steps whose gradients a parameter in use may lack. Read by others."""
        self.stats = StalenessStats()

    def set_bound(self, bound: int) -> None:
        """Sets the number of steps whose gradients a parameter in use may lack from now on."""
        self.bound = bound

    # -- micro-batches -------------------------------------------------------------------------------------------------

    def begin_iteration(self, *, training: bool) -> None:
        """Begins an iteration: no flat was read yet."""
        self._read.clear()
        self._training = training

    def stepped(self, optimizer: int) -> None:
        """Records a step of an optimizer.

        In manual optimization the iteration continues, and may read newer versions of the optimizer's flats from now
        on. Graphs that use flats of other optimizers may still be alive.
        """
        self.stats.add_step()
        self._read -= {place for place, counter in enumerate(self._counters) if counter.flat.optimizer == optimizer}

    def release_reads(self, places: Iterable[int]) -> None:
        """Marks flats as no longer needed by any graph."""
        self._read.difference_update(places)

    def release_all_reads(self) -> None:
        """Marks all flats as no longer needed by any graph."""
        self._read.clear()

    def newer_than_read(self) -> list[FlatCounters]:
        """Flats that were read in this micro-batch and whose values a drain would change."""
        return [
            counter
            for place, counter in enumerate(self._counters)
            if place in self._read and (counter.received > counter.adopted or not counter.exact)
        ]

    # -- reads of units ------------------------------------------------------------------------------------------------

    def pending(self, unit: int) -> bool:
        """Whether a unit may not be read yet; if it may, its newest version is adopted."""
        unread = self._unread(unit)
        late = self._too_stale(unread)
        self._prioritize(late)
        if unread and not late:
            self._renew(unit, unread)
        return bool(late)

    def finish(self, unit: int) -> None:
        """Blocks until a unit has a version that may be read."""
        unread = self._unread(unit)
        if unread:
            self.catch_up(unread)
            self._renew(unit, unread)

    def catch_up(self, places: Sequence[int]) -> None:
        """Waits until the newest versions of these flats are new enough (I2)."""
        while late := self._too_stale(places):
            self._prioritize(late)
            # The next versions may need the pages of versions that are not in use.
            self.adopt_all()
            self._buffering.wait(partial(self._has_news, late))

    def make_room(self) -> None:
        """Requests the updates that free gradient pages, while compute waits for these (I3)."""
        # Only flats with several pending contributions: pages of the others are returned once the buffering thread has
        # added up what it received.
        piled = [place for place in range(len(self._counters)) if self._buffering.waiting(place) > 1]
        piled = [place for place in piled if place not in self._read]
        for place in piled:
            self._need_one_more(place)
        self._prioritize(piled)
        self.adopt_all()

    def predict_weights(self, unit: int, place: int, contribution: Contribution) -> None:
        """Moves the parameters that compute reads by the predicted effect of a contribution that comes now."""
        counter = self._counters[place]
        published = self._buffering.published(place)
        if counter.prediction is None or not counter.should_predict(self.bound, published=published):
            return
        if not counter.flat.store.resident:
            self._units[unit].release()
            self._units[unit].evict()
        counter.add_prediction(contribution)

    def staleness(self, place: int) -> int:
        """Number of steps whose gradients the newest version lacks."""
        return self._counters[place].received - self._buffering.applied(place)

    def _unread(self, unit: int) -> list[int]:
        return [place for place in self._places[unit] if place not in self._read]

    def _prioritize(self, places: Sequence[int]) -> None:
        for place in places:
            counter = self._counters[place]
            counter.prioritize(counter.must_include(self.bound))
            self._buffering.prioritize(place, counter.prioritized)

    def _has_news(self, late: Sequence[int]) -> bool:
        if len(self._too_stale(late)) < len(late):
            return True
        if any(self._counters[place].must_include(self.bound) > self._counters[place].prioritized for place in late):
            return True  # has to be requested
        unread = (place for unit in range(len(self._places)) for place in self._unread(unit))
        # Only versions that can be adopted: one that still lacks a prediction would count as news again and again.
        return any(self._buffering.peek(place, self._counters[place].received) is not None for place in unread)

    def _too_stale(self, places: Sequence[int]) -> list[int]:
        return [place for place in places if not self._fits(place)]

    def _fits(self, place: int) -> bool:
        """Returns whether a version exists that may be read."""
        counter = self._counters[place]
        if self._buffering.offers(place) < counter.changed:
            # the buffering thread has not taken the latest gradients yet, so how many kinds are pending is unknown
            return False
        if self._buffering.waiting(place) > 1:
            self._need_one_more(place)
        newer = self._buffering.peek(place, counter.received)
        if (newer.applied if newer is not None else counter.adopted) < counter.needed:
            return False
        if newer is not None:
            return counter.received - newer.applied <= self.bound
        return counter.may_read(self.bound)

    def _need_one_more(self, place: int) -> None:
        """Requires the oldest pending contribution of a flat in the next version to be read (I3)."""
        self._counters[place].need(self._buffering.applied(place) + 1)

    def _renew(self, unit: int, places: Sequence[int]) -> None:
        """Adopts the newest version of a unit at its first read in the micro-batch (I1)."""
        self._adopt(unit)
        self._read.update(places)
        if self._training:
            staleness = max(self._counters[place].received - self._counters[place].adopted for place in places)
            self.stats.add_read(staleness)

    # -- adoption ------------------------------------------------------------------------------------------------------

    def adopt_all(self) -> None:
        """Adopts the newest versions of all flats, except those being read (I1)."""
        for unit in range(len(self._places)):
            self._adopt(unit)

    def _adopt(self, unit: int) -> None:
        store = self._units[unit]
        for place in self._unread(unit):
            counter = self._counters[place]
            version = self._buffering.collect(place, counter.received)
            if version is None:
                continue
            flat = counter.flat.store
            if not flat.resident:
                store.release()
                store.evict()
            self._buffering.give_back(flat.adopt(version.pages))
            counter.take(version)
