"""The state table of units in the backward pass in progress: events in, actions out. Imports no torch.

Owns the calls whose backward is still to come, by unit and micro-batch, and the state of each unit in the pass.
hooks.py turns autograd's hooks into these events. The executor carries out the actions on references, the engine those on
gradients.

When the backward of a unit has ended: all its trained parameters have their gradients, and the gradients of the inputs
of all its calls in the same micro-batch have been computed. (A frozen weight may be needed for an input's gradient
after the last parameter's. hooks.py says for which inputs a call does not wait.) A unit that never completes, because of an
unused parameter, ends with the whole pass.
Under a reentrant checkpoint the forward of a unit runs first inside an autograd Function, without gradients: its backward
has not ended before each such call has been recomputed. The micro-batch of such a call is unknown, so all of them are waited
for.

I1: a unit ends at most once in a pass; later events change only the references of a recomputed forward.
I2: calls of other micro-batches, whose backward comes in another pass, are never waited for.
I3: the root computes before and after all other units, so it ends with the pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


class State(enum.Enum):
    """State of a unit in the pass in progress."""

    __hash__ = object.__hash__  # Enum's own is a call of Python's

    RESTING = "resting"
    """Nothing of the unit has been computed."""
    HELD = "held"
    """The unit's forward was recomputed, and its backward has not begun."""
    COMPUTING = "computing"
    """The unit's backward has begun and has a reference on the unit."""
    FREED = "freed"
    """The unit's backward has begun and has given up its reference, or taken none yet: a reader fetches the unit again."""
    KEPT = "kept"
    """The unit's backward has begun, and the unit stays gathered until it ends: tensors saved by a recomputed forward
    are not packed by name but refer to the pages."""
    ENDED = "ended"


class CallEvent(enum.Enum):
    """Events of a unit that autograd reports."""

    __hash__ = object.__hash__

    OUTPUT = "a gradient of an output has arrived"
    RECOMPUTE = "its forward is about to be computed again"
    GRADIENT = "a parameter has got its gradient"
    INPUTS = "the gradients of a call's inputs have been computed"
    PASS_ENDS = "the pass is over"


class Action(enum.Enum):
    """Consequences of an event, carried out in the order given."""

    ENTER = "a tick: the backward takes a reference"
    HOLD = "it is held until it ends"
    LEAVE = "the backward gives up its reference"
    END = "its gradients are complete: all references of the pass are given up"
    REFUSE = "a gradient has arrived after its end"


_NEXT: dict[tuple[State, CallEvent], tuple[State, tuple[Action, ...]]] = {
    (State.RESTING, CallEvent.OUTPUT): (State.COMPUTING, (Action.ENTER,)),
    (State.RESTING, CallEvent.RECOMPUTE): (State.HELD, (Action.HOLD,)),
    (State.RESTING, CallEvent.GRADIENT): (State.FREED, ()),
    (State.RESTING, CallEvent.INPUTS): (State.RESTING, ()),
    (State.RESTING, CallEvent.PASS_ENDS): (State.RESTING, ()),
    (State.HELD, CallEvent.OUTPUT): (State.KEPT, (Action.ENTER,)),
    (State.HELD, CallEvent.RECOMPUTE): (State.HELD, ()),
    (State.HELD, CallEvent.GRADIENT): (State.KEPT, ()),
    (State.HELD, CallEvent.INPUTS): (State.HELD, ()),
    (State.HELD, CallEvent.PASS_ENDS): (State.HELD, ()),
    (State.COMPUTING, CallEvent.OUTPUT): (State.COMPUTING, ()),
    (State.COMPUTING, CallEvent.RECOMPUTE): (State.KEPT, ()),
    (State.COMPUTING, CallEvent.GRADIENT): (State.COMPUTING, ()),
    (State.COMPUTING, CallEvent.INPUTS): (State.COMPUTING, ()),
    (State.COMPUTING, CallEvent.PASS_ENDS): (State.ENDED, (Action.END,)),
    (State.FREED, CallEvent.OUTPUT): (State.FREED, ()),
    (State.FREED, CallEvent.RECOMPUTE): (State.KEPT, (Action.HOLD,)),
    (State.FREED, CallEvent.GRADIENT): (State.FREED, ()),
    (State.FREED, CallEvent.INPUTS): (State.FREED, ()),
    (State.FREED, CallEvent.PASS_ENDS): (State.ENDED, (Action.END,)),
    (State.KEPT, CallEvent.OUTPUT): (State.KEPT, ()),
    (State.KEPT, CallEvent.RECOMPUTE): (State.KEPT, ()),
    (State.KEPT, CallEvent.GRADIENT): (State.KEPT, ()),
    (State.KEPT, CallEvent.INPUTS): (State.KEPT, ()),
    (State.KEPT, CallEvent.PASS_ENDS): (State.ENDED, (Action.END,)),
    (State.ENDED, CallEvent.OUTPUT): (State.ENDED, ()),
    (State.ENDED, CallEvent.RECOMPUTE): (State.ENDED, (Action.HOLD,)),
    (State.ENDED, CallEvent.GRADIENT): (State.ENDED, (Action.REFUSE,)),
    (State.ENDED, CallEvent.INPUTS): (State.ENDED, ()),
    (State.ENDED, CallEvent.PASS_ENDS): (State.ENDED, ()),
}
"""Transitions without the check whether the unit's backward has ended; `step` adds it."""

