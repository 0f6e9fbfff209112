"""How far each unit is in the backward pass in progress, as a table: events in, actions out. Imports no torch.

Owns the calls whose backward is still to come, by unit and micro-batch, and the state of each unit in the pass. Who turns
autograd's hooks into these events is hooks.py; who acts is the executor, for leases, and the engine, for gradients.

How the end of a unit's backward is known: all its parameters that are trained have got their gradients, and the gradients
of the inputs of all its calls in the same micro-batch have been computed (a frozen weight may be needed for an input's
gradient after the last parameter's). What never completes (an unused parameter) is ended with the whole pass. Under a
reentrant checkpoint a unit's forward runs without gradients first: its backward has not ended before each such call has
been recomputed, and which micro-batch a call is of cannot be told, so all of them are waited for.

I1: a unit is ended at most once in a pass, and what follows changes nothing but the leases of a recomputed forward.
I2: calls of other micro-batches, whose backward comes in another pass, are never waited for.
I3: the root computes before and after all others: it ends with the pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


class State(enum.Enum):
    """Of a unit, in the pass in progress."""

    __hash__ = object.__hash__  # Enum's own is a call of Python's

    RESTING = "resting"
    """Nothing of it has been computed."""
    HELD = "held"
    """Its forward was recomputed, and its backward has not begun."""
    COMPUTING = "computing"
    """Its backward has begun, and leases it."""
    FREED = "freed"
    """Its backward has begun, and leases it no longer, or not yet: who reads it fetches it."""
    KEPT = "kept"
    """Its backward has begun, and it stays to the end of it: what a recomputed forward saves is not named but kept."""
    ENDED = "ended"


class CallEvent(enum.Enum):
    """What autograd tells of a unit."""

    __hash__ = object.__hash__

    OUTPUT = "a gradient of an output has arrived"
    RECOMPUTE = "its forward is about to be computed again"
    GRADIENT = "a parameter has got its gradient"
    INPUTS = "the gradients of a call's inputs have been computed"
    PASS_ENDS = "the pass is over"


class Action(enum.Enum):
    """What has to be done, in this order."""

    ENTER = "a tick: the backward leases it"
    HOLD = "it is held until it ends"
    LEAVE = "the backward gives its lease back"
    END = "its gradients are complete: all leases of the pass are given back"
    REFUSE = "a gradient has arrived behind its end"


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
"""Before it is asked whether the unit's backward has ended (`step`)."""

_PROGRESS = (CallEvent.GRADIENT, CallEvent.INPUTS)
_BEGUN = (State.COMPUTING, State.FREED, State.KEPT)


def step(
    state: State, event: CallEvent, *, complete: bool = False, open_calls: bool = False, blind_calls: bool = False
) -> tuple[State, tuple[Action, ...]]:
    """The state behind an event, and what to do.

    Args:
        complete: all trained parameters have got their gradients, this event's included.
        open_calls: of some call of this micro-batch, the gradients of the inputs are still to come.
        blind_calls: a reentrant checkpoint may still compute a call again.
    """
    following, actions = _NEXT[state, event]
    if event not in _PROGRESS or following not in _BEGUN:
        return following, actions
    if complete and not open_calls and not blind_calls:
        return State.ENDED, (*actions, Action.END)
    # An input that other units use too (an encoder's output) has its whole gradient only when they are done, and a parameter
    # may get no gradient at all: the pages are not held for these. A late reader fetches again.
    if following is State.COMPUTING and (complete or (event is CallEvent.INPUTS and not open_calls)):
        return State.FREED, (*actions, Action.LEAVE)
    return following, actions


@dataclass(slots=True)
class _Unit:
    """One unit: its state and counts in the pass in progress, and its calls of all micro-batches."""

    state: State = State.RESTING
    due: int = 0
    """Trained parameters whose gradient is still to come in this pass."""
    calls: dict[int, bool] = field(default_factory=dict)
    """Forward calls by number, of all micro-batches: whether the gradients of the inputs have come in this pass."""
    passed: set[int] = field(default_factory=set)
    """Of these, those that have been seen to be of this pass."""
    blind_calls: int = 0
    """Forward calls without gradients, which a reentrant checkpoint may recompute, in each pass anew."""
    again: int = 0
    """Of these, those that were recomputed in this pass."""


