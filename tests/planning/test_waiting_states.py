"""Lock-free updates, in every state that a few steps of a few flats can reach: compute never waits for what cannot come.

Compute reads flats in a forward, hands gradients over in a backward, and adopts versions of what it is not reading, as
runtime/updates/versions.py does; jobs end whenever they like. Of pages for versions there are as many as
runtime/deciding/budgets.py counts at
least. Forecasts are left out: they come without a job. Single behaviours: test_waiting.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

from lightning_ptm.planning.version_policy import Flat, VersionPolicy


@dataclasses.dataclass(frozen=True)
class Setup:
    """Flats are of these kinds, so many at most have a version in the making (of each kind), so many steps are taken.

    Attributes:
        bound: steps whose gradients a parameter in use may lack.
        room: chunks in hand, of flats that have one each.
        unused: the first so many flats may be left out of a step.
        apart: a step may have gradients for other parameters of a flat than the step before.
    """

    kinds: str
    bound: int
    steps: int = 2
    spares: int = 2
    room: int = 2
    unused: int = 0
    apart: bool = False


class World:
    """Waiting gradients, versions, and compute, which is at place `at` of its program."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.flats = [Flat(kind) for kind in setup.kinds]
        spares = [kind for kind in sorted(set(setup.kinds)) for _ in range(min(setup.spares, setup.kinds.count(kind)))]
        self.waiting = VersionPolicy(self.flats, spares, room=setup.room)
        self.total = len(spares)
        self.published: list[int | None] = [None for _ in self.flats]
        """Contributions in a version that compute has not taken."""
        self.adopted = [0 for _ in self.flats]
        self.received = [0 for _ in self.flats]
        self.read: set[int] = set()
        self.at = 0
        places = range(len(self.flats))
        one = [
            *(("read", place) for place in places),
            *(("hand over", place) for place in reversed(places)),
            ("step", 0),
        ]
        self.program = [*one * setup.steps, *(("drain", place) for place in places)]

    def key(self) -> Hashable:
        sums = tuple(tuple((each.which, each.steps) for each in flat.sums) for flat in self.flats)
        taken = tuple(flat.taken and flat.taken.steps for flat in self.flats)
        counts = tuple((flat.received, flat.applied, flat.urgent) for flat in self.flats)
        since = tuple(tuple(each.since for each in flat.sums) for flat in self.flats)
        hand = tuple(flat.place for flat in self.waiting._running)
        return (
            sums,
            since,
            taken,
            counts,
            hand,
            tuple(self.published),
            tuple(self.adopted),
            frozenset(self.read),
            self.at,
        )

    @property
    def over(self) -> bool:
        return self.at == len(self.program)

    # What compute does.

    def choices(self) -> Iterator[tuple[Any, ...]]:
        what, place = self.program[self.at]
        if what == "read" and place < self.setup.unused:
            yield from ((True,), (False,))
        elif what == "hand over" and self.setup.apart and place in self.read:
            yield from (("all",), ("some",))
        else:
            yield ()

    def compute(self, choice: Any = True) -> bool:
        """Goes on, or waits; whether it went on."""
        what, place = self.program[self.at]
        flat = self.flats[place]
        if (what == "read" and not choice) or (what == "hand over" and place not in self.read):
            pass  # not in this step
        elif what == "read":
            needed = max(self.received[place] - self.setup.bound, 0)
            if len(flat.sums) > 1:
                needed = max(needed, flat.applied + 1)
            if not self._wait_for(place, needed):
                return False
            self.read.add(place)
        elif what == "hand over":
            self.received[place] += 1
            self.waiting.offer(flat, self.at // (2 * len(self.flats) + 1), choice)
            self._feed()
        elif what == "step":
            self.read.clear()
            self._adopt_all()
        elif not self._wait_for(place, self.received[place]):
            return False
        self.at += 1
        return True

    def _wait_for(self, place: int, needed: int) -> bool:
        self._adopt_all()
        if self.adopted[place] < needed:
            self.waiting.prioritize(self.flats[place], needed)
            self._feed()
        return self.adopted[place] >= needed

    def _adopt_all(self) -> None:
        for place, applied in enumerate(self.published):
            if applied is not None and place not in self.read:
                self.adopted[place], self.published[place] = applied, None
                self.waiting.give_back(self.flats[place].kind)
        self._feed()

    # What the threads do.

    def end(self, flat: Flat) -> None:
        """Ends the flat's job."""
        self.waiting.finish(flat, learned=False)
        if self.published[flat.place] is not None:
            self.waiting.give_back(flat.kind)
        self.published[flat.place] = flat.applied
        self._feed()

    def _feed(self) -> None:
        for begun in self.waiting.next_jobs():
            assert begun.flat.taken is not None

    def check(self) -> None:
        free = sum(self.waiting._free.values())
        assert min(self.waiting._free.values()) >= 0
        used = len(self.waiting._running) + sum(applied is not None for applied in self.published)
        assert free + used == self.total, "pages were lost, or are used twice"
        assert len(set(map(id, self.waiting._running))) == len(self.waiting._running), "two jobs of a flat at a time"
        for flat in self.flats:
            assert flat.received == flat.applied + flat.pending == self.received[flat.place]


def explore(setup: Setup, change: Callable[[World], None] = lambda world: None) -> int:
    """Visits every state; how many there are."""
    first = World(setup)
    change(first)
    seen = {first.key()}
    left = [first]
    while left:
        world = left.pop()
        following: list[World] = []
        for flat in world.waiting._running:
            after = copy.deepcopy(world)
            after.end(after.flats[flat.place])
            following.append(after)
        for choice in () if world.over else world.choices():
            after = copy.deepcopy(world)
            went_on = after.compute(*choice)
            assert went_on or after.waiting._running, f"compute waits at {world.program[world.at]}, nothing is in hand"
            following.append(after)
        for after in following:
            after.check()
            if after.key() not in seen:
                seen.add(after.key())
                left.append(after)
        if world.over:
            assert world.received == world.adopted
    return len(seen)


SETUPS = {
    "one flat": Setup("a", 0),
    "one flat, steps ahead": Setup("a", 2, steps=4),
    "one flat, other parameters": Setup("a", 1, steps=4, apart=True),
    "two flats": Setup("aa", 0, steps=3),
    "two flats, steps ahead": Setup("aa", 1, steps=3),
    "two flats, other parameters": Setup("aa", 1, steps=2, apart=True),
    "two flats, not all used": Setup("aa", 1, steps=4, unused=1),
    "two flats, other parameters, not all used": Setup("aa", 1, steps=3, unused=2, apart=True),
    "two kinds": Setup("ab", 1, steps=3),
    "two flats, room for none": Setup("aa", 1, steps=3, room=0),
    "three flats": Setup("aaa", 0),
    "three flats, steps ahead": Setup("aaa", 1),
    "three flats, not all used": Setup("aaa", 1, steps=3, unused=1),
    "three flats of two kinds": Setup("aab", 1),
    "three flats of three kinds": Setup("abc", 0),
}


@pytest.mark.parametrize("name", SETUPS)
def test_compute_never_waits_for_what_cannot_come(name: str) -> None:
    assert explore(SETUPS[name]) > 5


@pytest.mark.parametrize("apart", [False, True])
def test_with_a_single_page_for_several_flats_it_might(apart: bool) -> None:
    """A flat that is being read keeps it, unseen, and what compute waits for needs it: so there are two of each kind."""
    with pytest.raises(AssertionError, match="nothing is in hand"):
        explore(Setup("aa", 1, steps=4, spares=1, unused=1, apart=apart))


def test_where_the_last_page_is_for_anybody_it_might() -> None:
    """Without I4 of `VersionPolicy` the search finds the deadlock."""

    def for_anybody(world: World) -> None:
        world.waiting._total.update({kind: 1 - count for kind, count in world.waiting._total.items()})

    with pytest.raises(AssertionError, match="nothing is in hand"):
        explore(Setup("aaa", 1, steps=4, unused=2), for_anybody)
