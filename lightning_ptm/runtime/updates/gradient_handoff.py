"""Gradients on their way from compute to the buffering thread, in a lock-free run.

Owns which of them are held back, here or in the buffers, and when holding ends (planning/pace.py).

I1: a flat's gradients wait in one place: here, only while none of them waits in the buffers.
I2: what is begun is never newer than what was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_ptm.planning.pace import Pace
from lightning_ptm.planning.version_policy import follows_sums
from lightning_ptm.runtime.updates.flat_counters import FlatCounters
from lightning_ptm.update.buffering_thread import BufferingThread
from lightning_ptm.update.lock_free_buffers import Contribution


class GradientHandoff:
    """Of all flats, by place.

    Args:
        clocks: of the flats.
        buffering: takes gradients.
        pace: when updates that are held back begin; None: all at once.
        adds: compute adds up gradients that are held back: the buffering thread would only take cores from it.
    """

    def __init__(
        self, clocks: Sequence[FlatCounters], buffering: BufferingThread, pace: Pace | None, *, adds: bool
    ) -> None:
        self._clocks = clocks
        self._buffering = buffering
        self._pace = pace
        self._adds = adds

    def came(self, place: int, contribution: Contribution, *, at_once: bool) -> None:
        """A flat has a gradient of a step.

        Args:
            at_once: it is not held back.
        """
        if self._pace is None:
            self._offer(place, contribution, begin=True)
            return
        begin = self._pace.came(place, self._buffering.applied(place))
        self._hold(place, contribution)
        for each in begin:
            self._hand_on(each, begin=True)
        if at_once:
            self.begin([place])

    def begin(self, places: Iterable[int]) -> None:
        """Nothing of these flats is held back any longer: somebody waits."""
        if self._pace is None:
            return
        for place in places:
            if self._pace.waiting(place):
                self._pace.begin(place)
                self._hand_on(place, begin=True)

    def drained(self) -> None:
        """Nothing waits anywhere."""
        if self._pace is not None:
            self._pace.drained()

    def earlier(self, place: int, contribution: Contribution) -> Contribution | None:
        """The sum that a contribution will be added to, where forecasts follow its momentum; None: there is none, or it may
        be taken by an update meanwhile."""
        clock = self._clocks[place]
        if self._pace is None or not follows_sums(clock.reach):
            return None
        held = clock.held
        if held is None and self._pace.waiting(place):
            self._buffering.wait(lambda: self._buffering.offers(place) >= clock.offers)
            held = self._buffering.held(place)
            # With no more steps than these, all of it is held back (I2).
            if held is not None and len(held.origins) > self._pace.waiting(place):
                held = None
        return held if held is not None and held.goes_with(contribution) else None

    def _offer(self, place: int, contribution: Contribution, *, begin: bool) -> None:
        self._clocks[place].offer(contribution)
        self._buffering.offer(place, contribution, begin=begin)

    def _hold(self, place: int, contribution: Contribution) -> None:
        """A gradient waits: here, or with those that wait in the buffers."""
        clock = self._clocks[place]
        held = clock.held
        if held is not None and held.goes_with(contribution):
            held.add(contribution)
            return
        if held is not None:
            self._offer(place, held, begin=False)
        clock.hold(contribution)
        # A flat's gradients wait in one place, or they would take twice the memory.
        if not self._adds or not clock.flat.gradient.in_place or self._buffering.waiting(place):
            self._hand_on(place, begin=False)

    def _hand_on(self, place: int, *, begin: bool) -> None:
        clock = self._clocks[place]
        held = clock.held
        clock.hold(None)
        if held is not None:
            self._offer(place, held, begin=begin)
        elif begin:
            self._buffering.begin(place)
