"""Which parameters can be read, over stores of pages of RAM whose parameters close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from small_parts import Model, parts

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.fetching.guard_policy import GuardPolicy
from lightning_ptm.terms import Phase, Tier

F, B = Phase.FORWARD, Phase.BACKWARD


class Driven:
    def __init__(self, made: Any) -> None:
        self.made = made
        self.in_use: set[int] = set()
        self.it = GuardPolicy(made.stores, self.in_use.__contains__)

    def is_open(self) -> list[bool]:
        """Of each unit."""
        return [self._can_be_read(part) for part in self.made.module.parts]

    @staticmethod
    def _can_be_read(part: Any) -> bool:
        try:
            part.weight.sum()
        except UsageError:
            return False
        return True


@contextmanager
def driven(**settings: Any) -> Iterator[Driven]:
    with parts(Model(2), home=Tier.DEVICE, closes=True, **settings) as made:
        for store in made.stores:
            store.close()
        yield Driven(made)


def test_parameters_are_open_from_the_first_computation_to_the_end_of_the_last() -> None:
    with driven() as its:
        assert its.is_open() == [False, False] and not its.it.computing
        its.it.computation_begins(F)
        its.it.computation_begins(B)
        its.it.computation_ends(B)
        assert its.is_open() == [True, True] and its.it.computing
        its.in_use.add(2)
        its.it.computation_ends(F)
        assert its.is_open() == [False, True] and not its.it.computing


def test_passes_that_are_over_are_counted_in_an_iteration() -> None:
    with driven() as its:
        for phase in (F, B):
            its.it.computation_begins(phase)
        for _ in range(2):  # the second never began
            its.it.computation_ends(B)
        its.it.computation_ends(F)
        assert its.it.passes == 1
        its.it.begin_iteration()
        assert its.it.passes == 0


def test_late_parameters_open_once_somebody_has_waited_for_their_update() -> None:
    with driven(late=(1,)) as its:
        its.it.waited(its.made.stores[1])
        assert its.is_open() == [False, False]  # nothing computes
        its.it.computation_begins(F)
        assert its.is_open() == [True, True]
        its.it.updates_begin()
        assert its.is_open() == [False, True] and its.it.waited_for == set()
        its.it.computation_begins(B)
        assert its.is_open() == [False, True]
        its.it.waited(its.made.stores[1])
        assert its.is_open() == [True, True] and its.it.waited_for == {1}
        its.in_use.add(1)
        its.it.updates_begin()
        assert its.is_open() == [True, True]
        its.it.begin_iteration()
        assert its.it.waited_for == set()


def test_a_failed_iteration_leaves_nothing_open() -> None:
    with driven() as its:
        its.it.computation_begins(B)
        its.it.waited(its.made.stores[1])
        its.in_use.add(1)
        its.it.abandon()
        assert its.is_open() == [False, False] and not its.it.computing and its.it.waited_for == set()
        its.it.computation_ends(B)
        assert its.it.passes == 0
