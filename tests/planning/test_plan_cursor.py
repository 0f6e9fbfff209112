"""The clock over a plan and a trace, tick by tick."""

from __future__ import annotations

import pytest

from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.plan_cursor import PlanCursor
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.terms import Kind, Operation, Phase

F, B = Phase.FORWARD, Phase.BACKWARD


def trace(*units: int, live: tuple[int, ...] = ()) -> Trace:
    return Trace(tuple(Tick(unit, F, tuple(sorted((unit, *live)))) for unit in units))


def plan(*units: int) -> tuple[Plan, Trace]:
    """A fetch of unit t at each trigger t, the one behind the last tick included."""
    tasks = (Task(Operation.FETCH, index, Kind.FULL, index) for index in range(len(units) + 1))
    return Plan(tuple(tasks), len(units)), trace(*units)


def fetched(tasks: object) -> list[int]:
    return [task.unit for task in tasks]  # type: ignore[attr-defined]


def test_a_plan_is_gone_through_to_its_end_and_what_is_behind_it() -> None:
    plan_cursor = PlanCursor()
    plan_cursor.begin(plan(7, 8), None, may_repeat=False)
    assert (plan_cursor.tick, plan_cursor.now, plan_cursor.followed) == (0, 0, False)
    assert fetched(plan_cursor.step(7, F)) == [0] and fetched(plan_cursor.last_tasks()) == []
    assert fetched(plan_cursor.step(8, F)) == [1]
    assert (plan_cursor.tick, plan_cursor.now, plan_cursor.followed, plan_cursor.repeated) == (2, 1, True, False)
    assert fetched(plan_cursor.last_tasks()) == [2]
    plan_cursor.step(7, F)
    assert not plan_cursor.followed and fetched(plan_cursor.last_tasks()) == []  # it went on


@pytest.mark.parametrize("other", [(9, F), (7, B)])
def test_whoever_has_left_the_order_does_not_come_back(other: tuple[int, Phase]) -> None:
    plan_cursor = PlanCursor()
    plan_cursor.begin(plan(7, 8), trace(7, 8), may_repeat=False)
    assert fetched(plan_cursor.step(*other)) == []
    assert fetched(plan_cursor.step(8, F)) == []
    assert plan_cursor.tick == 2 and not plan_cursor.followed and not plan_cursor.repeated


def test_a_trace_may_be_repeated_where_the_plan_is_another_ranks() -> None:
    plan_cursor = PlanCursor()
    plan_cursor.begin(plan(7, 8), trace(8, 7), may_repeat=False)
    plan_cursor.step(8, F)
    plan_cursor.step(7, F)
    assert plan_cursor.repeated and not plan_cursor.followed


@pytest.mark.parametrize("again", [False, True])
def test_another_round_begins_at_the_second_tick(again: bool) -> None:
    plan_cursor = PlanCursor()
    plan_cursor.begin(plan(0, 7, 8), None, may_repeat=again)
    for unit in (0, 7):
        plan_cursor.step(unit, F)
    assert not plan_cursor.begins_next_round(7, F)  # before the end
    plan_cursor.step(8, F)
    assert not plan_cursor.begins_next_round(8, F) and plan_cursor.begins_next_round(7, F) is again
    if again:
        assert fetched(plan_cursor.first_tasks()) == [0]
        plan_cursor.start_next_round()
        assert fetched(plan_cursor.step(7, F)) == [1] and plan_cursor.now == 1


def test_a_trace_goes_round_where_the_plan_was_left() -> None:
    plan_cursor = PlanCursor()
    plan_cursor.begin(plan(0, 8, 7), trace(0, 7, 8), may_repeat=True)
    for unit in (0, 7, 8):
        plan_cursor.step(unit, F)
    assert plan_cursor.begins_next_round(7, F) and fetched(plan_cursor.first_tasks()) == []


def test_the_next_use_is_counted_on_into_the_next_iteration() -> None:
    plan_cursor = PlanCursor()
    assert plan_cursor.next_use(5) == 5
    plan_cursor.begin((Plan((), 3), trace(1, 2, 1, live=(0,))), None, may_repeat=False)
    plan_cursor.step(1, F)
    plan_cursor.step(2, F)
    assert [plan_cursor.next_use(unit) for unit in (0, 1, 2, 9)] == [2, 2, 3 + 1, 3 + 3]


def test_what_is_over_is_forgotten_but_its_ticks() -> None:
    plan_cursor = PlanCursor()
    plan_cursor.begin(plan(7), trace(7), may_repeat=True)
    plan_cursor.step(7, F)
    plan_cursor.forget()
    assert (
        plan_cursor.tick == 1
        and not plan_cursor.followed
        and not plan_cursor.repeated
        and not plan_cursor.begins_next_round(7, F)
    )
    assert fetched(plan_cursor.last_tasks()) == [] and plan_cursor.next_use(4) == 4