_PROGRESS = (CallEvent.GRADIENT, CallEvent.INPUTS)
_BEGUN = (State.COMPUTING, State.FREED, State.KEPT)


def step(
    state: State, event: CallEvent, *, complete: bool = False, open_calls: bool = False, blind_calls: bool = False
) -> tuple[State, tuple[Action, ...]]:
    """Returns the state after an event, and the actions.

    Args:
        complete: all trained parameters have their gradients, including the one of this event.
        open_calls: for some call of this micro-batch, the gradients of the inputs are still to come.
        blind_calls: a reentrant checkpoint may still recompute a call.
    """
    following, actions = _NEXT[state, event]
    if event not in _PROGRESS or following not in _BEGUN:
        return following, actions
    if complete and not open_calls and not blind_calls:
        return State.ENDED, (*actions, Action.END)
    # An input that other units use too (an encoder's output) has its whole gradient only when these units are done, and
    # a parameter may get no gradient at all: pages are not kept for such cases. A late reader fetches again.
    if following is State.COMPUTING and (complete or (event is CallEvent.INPUTS and not open_calls)):
        return State.FREED, (*actions, Action.LEAVE)
    return following, actions


@dataclass(slots=True)
class _Unit:
    """State and counts of one unit in the pass in progress, and its calls of all micro-batches."""

    state: State = State.RESTING
    missing: int = 0
    """Number of trained parameters whose gradient is still to come in this pass."""
    frozen: bool = False
    """Whether no parameter is trained in this pass: the unit gives its reference up between the backwards of its calls."""
    calls: dict[int, bool] = field(default_factory=dict)
    """Forward calls of all micro-batches by number: whether the gradients of the inputs have come in this pass."""
    in_pass: set[int] = field(default_factory=set)
    """Numbers of the calls that are known to belong to this pass."""
    blind_calls: int = 0
    """Number of forward calls inside an autograd Function, which a reentrant checkpoint may recompute in each pass."""
    recomputed: int = 0
    """Number of blind calls that were recomputed in this pass."""


