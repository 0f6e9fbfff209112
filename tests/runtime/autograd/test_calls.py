"""The table of calls: every state with every event, and calls of several micro-batches at once."""

from __future__ import annotations

import itertools

import pytest

from lightning_ptm.runtime.autograd.calls import Action, CallEvent, Calls, State, step

R, H, C, F, K, E = State.RESTING, State.HELD, State.COMPUTING, State.FREED, State.KEPT, State.ENDED

SIMPLE = {
    # state: by event OUTPUT, RECOMPUTE, PASS_ENDS: following state and actions
    R: [(C, "ENTER"), (H, "HOLD"), (R, "")],
    H: [(K, "ENTER"), (H, ""), (H, "")],
    C: [(C, ""), (K, ""), (E, "END")],
    F: [(F, ""), (K, "HOLD"), (E, "END")],
    K: [(K, ""), (K, ""), (E, "END")],
    E: [(E, ""), (E, "HOLD"), (E, "")],
}


@pytest.mark.parametrize("state", list(State))
def test_events_that_ask_for_no_counts(state: State) -> None:
    for event, (following, actions) in zip(
        (CallEvent.OUTPUT, CallEvent.RECOMPUTE, CallEvent.PASS_ENDS), SIMPLE[state], strict=True
    ):
        for complete, open_calls, blind_calls in itertools.product((False, True), repeat=3):
            found = step(state, event, complete=complete, open_calls=open_calls, blind_calls=blind_calls)
            assert found == (following, tuple(map(Action.__getitem__, actions.split()))), (state, event)


@pytest.mark.parametrize("open_calls", [False, True])
@pytest.mark.parametrize("blind_calls", [False, True])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("event", [CallEvent.GRADIENT, CallEvent.INPUTS])
@pytest.mark.parametrize("state", list(State))
def test_progress(state: State, event: CallEvent, complete: bool, open_calls: bool, blind_calls: bool) -> None:
    following, actions = step(state, event, complete=complete, open_calls=open_calls, blind_calls=blind_calls)
    if state is E:
        assert (following, actions) == (E, (Action.REFUSE,) if event is CallEvent.GRADIENT else ())
        return
    begun = state in (C, F, K) or event is CallEvent.GRADIENT
    ended = begun and complete and not open_calls and not blind_calls
    assert (following is E) == (Action.END in actions) == ended
    # The lease of a unit that waits for others is given back, but where a recomputed forward needs it.
    waits = state is C and not ended and (complete or (event is CallEvent.INPUTS and not open_calls))
    assert (Action.LEAVE in actions) == waits
    assert not {Action.ENTER, Action.HOLD, Action.REFUSE} & set(actions)
    if not ended:
        after = {R: F, H: K} if event is CallEvent.GRADIENT else {}
        assert following is (F if waits else after.get(state, state))


@pytest.mark.parametrize("state", list(State))
def test_one_gradient_of_many_is_counted_where_nothing_follows(state: State) -> None:
    for due in (0, 1, 2, 3):
        calls = Calls(2, lambda unit: 0, lambda call: True)
        calls._units[1].state, calls._units[1].missing = state, due
        counted = calls.count_if_idle(1)
        assert counted == (due > 1 and state in (C, F, K))
        assert (calls.state(1), calls._units[1].missing) == (state, due - counted)
        if counted:  # then this would have done the same
            calls._units[1].missing = due
            assert calls.gradient(1) == () and (calls.state(1), calls._units[1].missing) == (state, due - 1)


class Table:
    """Three units of two parameters; `passing` are the calls of the pass in progress."""

    def __init__(self) -> None:
        self.passing: set[int] = set()
        self.calls = Calls(3, lambda unit: 2, self.passing.__contains__)

    def begin(self, *passing: int) -> None:
        self.passing.clear()
        self.passing.update(passing)
        self.calls.begin_pass()
        assert self.calls.output(0) == (Action.ENTER,)

    def end(self) -> list[int]:
        return [unit for unit, actions in self.calls.end_pass() if Action.END in actions]

    def backward(self, unit: int, call: int) -> list[Action]:
        """All events of a call whose unit is used once; returns all actions."""
        actions = [*self.calls.output(unit), *self.calls.gradient(unit), *self.calls.gradient(unit)]
        return [*actions, *self.calls.inputs(unit, call)]


WHOLE = [Action.ENTER, Action.LEAVE, Action.END]


def test_a_unit_ends_before_a_later_micro_batch_has_come_back() -> None:
    table = Table()
    first, second = table.calls.called(1), table.calls.called(1)
    table.begin(first)
    assert table.backward(1, first) == WHOLE
    third = table.calls.called(1)
    assert table.end() == [0]
    for call in (second, third):
        table.begin(call)
        assert table.backward(1, call) == WHOLE
        assert table.end() == [0]


def test_all_calls_of_one_micro_batch_are_waited_for() -> None:
    table = Table()
    first, second, other = (table.calls.called(1) for _ in range(3))
    table.begin(first, second)
    assert table.backward(1, second) == [Action.ENTER, Action.LEAVE]
    assert table.calls.inputs(1, other) == ()  # another micro-batch's, which shares an input with this one
    assert table.calls.inputs(1, first) == (Action.END,)


