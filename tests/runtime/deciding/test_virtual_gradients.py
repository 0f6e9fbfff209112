"""Gradients on paper: blocks of one, two and three pages (two ranks: shards of 1, 1 and 2)."""

from __future__ import annotations

from typing import Any

from decided_by_hand import CLUSTER, PAGE, decided

from lightning_ptm.planning.plan import Task
from lightning_ptm.runtime.deciding.virtual_gradients import LaidOut, VirtualGradients
from lightning_ptm.runtime.deciding.virtual_pool import DoneByNeed, VirtualPool
from lightning_ptm.runtime.deciding.virtual_units import VirtualUnits
from lightning_ptm.terms import Kind, Operation

ON_HOST: dict[str, Any] = {"device_memory": 64 * PAGE, "offload_parameters": "host", "offload_optimizer": "host"}
TWO: dict[str, Any] = {"machine": CLUSTER, "ranks": 2, **ON_HOST}


class Driven:
    """Nothing else takes pages, but units that are fetched."""

    def __init__(self, room: int = 99, by_need: tuple[int, ...] = (), **options: Any) -> None:
        self.pool = VirtualPool(room)
        self.done = DoneByNeed(by_need)
        found = decided(**options)
        self.units = VirtualUnits(found, self.pool, self.done, bool)
        self.released = 0
        self.it = VirtualGradients(found, self.pool, self.done, self.units, self.release_all)

    def release_all(self) -> None:
        self.released += 1

    def used(self) -> int:
        self.pool.begin_tick()
        return self.pool.worst


def test_a_page_counts_in_each_of_its_parts() -> None:
    assert LaidOut(full=3, reduced=2, passing=1).pages == 6


def test_on_one_rank_they_leave_behind_the_tick() -> None:
    its = Driven(**ON_HOST)
    its.it.end_backward(3)
    assert its.used() == 3
    assert its.it.reclaim(False) and its.used() == 0
    assert not its.it.reclaim(False)


def test_in_grad_they_take_no_page() -> None:
    its = Driven()
    its.it.end_backward(3)
    assert its.pool.worst == 0


def test_on_several_ranks_they_wait_for_the_next_units_reduction() -> None:
    its = Driven(**TWO)
    its.it.end_backward(3)
    assert its.used() == 3 + 2 and not its.it.reclaim(False)
    its.it.end_backward(2)  # with which the reduction of the one before has ended
    assert its.pool.worst == 3 + 2 + 2 + 1
    assert its.it.reclaim(False) and its.used() == 2 + 1
    its.it.step()
    assert its.it.reclaim(False) and its.used() == 0


def test_a_unit_is_given_up_when_its_gradients_go_to_the_update() -> None:
    its = Driven(by_need=(3,), **ON_HOST)
    for unit in (2, 3):
        its.units.start_fetch(unit, agreed=False)
    its.it.end_backward(3)
    assert its.units.fetched(3)
    its.it.end_backward(2)
    assert not its.units.fetched(3) and its.units.fetched(2)
    assert [task for task in its.done.tasks if task.kind is not Kind.FULL] == [
        Task(Operation.OFFLOAD, 3, Kind.GRADIENT, 0),
        Task(Operation.UPDATE, 3, Kind.MASTER, 0),
    ]


def test_where_room_is_short_units_are_given_up_for_them() -> None:
    its = Driven(5, **ON_HOST)
    its.it.end_backward(3)
    assert its.released == 0
    its.it.end_backward(2)
    assert its.released == 0  # there were five
    its.it.end_backward(1)
    assert its.released == 1 and its.used() == 1  # those that were leaving have come back


def test_what_is_reduced_once_a_step_takes_nothing_before() -> None:
    its = Driven(machine=CLUSTER, ranks=2, keep_gradients=True, tuning={"reduce_gradients": "each_step"})
    its.it.step()
    assert its.pool.worst > 0


def test_sums_are_added_to_in_pages_from_the_second_pass_on() -> None:
    homes = {"offload_parameters": "disk", "offload_optimizer": "disk", "disk_path": "/d"}
    its = Driven(device_memory=32 * PAGE, keep_gradients=True, sums_gradients=True, **homes)
    its.it.end_backward(3)
    its.it.end_iteration()
    assert its.used() == 3 and its.it.reclaim(False)
    its.it.end_backward(3)
    assert its.pool.worst == 2 * 3
