"""Which versions of parameters compute reads in a lock-free run, and how much they may lack.

Owns which flats the micro-batch in progress has read, the bound, and the numbers of how old parameters were. The versions are
made by the buffering thread (update/buffering_thread.py).

I1: a unit that is read for the first time in a micro-batch gets the newest version there is, and keeps it until the
    micro-batch ends: forward, recomputed forward and backward see one version.
I2: what is read lacks the gradients of at most `bound` steps; compute waits for the rest. Where it was forecast, the version
    forecasts all of these.
I3: of a flat that is read, gradients of one kind wait at most: those that cannot be added to one another (of different
    parameters) are applied before, while versions can still be adopted. So while compute waits for gradient pages,
    there are flats that wait with more and are read no longer.
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
    """Of all flats.

    Args:
        units: stores by unit.
        clocks: of the flats, by place.
        places: of each unit's flats.
        buffering: publishes versions.
        bound: see `bound_is`.
    """

    def __init__(
        self,
        units: Sequence[UnitStore],
        clocks: Sequence[FlatCounters],
        places: Sequence[Sequence[int]],
        buffering: BufferingThread,
        *,
        bound: int,
    ) -> None:
        self._units = units
        self._clocks = clocks
        self._places = places
        self._buffering = buffering
        # state
        self._read: set[int] = set()
        """Flats, by place, that the micro-batch in progress has read."""
        self._training = False
        self.bound = bound
        """Steps whose gradients a parameter in use may lack now. Others read it."""
        self.stats = StalenessStats()

    def bound_is(self, bound: int) -> None:
        """Of so many steps may a parameter in use lack the gradients from now on."""
        self.bound = bound

    # -- the micro-batch ----------------------------------------------------------------------------------------------

    def begin_iteration(self, *, training: bool) -> None:
        """Nothing has been read in this one."""
        self._read.clear()
        self._training = training

    def stepped(self, optimizer: int) -> None:
        """A step of an optimizer has been taken.

        In manual optimization the iteration goes on: what it reads of these flats from now on may be newer. Graphs over
        those of other optimizers may still be alive.
        """
        self.stats.add_step()
        self._read -= {place for place, clock in enumerate(self._clocks) if clock.flat.optimizer == optimizer}

    def no_graph_needs(self, places: Iterable[int]) -> None:
        """What was read of these flats is not needed any more."""
        self._read.difference_update(places)

    def all_over(self) -> None:
        """Nothing that was read is needed any more."""
        self._read.clear()

    def newer_than_read(self) -> list[FlatCounters]:
        """Flats that were read in this micro-batch, and which a drain would give other values."""
        return [
            clock
            for place, clock in enumerate(self._clocks)
            if place in self._read and (clock.received > clock.adopted or not clock.exact)
        ]

    # -- a unit is read -----------------------------------------------------------------------------------------------

    def pending(self, unit: int) -> bool:
        """Whether a unit may not be read yet; else it has its newest version."""
        unread = self._unread(unit)
        late = self._too_stale(unread)
        self._hurry(late)
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
            self._hurry(late)
            # The next versions may need the pages of what nobody uses now.
            self.adopt_all()
            self._buffering.wait(partial(self._has_news, late))

    def make_room(self) -> None:
        """Compute waits for pages of gradients: they come back when what has piled up is applied (I3)."""
        # Only these: pages of others come back when the buffering thread has added up what was handed over.
        piled = [place for place in range(len(self._clocks)) if self._buffering.waiting(place) > 1]
        piled = [place for place in piled if place not in self._read]
        for place in piled:
            self._need_one_more(place)
        self._hurry(piled)
        self.adopt_all()

    def predict_weights(self, unit: int, place: int, contribution: Contribution) -> None:
        """Brings the parameters that compute has to where this contribution, which comes now, is expected to take them."""
        clock = self._clocks[place]
        published = self._buffering.published(place)
        if clock.forecast is None or not clock.should_forecast(self.bound, published=published):
            return
        if not clock.flat.store.resident:
            self._units[unit].release()
            self._units[unit].evict()
        clock.add_forecast(contribution)

    def staleness(self, place: int) -> int:
        """Steps whose gradients the newest version lacks."""
        return self._clocks[place].received - self._buffering.applied(place)

    def _unread(self, unit: int) -> list[int]:
        return [place for place in self._places[unit] if place not in self._read]

    def _hurry(self, places: Sequence[int]) -> None:
        for place in places:
            clock = self._clocks[place]
            clock.hurry(clock.must_include(self.bound))
            self._buffering.hurry(place, clock.hurried)

    def _has_news(self, late: Sequence[int]) -> bool:
        if len(self._too_stale(late)) < len(late):
            return True
        if any(self._clocks[place].must_include(self.bound) > self._clocks[place].hurried for place in late):
            return True  # to be asked for
        unread = (place for unit in range(len(self._places)) for place in self._unread(unit))
        # Only what can be collected: one that still lacks a forecast would be news again and again.
        return any(self._buffering.peek(place, self._clocks[place].received) is not None for place in unread)

    def _too_stale(self, places: Sequence[int]) -> list[int]:
        return [place for place in places if not self._fits(place)]

    def _fits(self, place: int) -> bool:
        """Whether there is a version that may be read."""
        clock = self._clocks[place]
        if self._buffering.offers(place) < clock.changed:
            return False  # it is not known what waits
        if self._buffering.waiting(place) > 1:
            self._need_one_more(place)
        newer = self._buffering.peek(place, clock.received)
        if (newer.applied if newer is not None else clock.adopted) < clock.needed:
            return False
        if newer is not None:
            return clock.received - newer.applied <= self.bound
        return clock.may_read(self.bound)

    def _need_one_more(self, place: int) -> None:
        """What waits longest of a flat has to be in the version that is read next (I3)."""
        self._clocks[place].need(self._buffering.applied(place) + 1)

    def _renew(self, unit: int, places: Sequence[int]) -> None:
        """The micro-batch reads these flats of a unit for the first time (I1)."""
        self._adopt(unit)
        self._read.update(places)
        if self._training:
            staleness = max(self._clocks[place].received - self._clocks[place].adopted for place in places)
            self.stats.add_read(staleness)

    # -- versions come ------------------------------------------------------------------------------------------------

    def adopt_all(self) -> None:
        """Puts the newest versions in the place of older ones, but for those that are being read (I1)."""
        for unit in range(len(self._places)):
            self._adopt(unit)

    def _adopt(self, unit: int) -> None:
        store = self._units[unit]
        for place in self._unread(unit):
            clock = self._clocks[place]
            version = self._buffering.collect(place, clock.received)
            if version is None:
                continue
            flat = clock.flat.store
            if not flat.resident:
                store.release()
                store.evict()
            self._buffering.give_back(flat.adopt(version.pages))
            clock.take(version)
