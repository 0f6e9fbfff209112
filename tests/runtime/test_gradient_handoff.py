"""Which gradients are held back, and where, with a buffering thread that is set by hand."""

from __future__ import annotations

from typing import Any

import pytest
from by_hand_buffering import Buffered, Flat, clocks, contribution

from lightning_ptm.planning.pace import Pace
from lightning_ptm.runtime.updates.gradient_handoff import GradientHandoff

BOUND = 8


class Driven:
    """Two flats of equal size."""

    def __init__(self, *, paced: bool = True, adds: bool = True, in_place: bool = True, **options: Any) -> None:
        self.buffering: Any = Buffered()
        self.clocks = clocks(Flat(in_place=in_place), Flat(in_place=in_place), **options)
        pace = Pace(BOUND, [100, 100]) if paced else None
        self.it = GradientHandoff(self.clocks, self.buffering, pace, adds=adds)

    def came(
        self, place: int, step: int, *, at_once: bool = False, which: tuple[bool, ...] = (True, True)
    ) -> list[str]:
        """What the buffering thread hears of it."""
        self.it.came(place, contribution(step, which), at_once=at_once)
        self.clocks[place].received += 1
        return self.buffering.told()


def settled(driven: Driven) -> None:
    """Passes have been made, which earns none for a while: what comes now is held back."""
    for place in (0, 1):
        driven.came(place, 0, at_once=True)
    driven.buffering.told()
    driven.buffering.done = [1, 1]


def test_without_a_pace_each_begins_at_once() -> None:
    driven = Driven(paced=False)
    assert driven.came(0, 3) == ["offer 0 [3] begin"]
    driven.it.begin([0, 1])
    driven.it.drained()
    assert driven.buffering.told() == [] and driven.clocks[0].held is None


def test_what_is_held_back_is_added_up_here_and_goes_as_one() -> None:
    driven = Driven()
    settled(driven)
    assert driven.came(0, 1) == driven.came(0, 2) == []
    held = driven.clocks[0].held
    assert held is not None and driven.clocks[0].held_steps == 2
    assert [float(each[0]) for each in held.source.tensors()] == [3.0, 3.0]
    driven.it.begin([0, 1])  # the other one waits for nothing
    assert driven.buffering.told() == ["offer 0 [1, 2] begin"] and driven.clocks[0].held is None
    driven.it.begin([0])
    assert driven.buffering.told() == []


def test_what_cannot_be_added_goes_before_and_is_not_begun() -> None:
    driven = Driven()
    settled(driven)
    driven.came(0, 1)
    assert driven.came(0, 2, which=(True, False)) == ["offer 0 [1]"]
    assert driven.clocks[0].held_steps == 1


@pytest.mark.parametrize(
    ("adds", "in_place", "piled"),
    [(False, True, 0), (True, False, 0), (True, True, 1)],
    ids=["not here", "in pages", "there"],
)
def test_a_flats_gradients_wait_in_one_place(adds: bool, in_place: bool, piled: int) -> None:
    driven = Driven(adds=adds, in_place=in_place)
    settled(driven)
    driven.buffering.piles = [piled, piled]
    assert driven.came(0, 1) == ["offer 0 [1]"] and driven.clocks[0].held is None
    driven.it.begin([0])
    assert driven.buffering.told() == ["begin 0"]  # it is there already


def test_nothing_is_held_in_a_warm_up() -> None:
    driven = Driven()
    settled(driven)
    assert driven.came(1, 1, at_once=True) == ["offer 1 [1] begin"]


def test_a_drain_leaves_nothing_to_begin() -> None:
    driven = Driven()
    settled(driven)
    driven.came(0, 1)
    driven.it.drained()
    driven.it.begin([0])
    assert driven.buffering.told() == []


def test_sums_are_followed_by_forecasts_that_reach_far() -> None:
    for reach, followed in ((2, False), (5, True)):
        driven = Driven(reach=reach)
        settled(driven)
        driven.came(0, 1)
        assert driven.it.earlier(0, contribution(2)) is (driven.clocks[0].held if followed else None)
        assert driven.it.earlier(0, contribution(2, (True, False))) is None  # of other parameters
        assert driven.it.earlier(1, contribution(2)) is None  # there is none


def test_a_sum_that_an_update_may_take_is_not_followed() -> None:
    driven = Driven(adds=False, reach=5)
    settled(driven)
    driven.came(0, 1)
    waits = driven.buffering.offered[0][-1]
    assert driven.it.earlier(0, contribution(2)) is waits
    waits.add(contribution(2))  # more than the pace knows to wait: some of them were begun
    assert driven.it.earlier(0, contribution(3)) is None


def test_a_sum_is_followed_when_the_thread_has_come_to_it() -> None:
    driven = Driven(adds=False, reach=5)
    settled(driven)
    driven.came(0, 1)
    driven.buffering.behind = 1

    def comes() -> None:
        driven.buffering.behind = 0

    driven.buffering.while_waiting = comes
    assert driven.it.earlier(0, contribution(2)) is driven.buffering.offered[0][-1]
