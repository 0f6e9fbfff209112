"""The clock over a plan and a trace, tick by tick."""

from __future__ import annotations

import pytest

from lightning_ptm.planning.course import Course
from lightning_ptm.planning.plan import Plan, Task
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
    course = Course()
    course.begin(plan(7, 8), None, begins_again=False)
    assert (course.tick, course.now, course.followed) == (0, 0, False)
    assert fetched(course.step(7, F)) == [0] and fetched(course.last_tasks()) == []
    assert fetched(course.step(8, F)) == [1]
    assert (course.tick, course.now, course.followed, course.repeated) == (2, 1, True, False)
    assert fetched(course.last_tasks()) == [2]
    course.step(7, F)
    assert not course.followed and fetched(course.last_tasks()) == []  # it went on


@pytest.mark.parametrize("other", [(9, F), (7, B)])
def test_whoever_has_left_the_order_does_not_come_back(other: tuple[int, Phase]) -> None:
    course = Course()
    course.begin(plan(7, 8), trace(7, 8), begins_again=False)
    assert fetched(course.step(*other)) == []
    assert fetched(course.step(8, F)) == []
    assert course.tick == 2 and not course.followed and not course.repeated


def test_a_trace_may_be_repeated_where_the_plan_is_another_ranks() -> None:
    course = Course()
    course.begin(plan(7, 8), trace(8, 7), begins_again=False)
    course.step(8, F)
    course.step(7, F)
    assert course.repeated and not course.followed


@pytest.mark.parametrize("again", [False, True])
def test_another_round_begins_at_the_second_tick(again: bool) -> None:
    course = Course()
    course.begin(plan(0, 7, 8), None, begins_again=again)
    for unit in (0, 7):
        course.step(unit, F)
    assert not course.goes_round(7, F)  # before the end
    course.step(8, F)
    assert not course.goes_round(8, F) and course.goes_round(7, F) is again
    if again:
        assert fetched(course.first_tasks()) == [0]
        course.go_round()
        assert fetched(course.step(7, F)) == [1] and course.now == 1


def test_a_trace_goes_round_where_the_plan_was_left() -> None:
    course = Course()
    course.begin(plan(0, 8, 7), trace(0, 7, 8), begins_again=True)
    for unit in (0, 7, 8):
        course.step(unit, F)
    assert course.goes_round(7, F) and fetched(course.first_tasks()) == []


def test_the_next_use_is_counted_on_into_the_next_iteration() -> None:
    course = Course()
    assert course.next_use(5) == 5
    course.begin((Plan((), 3), trace(1, 2, 1, live=(0,))), None, begins_again=False)
    course.step(1, F)
    course.step(2, F)
    assert [course.next_use(unit) for unit in (0, 1, 2, 9)] == [2, 2, 3 + 1, 3 + 3]


def test_what_is_over_is_forgotten_but_its_ticks() -> None:
    course = Course()
    course.begin(plan(7), trace(7), begins_again=True)
    course.step(7, F)
    course.forget()
    assert course.tick == 1 and not course.followed and not course.repeated and not course.goes_round(7, F)
    assert fetched(course.last_tasks()) == [] and course.next_use(4) == 4
