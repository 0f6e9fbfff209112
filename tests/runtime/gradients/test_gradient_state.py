"""The state table of a gradient: every pair of a state and an event."""

from __future__ import annotations

import pytest

from lightning_ptm.errors import InternalError
from lightning_ptm.runtime.gradients.state import (
    COLLECTED,
    IN_FLIGHT,
    SUMS,
    GradEvent,
    GradientRecord,
    GradientState,
)

REACHED: dict[GradientState, tuple[GradEvent, ...]] = {
    GradientState.EMPTY: (),
    GradientState.REDUCING: (GradEvent.REDUCE,),
    GradientState.IN_PAGES: (GradEvent.ADD,),
    GradientState.ADDING: (GradEvent.ADD, GradEvent.REDUCE),
    GradientState.HANDED: (GradEvent.ADD, GradEvent.HAND),
    GradientState.USED: (GradEvent.ADD, GradEvent.HAND, GradEvent.USE),
    GradientState.STEPPED: (GradEvent.ADD, GradEvent.HAND, GradEvent.KEEP),
}
"""Events that lead to each state."""

LEGAL: dict[GradientState, dict[GradEvent, GradientState]] = {
    GradientState.EMPTY: {
        GradEvent.PASS_BEGINS: GradientState.EMPTY,
        GradEvent.ADD: GradientState.IN_PAGES,
        GradEvent.REDUCE: GradientState.REDUCING,
        GradEvent.HAND: GradientState.HANDED,
        GradEvent.FORGET: GradientState.EMPTY,
    },
    GradientState.REDUCING: {
        GradEvent.PASS_BEGINS: GradientState.REDUCING,
        GradEvent.REDUCED: GradientState.IN_PAGES,
    },
    GradientState.IN_PAGES: {
        GradEvent.PASS_BEGINS: GradientState.IN_PAGES,
        GradEvent.ADD: GradientState.IN_PAGES,
        GradEvent.REDUCE: GradientState.ADDING,
        GradEvent.HAND: GradientState.HANDED,
        GradEvent.FORGET: GradientState.EMPTY,
    },
    GradientState.ADDING: {
        GradEvent.PASS_BEGINS: GradientState.ADDING,
        GradEvent.REDUCED: GradientState.IN_PAGES,
    },
    GradientState.HANDED: {
        GradEvent.PASS_BEGINS: GradientState.HANDED,
        GradEvent.USE: GradientState.USED,
        GradEvent.KEEP: GradientState.STEPPED,
        GradEvent.GIVE_UP: GradientState.EMPTY,
        GradEvent.FORGET: GradientState.HANDED,
    },
    GradientState.USED: {GradEvent.PASS_BEGINS: GradientState.EMPTY, GradEvent.FORGET: GradientState.EMPTY},
    GradientState.STEPPED: {
        GradEvent.PASS_BEGINS: GradientState.STEPPED,
        GradEvent.ADD: GradientState.IN_PAGES,
        GradEvent.REDUCE: GradientState.ADDING,
        GradEvent.HAND: GradientState.HANDED,
        GradEvent.FORGET: GradientState.EMPTY,
    },
}


def reached(state: GradientState) -> GradientRecord:
    """A gradient of the first of three parameters in `state`."""
    it = GradientRecord("flat 7", 3)
    for event in REACHED[state]:
        it.send(event, (True, False, False) if event in (GradEvent.ADD, GradEvent.REDUCE) else None)
    assert it.state is state
    return it


@pytest.mark.parametrize("event", GradEvent)
@pytest.mark.parametrize("state", GradientState)
def test_every_event_in_every_state(state: GradientState, event: GradEvent) -> None:
    it = reached(state)
    before = it.present
    following = LEGAL[state].get(event)
    if following is None:
        with pytest.raises(InternalError, match=f"flat 7 is in state {state.name} .* event {event.name} .* is illegal"):
            it.send(event, (False, True, False))
        assert (it.state, it.present) == (state, before)
        return
    it.send(event)
    assert it.state is following
    if following is GradientState.EMPTY:
        assert it.present == (False, False, False)
    else:
        assert it.present == before


def test_what_is_added_is_beside_what_is_there_and_what_is_handed_from_grad_is_all() -> None:
    it = reached(GradientState.IN_PAGES)
    it.send(GradEvent.ADD, (False, True, False))
    assert it.present == (True, True, False)
    it.send(GradEvent.REDUCE, (False, False, True))
    it.send(GradEvent.REDUCED)
    assert it.present == (True, True, True)
    it = reached(GradientState.STEPPED)  # as of a gradient that has stayed in `.grad`, where its user has removed it
    it.send(GradEvent.HAND, (False, True, False))
    assert it.present == (False, True, False)


@pytest.mark.parametrize("state", GradientState)
def test_one_gradient_is_forgotten_and_with_the_last_all(state: GradientState) -> None:
    it = reached(state)
    if state in IN_FLIGHT:
        with pytest.raises(InternalError, match="illegal"):
            it.forget_one(0)
        assert it.state is state and any(it.present)
        return
    it.forget_one(0)
    assert it.state is (state if state is GradientState.HANDED else GradientState.EMPTY)


@pytest.mark.parametrize("state", [GradientState.IN_PAGES, GradientState.STEPPED])
def test_the_others_stay(state: GradientState) -> None:
    it = reached(GradientState.IN_PAGES)
    it.send(GradEvent.ADD, (True, True, False))
    if state is GradientState.STEPPED:
        it.send(GradEvent.HAND)
        it.send(GradEvent.KEEP)
    it.forget_one(0)
    assert it.state is state and it.present == (False, True, False)


@pytest.mark.parametrize("event", [GradEvent.REDUCE, GradEvent.HAND])
def test_one_of_several_is_not_forgotten_in_flight_and_when_it_is_handed(event: GradEvent) -> None:
    it = reached(GradientState.IN_PAGES)
    it.send(GradEvent.ADD, (False, True, False))
    it.send(event)
    with pytest.raises(InternalError, match="one gradient of flat 7 is forgotten in state"):
        it.forget_one(0)
    assert it.present == (True, True, False)


def test_groups_of_states() -> None:
    assert set(GradientState) - COLLECTED == {GradientState.EMPTY, GradientState.HANDED, GradientState.USED}
    assert {GradientState.IN_PAGES, GradientState.STEPPED} == SUMS - IN_FLIGHT
    assert {GradientState.ADDING} == SUMS & IN_FLIGHT