def test_inputs_that_micro_batches_share_come_once_for_each() -> None:
    table = Table()
    first, second = table.calls.called(1), table.calls.called(1)
    table.begin(first)
    assert table.calls.inputs(1, second) == ()
    assert table.backward(1, first) == WHOLE
    table.begin(second)
    assert table.calls.output(1) == (Action.ENTER,)
    assert [*table.calls.gradient(1), *table.calls.gradient(1)] == [Action.LEAVE]
    assert table.calls.inputs(1, second) == (Action.END,)


def test_the_same_graph_twice() -> None:
    table = Table()
    call = table.calls.called(1)
    for _ in range(2):
        table.begin(call)
        assert table.calls.output(1) == (Action.ENTER,)
        assert [*table.calls.gradient(1), *table.calls.gradient(1)] == [Action.LEAVE]  # its input is waited for again
        assert table.calls.inputs(1, call) == (Action.END,)


def test_a_parameter_without_a_gradient() -> None:
    table = Table()
    call = table.calls.called(1)
    table.begin(call)
    assert [*table.calls.output(1), *table.calls.gradient(1)] == [Action.ENTER]
    assert table.calls.inputs(1, call) == (Action.LEAVE,)
    assert table.end() == [1, 0]
    assert table.calls.state(1) is State.ENDED


def test_a_recomputed_unit_stays_until_it_ends() -> None:
    table = Table()
    outer, inner = table.calls.called(1), table.calls.called(2)
    table.begin(outer, inner)
    assert table.calls.output(1) == (Action.ENTER,)
    assert table.calls.recompute(1) == ()
    assert table.calls.recompute(2) == (Action.HOLD,)
    assert [*table.calls.gradient(1), *table.calls.gradient(1)] == []
    assert table.calls.inputs(1, outer) == (Action.END,)
    assert table.backward(2, inner) == [Action.ENTER, Action.END]


def test_a_recomputation_of_an_earlier_pass_holds_nothing_in_the_next() -> None:
    table = Table()
    first, second = table.calls.called(1), table.calls.called(1)
    table.begin(first)
    table.calls.recompute(1)
    assert table.backward(1, first) == [Action.ENTER, Action.END]
    table.end()
    table.begin(second)
    assert table.backward(1, second) == WHOLE


def test_a_reentrant_checkpoint_is_computed_again_call_by_call() -> None:
    table = Table()
    table.calls.called_blind(1)
    table.calls.called_blind(1)
    table.begin()
    assert table.calls.recompute(1) == (Action.HOLD,)
    table.calls.blind_call_recomputed(1)
    call = table.calls.called(1)
    assert table.backward(1, call) == [Action.ENTER]
    table.calls.recompute(1)
    table.calls.blind_call_recomputed(1)
    call = table.calls.called(1)
    assert table.backward(1, call) == [Action.END]


def test_what_ends_a_unit_is_known_before_it_comes() -> None:
    table = Table()
    first, second = table.calls.called(1), table.calls.called(1)
    table.begin(first, second)
    table.calls.output(1)
    table.calls.gradient(1)
    assert not table.calls.ends_with(1, second)  # a parameter's gradient is to come
    table.calls.gradient(1)
    assert not table.calls.ends_with(1, second)  # another call's inputs
    assert not table.calls.ends_with(0, second) and not table.calls.ends_with(2, second)
    table.calls.inputs(1, second)
    assert table.calls.ends_with(1, first) and table.calls.state(1) is not State.ENDED
    assert table.calls.inputs(1, first) == (Action.END,)
    assert not table.calls.ends_with(1, first)


def test_a_unit_pauses_between_two_of_its_calls() -> None:
    table = Table()
    first, second = table.calls.called(1), table.calls.called(1)
    table.begin(first, second)
    assert not table.calls.pauses_with(1, second)  # its backward has not begun
    table.calls.output(1)
    assert table.calls.pauses_with(1, second)
    assert not table.calls.pauses_with(0, second) and not table.calls.pauses_with(2, second)
    table.calls.inputs(1, second)
    assert not table.calls.pauses_with(1, first)  # no other call is open
    table.calls.recompute(1)
    assert not table.calls.pauses_with(1, second)  # saved tensors refer to its pages


def test_each_call_of_a_frozen_unit_has_a_backward_of_its_own() -> None:
    calls = Calls(2, lambda unit: 0, lambda call: True)
    first, second = calls.called(1), calls.called(1)
    calls.begin_pass()
    assert calls.output(1) == (Action.ENTER,)
    assert calls.inputs(1, second) == (Action.LEAVE,)
    assert calls.output(1) == (Action.ENTER,)
    assert calls.output(1) == ()  # of another output of the same call
    assert calls.inputs(1, first) == (Action.END,)
    assert calls.output(1) == ()


def test_a_gradient_behind_the_end_is_refused() -> None:
    table = Table()
    call = table.calls.called(1)
    table.begin(call)
    table.backward(1, call)
    assert table.calls.gradient(1) == (Action.REFUSE,)


def test_forgotten_calls_are_waited_for_by_nobody() -> None:
    table = Table()
    lost = table.calls.called(1)
    table.calls.called_blind(1)
    table.calls.forget()
    call = table.calls.called(1)
    table.begin(lost, call)
    assert table.calls.inputs(1, lost) == ()
    assert table.backward(1, call) == WHOLE


def test_the_root_ends_with_the_pass() -> None:
    table = Table()
    table.begin()
    assert [*table.calls.gradient(0), *table.calls.gradient(0)] == []
    assert table.calls.output(0) == ()
    assert table.end() == [0]
