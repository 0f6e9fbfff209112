"""The state table of a gradient: every pair of a state and an event."""

from __future__ import annotations

import pytest

from lightning_ptm.errors import InternalError
from lightning_ptm.runtime.gradients.state import COLLECTED, IN_FLIGHT, SUMS, Event, GradientState, State

REACHED: dict[State, tuple[Event, ...]] = {
    State.EMPTY: (),
    State.REDUCING: (Event.REDUCE,),
    State.IN_PAGES: (Event.ADD,),
    State.ADDING: (Event.ADD, Event.REDUCE),
    State.HANDED: (Event.ADD, Event.HAND),
    State.USED: (Event.ADD, Event.HAND, Event.USE),
    State.STEPPED: (Event.ADD, Event.HAND, Event.KEEP),
}
"""Events that lead to each state."""

LEGAL: dict[State, dict[Event, State]] = {
    State.EMPTY: {
        Event.PASS_BEGINS: State.EMPTY,
        Event.ADD: State.IN_PAGES,
        Event.REDUCE: State.REDUCING,
        Event.HAND: State.HANDED,
        Event.FORGET: State.EMPTY,
    },
    State.REDUCING: {Event.PASS_BEGINS: State.REDUCING, Event.REDUCED: State.IN_PAGES},
    State.IN_PAGES: {
        Event.PASS_BEGINS: State.IN_PAGES,
        Event.ADD: State.IN_PAGES,
        Event.REDUCE: State.ADDING,
        Event.HAND: State.HANDED,
        Event.FORGET: State.EMPTY,
    },
    State.ADDING: {Event.PASS_BEGINS: State.ADDING, Event.REDUCED: State.IN_PAGES},
    State.HANDED: {
        Event.PASS_BEGINS: State.HANDED,
        Event.USE: State.USED,
        Event.KEEP: State.STEPPED,
        Event.GIVE_UP: State.EMPTY,
        Event.FORGET: State.HANDED,
    },
    State.USED: {Event.PASS_BEGINS: State.EMPTY, Event.FORGET: State.EMPTY},
    State.STEPPED: {
        Event.PASS_BEGINS: State.STEPPED,
        Event.ADD: State.IN_PAGES,
        Event.REDUCE: State.ADDING,
        Event.HAND: State.HANDED,
        Event.FORGET: State.EMPTY,
    },
}


def reached(state: State) -> GradientState:
    """A gradient of the first of three parameters in `state`."""
    it = GradientState("flat 7", 3)
    for event in REACHED[state]:
        it.send(event, (True, False, False) if event in (Event.ADD, Event.REDUCE) else None)
    assert it.now is state
    return it


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state(state: State, event: Event) -> None:
    it = reached(state)
    before = it.present
    following = LEGAL[state].get(event)
    if following is None:
        with pytest.raises(InternalError, match=f"flat 7 is in state {state.name} .* event {event.name} .* is illegal"):
            it.send(event, (False, True, False))
        assert (it.now, it.present) == (state, before)
        return
    it.send(event)
    assert it.now is following
    if following is State.EMPTY:
        assert it.present == (False, False, False)
    else:
        assert it.present == before


def test_what_is_added_is_beside_what_is_there_and_what_is_handed_from_grad_is_all() -> None:
    it = reached(State.IN_PAGES)
    it.send(Event.ADD, (False, True, False))
    assert it.present == (True, True, False)
    it.send(Event.REDUCE, (False, False, True))
    it.send(Event.REDUCED)
    assert it.present == (True, True, True)
    it = reached(State.STEPPED)  # as of a gradient that has stayed in `.grad`, where its user has removed it
    it.send(Event.HAND, (False, True, False))
    assert it.present == (False, True, False)


@pytest.mark.parametrize("state", State)
def test_one_gradient_is_forgotten_and_with_the_last_all(state: State) -> None:
    it = reached(state)
    if state in IN_FLIGHT:
        with pytest.raises(InternalError, match="illegal"):
            it.forget_one(0)
        assert it.now is state and any(it.present)
        return
    it.forget_one(0)
    assert it.now is (state if state is State.HANDED else State.EMPTY)


@pytest.mark.parametrize("state", [State.IN_PAGES, State.STEPPED])
def test_the_others_stay(state: State) -> None:
    it = reached(State.IN_PAGES)
    it.send(Event.ADD, (True, True, False))
    if state is State.STEPPED:
        it.send(Event.HAND)
        it.send(Event.KEEP)
    it.forget_one(0)
    assert it.now is state and it.present == (False, True, False)


@pytest.mark.parametrize("event", [Event.REDUCE, Event.HAND])
def test_one_of_several_is_not_forgotten_in_flight_and_when_it_is_handed(event: Event) -> None:
    it = reached(State.IN_PAGES)
    it.send(Event.ADD, (False, True, False))
    it.send(event)
    with pytest.raises(InternalError, match="one gradient of flat 7 is forgotten in state"):
        it.forget_one(0)
    assert it.present == (True, True, False)


def test_groups_of_states() -> None:
    assert set(State) - COLLECTED == {State.EMPTY, State.HANDED, State.USED}
    assert {State.IN_PAGES, State.STEPPED} == SUMS - IN_FLIGHT
    assert {State.ADDING} == SUMS & IN_FLIGHT
