"""Units on paper: a root of one page and blocks of one, two and three (two ranks: shards of 1, 1, 1 and 2 pages)."""

from __future__ import annotations

from typing import Any

import pytest
from decided_by_hand import CLUSTER, PAGE, decided

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.plan import Task
from lightning_ptm.runtime.deciding.virtual_pool import DoneByNeed, VirtualPool
from lightning_ptm.runtime.deciding.virtual_units import VirtualUnits
from lightning_ptm.terms import Kind, Operation

ON_HOST: dict[str, Any] = {"device_memory": 64 * PAGE, "offload_parameters": "host", "offload_optimizer": "host"}
TWO: dict[str, Any] = {"machine": CLUSTER, "ranks": 2, **ON_HOST}


class Driven:
    def __init__(self, room: int, by_need: tuple[int, ...] = (), **options: Any) -> None:
        self.pool = VirtualPool(room)
        self.done = DoneByNeed(by_need)
        self.it = VirtualUnits(decided(**options), self.pool, self.done, bool)

    def used(self) -> int:
        self.pool.begin_tick()
        return self.pool.worst


def test_a_unit_takes_its_pages_while_it_is_there() -> None:
    its = Driven(9, **ON_HOST)
    assert not its.it.gathers(2) and not its.it.live(2) and not its.it.movable(2)
    its.it.start_fetch(2, agreed=False)
    assert its.used() == 2 and its.it.live(2) and its.it.fetched(2) and its.it.movable(2)
    for _ in range(2):
        its.it.release(2)
        its.it.evict(2)
    assert its.used() == 0 and not its.it.fetched(2)


def test_of_several_ranks_the_shards_stay_when_the_whole_goes() -> None:
    its = Driven(99, **TWO)
    assert its.it.gathers(3)
    its.it.fetch_shards(3)
    its.it.fetch_shards(3)
    assert its.used() == 2 and its.it.has_spare_shards(3) and not its.it.live(3)
    its.it.start_fetch(3, agreed=True)
    assert its.used() == 2 + 3
    its.it.release(3)
    assert its.used() == 2 and its.it.has_spare_shards(3)
    its.it.evict(3)
    assert its.used() == 0
    its.it.start_fetch(3, agreed=True)  # which fetches them
    assert its.used() == 2 + 3


def test_without_room_for_whole_and_shard_nothing_is_taken() -> None:
    its = Driven(4, **TWO)
    with pytest.raises(CapacityError):
        its.it.start_fetch(3, agreed=False)
    assert its.used() == 0 and not its.it.fetched(3)
    its.it.fetch_shards(3)
    with pytest.raises(CapacityError):
        its.it.start_fetch(3, agreed=False)
    assert its.used() == 2


def test_what_is_at_home_on_the_device_takes_none_and_goes_nowhere() -> None:
    its = Driven(0)
    assert all(its.it.live(unit) and not its.it.movable(unit) for unit in range(4))
    its.it.fetch_shards(1)
    its.it.release(1)
    assert its.used() == 0 and not its.it.has_spare_shards(1)


def test_what_is_done_for_units_in_no_plan_is_written_down_once() -> None:
    its = Driven(99, (3,), **TWO)
    for unit in (2, 3):
        its.it.start_fetch(unit, agreed=False)
        for _ in range(2):
            its.it.release(unit)
            its.it.evict(unit)
    assert its.done.tasks == [
        Task(Operation.FETCH, 3, Kind.PARAMETER, 0),
        Task(Operation.GATHER, 3, Kind.FULL, 0),
        Task(Operation.RELEASE, 3, Kind.FULL, 0),
        Task(Operation.EVICT, 3, Kind.PARAMETER, 0),
    ]


def test_nothing_is_late_and_gradients_are_somebody_elses() -> None:
    its = Driven(9, **ON_HOST)
    assert not its.it.update_pending(1) and [its.it.reclaim(wait) for wait in (False, True)] == [False, True]