class Calls:
    """The table of one engine.

    Args:
        count: of units; unit 0 is the root.
        trained: how many parameters of a unit are trained, now: some may be frozen and unfrozen in a run.
        takes_part: whether the backward of a call, by its number, belongs to the pass in progress. Of one inside of another
            (a reentrant checkpoint's), that one may be all that is known of: what was said before counts on.
    """

    def __init__(self, count: int, trained: Callable[[int], int], takes_part: Callable[[int], bool]) -> None:
        self._trained = trained
        self._takes_part = takes_part
        self._units = [_Unit() for _ in range(count)]
        self._number = 0

    def state(self, unit: int) -> State:
        """How far `unit` is."""
        return self._units[unit].state

    # -- forward ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Calls whose backward has not come will have none."""
        self._units = [_Unit() for _ in self._units]

    def called(self, unit: int) -> int:
        """A forward whose inputs want gradients; returns the call's number."""
        self._number += 1
        self._units[unit].calls[self._number] = False
        return self._number

    def called_blind(self, unit: int) -> None:
        """A forward without gradients."""
        self._units[unit].blind_calls += 1

    def called_again(self, unit: int) -> None:
        """A reentrant checkpoint computes a blind call again. Each has a backward of its own, with gradients for all."""
        entry = self._units[unit]
        if entry.again:
            entry.due += self._trained(unit)
        entry.again += 1

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A backward pass begins: no unit has come to it."""
        for unit, entry in enumerate(self._units):
            entry.state, entry.due, entry.again = State.RESTING, self._trained(unit), 0
            entry.calls = dict.fromkeys(entry.calls, False)
            entry.passed.clear()

    def output(self, unit: int) -> tuple[Action, ...]:
        """A gradient of an output of a call has arrived."""
        entry = self._units[unit]
        entry.passed |= {call for call in entry.calls if call not in entry.passed and self._takes_part(call)}
        return self._step(unit, CallEvent.OUTPUT)

    def recompute(self, unit: int) -> tuple[Action, ...]:
        """The unit's forward is about to be computed again."""
        return self._step(unit, CallEvent.RECOMPUTE)

    def one_of_many(self, unit: int) -> bool:
        """Whether a trained parameter has got its gradient where others are still to come and the unit's backward has begun:
        nothing follows then, and it is counted. Else nothing has changed, and `gradient` is to be called."""
        entry = self._units[unit]
        if entry.due <= 1 or entry.state not in _BEGUN:
            return False
        entry.due -= 1
        return True

    def gradient(self, unit: int) -> tuple[Action, ...]:
        """A trained parameter has got its gradient."""
        self._units[unit].due -= 1
        return self._step(unit, CallEvent.GRADIENT)

    def inputs(self, unit: int, call: int) -> tuple[Action, ...]:
        """The gradients of a call's inputs have been computed; of those that other micro-batches have, too, in part."""
        entry = self._units[unit]
        if call not in entry.calls or not self._in_this_pass(entry, call):
            return ()
        entry.calls[call] = True
        return self._step(unit, CallEvent.INPUTS)

    def ends_with(self, unit: int, call: int) -> bool:
        """Whether the unit's backward has ended when the gradients of a call's inputs come. Changes nothing."""
        entry = self._units[unit]
        if unit == 0 or call not in entry.calls or not self._in_this_pass(entry, call):
            return False
        return Action.END in self._next(entry, CallEvent.INPUTS, besides=call)[1]

    def end_pass(self) -> Iterable[tuple[int, tuple[Action, ...]]]:
        """The pass is over: what each unit, the last one first, still has to do. To be acted on one by one."""
        for unit in reversed(range(len(self._units))):
            yield unit, self._step(unit, CallEvent.PASS_ENDS)

    def _step(self, unit: int, event: CallEvent) -> tuple[Action, ...]:
        entry = self._units[unit]
        if unit == 0 or event not in _PROGRESS:  # I3
            entry.state, actions = _NEXT[entry.state, event]
            return actions
        entry.state, actions = self._next(entry, event)
        return actions

    def _next(self, entry: _Unit, event: CallEvent, *, besides: int | None = None) -> tuple[State, tuple[Action, ...]]:
        """As `step`; a call `besides` the open ones is taken for done."""
        still_open = (call for call, done in entry.calls.items() if not done and call != besides)
        return step(
            entry.state,
            event,
            complete=entry.due == 0,
            open_calls=any(self._in_this_pass(entry, call) for call in still_open),
            blind_calls=entry.blind_calls > entry.again,
        )

    def _in_this_pass(self, entry: _Unit, call: int) -> bool:
        return entry.again > 0 or call in entry.passed or self._takes_part(call)