class Calls:
    """Table of the calls and states of all units of one engine.

    Args:
        count: number of units; unit 0 is the root.
        trained: returns how many parameters of a unit are trained now; parameters may be frozen and unfrozen in a run.
        takes_part: returns whether the backward of a call, by its number, belongs to the pass in progress. In a nested
            pass (a reentrant checkpoint's) the answer concerns the nested pass only, so earlier answers are remembered.
    """

    def __init__(self, count: int, trained: Callable[[int], int], takes_part: Callable[[int], bool]) -> None:
        self._trained = trained
        self._takes_part = takes_part
        self._units = [_Unit() for _ in range(count)]
        self._number = 0

    def state(self, unit: int) -> State:
        """Returns the state of `unit`."""
        return self._units[unit].state

    # -- forward -------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forgets all calls: those whose backward has not come will have none."""
        self._units = [_Unit() for _ in self._units]

    def called(self, unit: int) -> int:
        """Adds a forward call whose inputs require gradients; returns the call's number."""
        self._number += 1
        self._units[unit].calls[self._number] = False
        return self._number

    def called_blind(self, unit: int) -> None:
        """Counts a forward call without gradients, inside an autograd Function."""
        self._units[unit].blind_calls += 1

    def blind_call_recomputed(self, unit: int) -> None:
        """Counts a blind call that a reentrant checkpoint recomputes.

        Each such call has a backward of its own, with gradients for all trained parameters.
        """
        entry = self._units[unit]
        if entry.recomputed:
            entry.missing += self._trained(unit)
        entry.recomputed += 1

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begins a backward pass: every unit is at rest."""
        for unit, entry in enumerate(self._units):
            entry.state, entry.missing, entry.recomputed = State.RESTING, self._trained(unit), 0
            entry.frozen = entry.missing == 0
            entry.calls = dict.fromkeys(entry.calls, False)
            entry.in_pass.clear()

    def output(self, unit: int) -> tuple[Action, ...]:
        """Handles the arrival of a gradient of a call's output."""
        entry = self._units[unit]
        for call in entry.calls:
            if call not in entry.in_pass and self._takes_part(call):
                entry.in_pass.add(call)
        # Another call of it is a tick of its own, which plans can foresee.
        if entry.frozen and entry.state is State.FREED:
            entry.state = State.RESTING
        entry.state, actions = _NEXT[entry.state, CallEvent.OUTPUT]
        return actions

    def recompute(self, unit: int) -> tuple[Action, ...]:
        """Handles the start of a recomputed forward of the unit."""
        entry = self._units[unit]
        entry.state, actions = _NEXT[entry.state, CallEvent.RECOMPUTE]
        return actions

    def count_if_idle(self, unit: int) -> bool:
        """Counts a parameter's gradient if nothing follows from it, and returns whether it did.

        That is so if gradients of other parameters are still to come and the unit's backward has begun. Otherwise
        nothing has changed, and `gradient` must be called.
        """
        entry = self._units[unit]
        if entry.missing <= 1 or entry.state not in _BEGUN:
            return False
        entry.missing -= 1
        return True

    def gradient(self, unit: int) -> tuple[Action, ...]:
        """Handles the arrival of a trained parameter's gradient."""
        self._units[unit].missing -= 1
        return self._progress(unit, CallEvent.GRADIENT)

    def inputs(self, unit: int, call: int) -> tuple[Action, ...]:
        """Handles that the gradients of a call's inputs have been computed.

        An input shared with other micro-batches may have only a part of its gradient.
        """
        entry = self._units[unit]
        if call not in entry.calls or not self._in_this_pass(entry, call):
            return ()
        entry.calls[call] = True
        return self._progress(unit, CallEvent.INPUTS)

    def ends_with(self, unit: int, call: int) -> bool:
        """Whether the unit's backward ends with the gradients of this call's inputs. Changes nothing."""
        entry = self._units[unit]
        if unit == 0 or call not in entry.calls or not self._in_this_pass(entry, call):
            return False
        return Action.END in self._next(entry, CallEvent.INPUTS, ignored=call)[1]

    def pauses_with(self, unit: int, call: int) -> bool:
        """Whether the unit computes nothing between the gradients of this call's inputs and those of an earlier call's
        outputs. Changes nothing."""
        entry = self._units[unit]
        if unit == 0 or entry.state is not State.COMPUTING or not self._in_this_pass(entry, call):
            return False
        return any(each != call and not done and self._in_this_pass(entry, each) for each, done in entry.calls.items())

    def end_pass(self) -> Iterable[tuple[int, tuple[Action, ...]]]:
        """Yields the remaining actions of each unit, the last unit first.

        The actions of each unit must be carried out before the next unit is taken.
        """
        for unit in reversed(range(len(self._units))):
            entry = self._units[unit]
            entry.state, actions = _NEXT[entry.state, CallEvent.PASS_ENDS]
            yield unit, actions

    def _progress(self, unit: int, event: CallEvent) -> tuple[Action, ...]:
        """Advances a unit's state by an event of `_PROGRESS`."""
        entry = self._units[unit]
        entry.state, actions = self._next(entry, event) if unit else _NEXT[entry.state, event]  # I3
        return actions

    def _next(self, entry: _Unit, event: CallEvent, *, ignored: int | None = None) -> tuple[State, tuple[Action, ...]]:
        """Returns the unit's next state and its actions. The call `ignored` counts as done."""
        still_open = (call for call, done in entry.calls.items() if not done and call != ignored)
        return step(
            entry.state,
            event,
            complete=entry.missing == 0,
            open_calls=any(self._in_this_pass(entry, call) for call in still_open),
            blind_calls=entry.blind_calls > entry.recomputed,
        )

    def _in_this_pass(self, entry: _Unit, call: int) -> bool:
        return entry.recomputed > 0 or call in entry.in_pass or self._takes_part(call)
