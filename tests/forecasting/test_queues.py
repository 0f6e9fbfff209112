"""Links as queues: what each carries, when it is free again, and what it takes from the cores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lightning_ptm.forecasting.queues import Load, Queues, _Lane
from lightning_ptm.forecasting.rates import Activity, Hardware
from lightning_ptm.terms import Link, Operation

SLOW = Hardware("one byte a second", *[1.0] * 7)


def test_a_link_does_one_thing_at_a_time_and_links_work_side_by_side() -> None:
    record: list[Activity] = []
    queues = Queues(SLOW, record)
    assert queues.carry(Operation.FETCH, 1, [Load(Link.DISK_READ, 3), Load(Link.HOST_TO_DEVICE, 2)], 1.0) == 4.0
    assert queues.carry(Operation.FETCH, 2, [Load(Link.DISK_READ, 2)], 0.0) == 6.0
    assert [(done.unit, done.start_s) for done in record] == [(1, 1.0), (1, 1.0), (2, 4.0)]
    used = {use.link: (use.bytes, use.busy_s) for use in queues.used()}
    assert (
        used[Link.DISK_READ] == (5, 5.0) and used[Link.HOST_TO_DEVICE] == (2, 2.0) and used[Link.COLLECTIVE] == (0, 0.0)
    )


def test_reads_and_writes_of_a_disk_share_what_both_can_do() -> None:
    queues = Queues(replace(SLOW, disk_both_bytes_per_s=1.0), None)
    assert queues.carry(Operation.FETCH, 1, [Load(Link.DISK_READ, 3)], 0.0) == 3.0
    assert queues.carry(Operation.UPDATE, 1, [Load(Link.DISK_WRITE, 3)], 0.0) == 6.0


@pytest.mark.parametrize(("shared_cores", "longer_s"), [(True, 1.0), (False, 0.0)])
def test_transfers_take_time_from_compute_where_they_share_its_cores(shared_cores: bool, longer_s: float) -> None:
    queues = Queues(replace(SLOW, shared_cores=shared_cores, disk_bytes_per_core_s=2.0), None)
    queues.carry(Operation.FETCH, 1, [Load(Link.DISK_READ, 2)], 0.0)
    assert queues.taken_by_transfers_s(0.0, 5.0) == longer_s  # of the two seconds in which the disk is read
    assert queues.taken_by_transfers_s(3.0, 5.0) == 0.0


@pytest.mark.parametrize(
    ("shared_cores", "per_core", "longer_s"), [(True, 2.0, 1.0), (True, 0.5, 2.0), (True, None, 0.0), (False, 2.0, 0.0)]
)
def test_collectives_take_time_from_compute_where_they_share_its_cores(
    shared_cores: bool, per_core: float | None, longer_s: float
) -> None:
    hardware = replace(SLOW, shared_cores=shared_cores, collective_bytes_per_core_s=per_core, lockstep_ranks=2)
    queues = Queues(hardware, None)
    queues.carry(Operation.GATHER, 1, [Load(Link.COLLECTIVE, 2)], 0.0)
    assert queues.taken_by_transfers_s(0.0, 5.0) == longer_s  # of the two seconds in which it passes
    assert queues.taken_by_transfers_s(3.0, 5.0) == 0.0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_in_lockstep_wait_for_the_transfers_of_each(ranks: int) -> None:
    """Compute that takes five seconds goes on while no rank is busy with its own, which takes each a second of all."""
    queues = Queues(replace(SLOW, shared_cores=True, disk_bytes_per_core_s=2.0, lockstep_ranks=ranks), None)
    queues.carry(Operation.FETCH, 1, [Load(Link.DISK_READ, 2)], 0.0)
    whole_s = 5.0 + queues.taken_by_transfers_s(0.0, 5.0)
    assert whole_s * (1 - 1 / whole_s) ** ranks == pytest.approx(5.0)
    assert queues.taken_by_transfers_s(3.0, 5.0) == 0.0


def test_a_collective_takes_time_beside_its_bytes() -> None:
    queues = Queues(replace(SLOW, collective_s={Link.COLLECTIVE: 10.0}), None)
    assert queues.carry(Operation.GATHER, 1, [Load(Link.COLLECTIVE, 3, collectives=2)], 0.0) == 23.0
    assert queues.carry(Operation.FETCH, 1, [Load(Link.DISK_READ, 3)], 0.0) == 3.0
    assert {use.link: use.collectives for use in queues.used() if use.collectives} == {Link.COLLECTIVE: 2}


def test_a_load_that_yields_is_carried_in_the_gaps_of_others() -> None:
    record: list[Activity] = []
    queues = Queues(SLOW, record)
    update = queues.carry_in_gaps(Operation.UPDATE, 1, [Load(Link.DISK_READ, 5), Load(Link.DISK_WRITE, 2)], 1.0)
    assert queues.end_s(update) == 6.0
    assert queues.carry(Operation.FETCH, 2, [Load(Link.DISK_READ, 3)], 2.0) == 5.0
    assert queues.end_s(update) == 9.0
    queues.settle(3.0)
    assert queues.carry(Operation.FETCH, 3, [Load(Link.DISK_READ, 1)], 7.0) == 8.0
    following = queues.carry_in_gaps(Operation.UPDATE, 4, [Load(Link.DISK_READ, 1)], 3.0)
    assert (queues.end_s(update), queues.end_s(following)) == (10.0, 11.0)
    queues.settle(20.0)
    assert (queues.end_s(update), queues.end_s(following)) == (10.0, 11.0)
    reads = [each for each in record if each.link is Link.DISK_READ]
    carried = sorted((each.start_s, each.start_s + each.seconds, each.unit) for each in reads)
    assert carried == [(1, 2, 1), (2, 5, 2), (5, 7, 1), (7, 8, 3), (8, 10, 1), (10, 11, 4)]
    assert sum(each.bytes for each in reads) == 10


def test_loads_that_yield_share_what_reads_and_writes_can_do() -> None:
    queues = Queues(replace(SLOW, disk_both_bytes_per_s=1.0), None)
    update = queues.carry_in_gaps(Operation.UPDATE, 1, [Load(Link.DISK_READ, 3), Load(Link.DISK_WRITE, 3)], 0.0)
    assert queues.end_s(update) == 6.0
    assert queues.carry(Operation.FETCH, 2, [Load(Link.DISK_READ, 2)], 0.0) == 2.0
    assert queues.end_s(update) == 8.0


def test_the_end_of_each_update_is_computed_once_while_nothing_delays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of experts has thousands of updates in the queue of a disk, and asks for the end of each."""
    walked, walk = [0], _Lane.pieces

    def counted(*args: Any, **how: Any) -> Iterator[Any]:
        for piece in walk(*args, **how):
            walked[0] += 1
            yield piece

    monkeypatch.setattr(_Lane, "pieces", counted)
    queues, count = Queues(SLOW, None), 100
    loads = [Load(Link.DISK_READ, 2), Load(Link.DISK_WRITE, 1)]
    updates = [queues.carry_in_gaps(Operation.UPDATE, unit, loads, 0.0) for unit in range(count)]
    for unit in reversed(range(count)):
        assert queues.end_s(updates[unit]) == 2.0 * (unit + 1)
        queues.carry(Operation.FETCH, unit, [Load(Link.DISK_READ, 1)], 2.0 * count)
    assert walked[0] <= 3 * count


