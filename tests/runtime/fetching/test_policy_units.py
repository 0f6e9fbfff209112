"""What the policy asks of units, answered by stores over pages of RAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from small_parts import Model, Parts, parts

from lightning_ptm.comm import NeededCollective
from lightning_ptm.errors import CapacityError
from lightning_ptm.runtime.fetching.policy_units import PolicyUnits
from lightning_ptm.terms import Operation


class Agreed:
    """Writes down what ranks were asked for."""

    def __init__(self) -> None:
        self.asked: list[NeededCollective] = []

    def request(self, request: NeededCollective) -> None:
        self.asked.append(request)


@contextmanager
def units(*, double: bool = False, **settings: Any) -> Iterator[tuple[PolicyUnits, Parts, Agreed]]:
    with parts(Model(3, double), world_size=1 + double, **settings) as made:
        agreed: Any = Agreed()
        yield PolicyUnits(made.stores, agreed, {2}.__contains__, bool), made, agreed


def test_a_unit_of_one_rank_is_fetched_without_a_word() -> None:
    with units(device_pages=2) as (it, made, agreed):
        assert not it.gathers(1) and not it.fetched(1) and not it.live(1) and not it.movable(1)
        it.start_fetch(1, agreed=False)
        assert it.fetched(1) and not it.live(1) and it.movable(1) and agreed.asked == []
        made.stores[1].finish_fetch()
        assert it.live(1)
        it.release(1)
        it.evict(1)
        assert not it.fetched(1) and not it.movable(1)


@pytest.mark.parametrize("before", [False, True])
def test_ranks_are_asked_for_a_gather_that_they_have_not_agreed_on(before: bool) -> None:
    with units(double=True) as (it, _, agreed):
        assert it.gathers(1)
        it.start_fetch(1, agreed=before)
        assert agreed.asked == ([] if before else [NeededCollective(Operation.GATHER, 1)])


def test_shards_are_spare_until_they_are_given_up() -> None:
    with units(double=True) as (it, _, agreed):
        it.fetch_shards(1)
        assert it.has_spare_shards(1) and not it.has_spare_shards(2) and agreed.asked == []
        it.evict(1)
        assert not it.has_spare_shards(1)


def test_what_does_not_fit_has_changed_nothing() -> None:
    with units(device_pages=1) as (it, _, _):
        it.start_fetch(1, agreed=False)
        with pytest.raises(CapacityError):
            it.start_fetch(2, agreed=False)
        assert it.fetched(1) and not it.fetched(2)


def test_updates_and_gradients_are_asked_of_those_who_know() -> None:
    with units() as (it, _, _):
        assert [it.update_pending(unit) for unit in (1, 2)] == [False, True]
        assert [it.reclaim(wait) for wait in (False, True)] == [False, True]
