"""Numbers of pages, and what was done for units that are in no plan."""

from __future__ import annotations

import pytest

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.plan import Task
from lightning_ptm.runtime.deciding.virtual_pool import DoneByNeed, VirtualPool
from lightning_ptm.terms import Kind, Operation


def test_the_worst_moment_of_a_tick() -> None:
    pool = VirtualPool(8)
    pool.take(5)
    pool.give_back(3)
    assert pool.worst == 5
    pool.begin_tick()
    assert pool.worst == 2
    pool.take(1)
    assert pool.worst == 3


def test_what_does_not_fit_is_refused_where_it_was_asked_for() -> None:
    pool = VirtualPool(8)
    pool.take(5)
    assert pool.has(3) and not pool.has(4)
    pool.check_room(3)
    with pytest.raises(CapacityError, match="needs 4 more pages of the device tier, and 5 of 8 are in use"):
        pool.check_room(4)
    pool.take(4)  # nobody asked, and there are no more than there are
    assert pool.worst == 8


def test_only_what_no_plan_tells_is_written_down_at_its_trigger() -> None:
    done = DoneByNeed((2, 3))
    done.add(Operation.FETCH, 1, Kind.FULL)
    done.add(Operation.FETCH, 2, Kind.FULL)
    done.at(4)
    done.add(Operation.UPDATE, 3, Kind.MASTER)
    assert done.tasks == [Task(Operation.FETCH, 2, Kind.FULL, 0), Task(Operation.UPDATE, 3, Kind.MASTER, 4)]
