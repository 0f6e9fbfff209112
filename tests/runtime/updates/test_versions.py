"""Versions that compute reads, and what it waits for, with a buffering thread that is set by hand."""

from __future__ import annotations

from typing import Any

import pytest
from by_hand_buffering import Buffered, Flat, Unit, counters

from lightning_ptm.runtime.updates.versions import Versions


class Driven:
    """A root without flats, a unit of two, and one of another optimizer's."""

    def __init__(self, bound: int = 1) -> None:
        self.buffering: Any = Buffered(3)
        self.flats: Any = [Flat(), Flat(), Flat(1)]
        self.units: Any = [Unit(), Unit(), Unit()]
        self.counters = counters(*self.flats)
        self.it = Versions(self.units, self.counters, [[], [0, 1], [2]], self.buffering, bound=bound)

    def produced(self, *received: int) -> None:
        for counter, count in zip(self.counters, received, strict=True):
            counter.received = count


def test_the_first_reading_takes_the_newest_version_and_keeps_it() -> None:
    driven = Driven()
    driven.produced(1, 1, 0)
    driven.it.begin_iteration(training=True)
    driven.buffering.publish(0, 1)
    assert not driven.it.pending(1)
    assert [flat.pages for flat in driven.flats] == ["0 with 1", "first", "first"] and driven.units[1].given_up == 1
    assert driven.buffering.told() == ["back first"]
    driven.buffering.publish(1, 1)
    driven.it.finish(1)
    driven.it.adopt_all()
    assert driven.flats[1].pages == "first"  # it is being read
    driven.it.begin_iteration(training=True)
    driven.it.adopt_all()
    assert driven.flats[1].pages == "1 with 1"


def test_a_unit_that_lacks_too_much_is_waited_for() -> None:
    driven = Driven(bound=1)
    driven.produced(3, 1, 0)
    driven.it.begin_iteration(training=True)
    assert driven.it.pending(1) and driven.buffering.told() == ["prioritize 0 2"]
    assert not driven.it.pending(2)

    def come() -> None:
        driven.buffering.publish(0, driven.buffering.done[0] + 1)

    driven.buffering.while_waiting = come
    driven.it.finish(1)
    # The version with one of three would do no more than the one before.
    assert driven.flats[0].pages == "0 with 2" and driven.counters[0].adopted == 2
    assert driven.it.staleness(0) == 1


def test_a_bound_may_change() -> None:
    driven = Driven(bound=0)
    driven.produced(2, 2, 2)
    driven.it.begin_iteration(training=True)
    assert driven.it.pending(1)
    driven.it.set_bound(2)
    assert not driven.it.pending(1) and driven.it.bound == 2


def test_staleness_is_counted_once_a_reading_of_a_training() -> None:
    driven = Driven(bound=3)
    driven.produced(2, 1, 0)
    for training in (True, False):
        driven.it.begin_iteration(training=training)
        for _ in range(2):
            driven.it.finish(1)
    driven.it.stepped(0)
    stats = driven.it.stats
    assert (stats.reads, stats.total, stats.maximum, stats.steps) == (1, 2, 2, 1)


def test_a_step_ends_the_reading_of_its_optimizers_flats_alone() -> None:
    driven = Driven()
    driven.it.begin_iteration(training=True)
    for unit in (1, 2):
        driven.it.finish(unit)
    driven.it.stepped(0)
    for place in range(3):
        driven.buffering.publish(place, 1)
    driven.it.adopt_all()
    assert [flat.pages for flat in driven.flats] == ["0 with 1", "1 with 1", "first"]
    driven.it.release_reads({2})
    driven.it.adopt_all()
    assert driven.flats[2].pages == "2 with 1"


def test_what_was_read_before_newer_values_came_is_told() -> None:
    driven = Driven()
    driven.it.begin_iteration(training=True)
    driven.it.finish(1)
    assert driven.it.newer_than_read() == []
    driven.produced(0, 1, 1)
    assert driven.it.newer_than_read() == [driven.counters[1]]  # the third was not read
    driven.counters[0].exact = False
    assert driven.it.newer_than_read() == driven.counters[:2]
    driven.it.release_all_reads()
    assert driven.it.newer_than_read() == []


@pytest.mark.parametrize("read", [False, True])
def test_what_has_piled_up_must_be_applied_where_nobody_reads_it(read: bool) -> None:
    driven = Driven(bound=9)
    driven.produced(3, 3, 3)
    driven.it.begin_iteration(training=True)
    if read:
        driven.it.finish(1)
    driven.buffering.told()
    driven.buffering.piles = [2, 1, 1]
    driven.it.make_room()
    assert driven.buffering.told() == ([] if read else ["prioritize 0 1"])
    assert driven.counters[0].needed == (0 if read else 1)


def test_what_waits_unseen_is_waited_for() -> None:
    """A contribution that cannot be added to others is on its way: whether it waits beside them is not known."""
    driven = Driven(bound=9)
    driven.produced(1, 0, 0)
    driven.counters[0].changed = 1
    driven.it.begin_iteration(training=True)
    assert driven.it.pending(1)
    driven.buffering.come_to[0] = 1
    assert not driven.it.pending(1)