@pytest.mark.parametrize("both", [None, 1.5])
def test_ends_that_are_asked_for_often_are_those_of_queues_that_are_asked_once(both: float | None) -> None:
    chance, now_s = random.Random(0), 0.0
    hardware = replace(SLOW, disk_both_bytes_per_s=both)
    events: list[Callable[[Queues], Any]] = []
    often = Queues(hardware, None)
    updates: dict[int, Any] = {}
    """By position of its event."""
    for place in range(80):
        loads = [Load(link, chance.randint(0, 4)) for link in (Link.DISK_READ, Link.DISK_WRITE)]
        at_s, kind = now_s + chance.randint(0, 3), chance.randrange(3)
        if kind == 0:
            events.append(partial(Queues.carry_in_gaps, operation=Operation.UPDATE, unit=1, loads=loads, ready_s=at_s))
        elif kind == 1:
            events.append(partial(Queues.carry, operation=Operation.FETCH, unit=2, loads=loads, ready_s=at_s))
        else:
            now_s += chance.randint(1, 5)
            events.append(partial(Queues.settle, now_s=now_s))
        done = events[-1](often)
        if kind == 0:
            updates[place] = done
        for asked in chance.sample(list(updates), min(3, len(updates))):
            once = Queues(hardware, None)
            same = [event(once) for event in events][asked]
            assert often.end_s(updates[asked]) == pytest.approx(once.end_s(same))
