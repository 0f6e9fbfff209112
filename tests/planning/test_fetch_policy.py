"""Fetches and evictions, decided over numbers of pages: a unit takes one, and its shard, where ranks share it, one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.fetch_policy import Among, FetchPolicy, PlanCursor, UnitRefcounts
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.terms import Kind, Operation, Phase

F, B = Phase.FORWARD, Phase.BACKWARD


class Shelf:
    """Units of a page, and gradients that take the rest of so many pages until somebody wants these back."""

    def __init__(self, pages: int, count: int, *, shared: bool = False) -> None:
        self.pages = self.own = pages
        self.units = [UnitOfAPage(self, unit, shared) for unit in range(count)]
        self.there: list[int] = []
        self.shards: list[int] = []
        self.arrived: set[int] = set()
        self.updating: set[int] = set()
        self.gradients = 0
        self.in_the_middle: set[int] = set()
        self.agreed: list[int] = []

    def put(self, where: list[int], unit: int, among: Among) -> None:
        pages = self.own if among is Among.OWN else self.pages
        if len(self.there) + len(self.shards) + self.gradients >= pages:
            raise CapacityError("no room")
        where.append(unit)

    def reclaim(self, wait: bool) -> bool:
        if wait and self.gradients:
            self.gradients -= 1
            return True
        return False

    def policy(self, by_need: tuple[int, ...] = (), *, one_way: bool = False) -> FetchPolicy:
        pending, agree = self.updating.__contains__, self.agreed.append
        return FetchPolicy(self.units, pending, self.reclaim, agree, by_need, one_way=one_way)


class UnitOfAPage:
    """A unit on a shelf."""

    def __init__(self, shelf: Shelf, unit: int, shared: bool) -> None:
        self._shelf = shelf
        self._unit = unit
        self.sharded = ("flat",) * shared

    @property
    def live(self) -> bool:
        return self._unit in self._shelf.there and self._unit in self._shelf.arrived

    @property
    def fetched(self) -> bool:
        return self._unit in self._shelf.there

    @property
    def movable(self) -> bool:
        return self._unit in self._shelf.there

    @property
    def divides_free_pages(self) -> bool:
        return self._unit in self._shelf.in_the_middle

    @property
    def has_spare_shards(self) -> bool:
        return self._unit in self._shelf.shards

    def start_fetch(
        self, agree: Callable[[], None] | None, frames: Sequence[int] = (), *, among: Among = Among.ANY
    ) -> None:
        assert self._unit not in self._shelf.there
        self._shelf.put(self._shelf.there, self._unit, among)
        if agree is not None:
            agree()

    def fetch_shards(self, frames: Sequence[int] = (), *, among: Among = Among.ANY) -> None:
        self._shelf.put(self._shelf.shards, self._unit, among)

    def release(self) -> None:
        self._shelf.arrived.discard(self._unit)
        if self._unit in self._shelf.there:
            self._shelf.there.remove(self._unit)

    def evict(self) -> None:
        if self._unit in self._shelf.shards:
            self._shelf.shards.remove(self._unit)

    def finish_evictions(self) -> None:
        """None is delayed here."""


class Driven:
    """A policy over a shelf, and what it has told."""

    def __init__(
        self,
        pages: int = 9,
        count: int = 5,
        *,
        by_need: tuple[int, ...] = (),
        shared: bool = False,
        one_way: bool = False,
    ) -> None:
        self.shelf = Shelf(pages, count, shared=shared)
        self.fetching = self.shelf.policy(by_need, one_way=one_way)
        self.framed = False
        """Whether planned fetches have frames."""
        self._log: list[str] = []
        self.computed: list[tuple[int, int]] = []
        self.fetching.on_decision = self._told

    def _told(self, issued: Task) -> None:
        if issued.operation is Operation.COMPUTE:
            self.computed.append((issued.unit, issued.trigger))
            return
        what = "" if issued.kind is Kind.FULL else " shard"
        self._log.append(f"{issued.operation.value} {issued.unit}{what} at {issued.trigger}")

    def told(self) -> list[str]:
        log, self._log = self._log, []
        return log

    def begin(self, text: str = "", *units: int, may_repeat: bool = False) -> None:
        """Begins with a plan for forwards of `units`, or without one: `fetch 1 | release 1, gather 2 |`, tasks by
        trigger."""
        triggers = [[task.split() for task in each.split(",") if task.strip()] for each in text.split("|")]
        tasks = [
            Task(Operation(word), int(unit), Kind(*kind or ["full"]), trigger, (0,) * (self.framed and word == "fetch"))
            for trigger, each in enumerate(triggers)
            for word, unit, *kind in each
        ]
        trace = Trace(tuple(Tick(unit, F, tuple(sorted({0, unit}))) for unit in units))
        made = (Plan(tuple(tasks), len(units)), trace) if units else None
        self.fetching.begin(made, None, may_repeat=may_repeat)

    def call(self, unit: int, phase: Phase = F) -> list[str]:
        """A tick; what was told in it."""
        self.fetching.enter(unit, phase)
        self.fetching.bring(unit)
        self.shelf.arrived.add(unit)
        self.fetching.computes(unit)
        if phase is F:
            self.fetching.refcounts.give_back(unit)
        else:
            self.fetching.refcounts.give_back_backward(unit)
        return self.told()


def test_a_fetch_that_waits_is_dropped_where_its_unit_is_fetched_on_use() -> None:
    it = Driven(one_way=True)
    it.begin("fetch 1, fetch 2 | | release 2", 0, 2, 0)
    it.shelf.updating.add(1)
    assert it.call(0) == ["fetch 1 at 0", "fetch 2 at 0", "fetch 0 at 0"] and it.shelf.there == [0]
    assert it.call(2) == ["fetch 2 at 1"]
    assert it.call(0) == ["release 2 at 2"]
    it.shelf.updating.clear()
    it.fetching.pump()
    assert it.shelf.there == [0, 1]


def test_what_a_plan_has_is_told_with_its_tick() -> None:
    it = Driven()
    it.begin("fetch 0, fetch 1 | release 0, fetch 2 | release 1", 0, 1)
    assert it.call(0) == ["fetch 0 at 0", "fetch 1 at 0"]
    assert it.call(1) == ["release 0 at 1", "fetch 2 at 1"]
    it.fetching.end()
    assert it.told() == ["release 1 at 2"] and it.shelf.there == [2]
    assert (it.fetching.lookups.ahead, it.fetching.misses) == (2, 0)


def test_another_order_leaves_the_plan_for_good() -> None:
    it = Driven()
    it.begin("fetch 0 | fetch 2 | fetch 3 |", 0, 1, 2)
    assert it.call(0) == ["fetch 0 at 0"]
    assert it.call(4) == ["fetch 4 at 1"]
    assert it.call(2) == ["fetch 2 at 2"]  # late
    it.fetching.end()
    assert it.told() == [] and it.fetching.misses == 2


def test_what_is_leased_stays() -> None:
    it = Driven()
    it.begin("fetch 0 | release 0 | release 0", 0, 1)
    it.call(0)
    it.fetching.refcounts.hold(0)
    assert it.call(1) == ["fetch 1 at 1"]
    it.fetching.release_all()
    assert it.shelf.there == [0]
    it.fetching.refcounts.unhold(0)
    it.fetching.end()
    assert it.told() == ["release 0 at 2"] and it.shelf.there == []


def test_a_fetch_that_waits_for_an_update_is_told_once() -> None:
    it = Driven()
    it.shelf.updating.add(1)
    it.begin("fetch 0, fetch 1 | |", 0, 1)
    assert it.call(0) == ["fetch 0 at 0", "fetch 1 at 0"]
    it.fetching.pump()
    assert it.shelf.there == [0]
    it.shelf.updating.clear()
    it.fetching.pump()
    assert it.shelf.there == [0, 1] and it.told() == []
    it.shelf.updating.add(2)
    it.fetching.begin(None, None, may_repeat=False)
    it.fetching.expect([2])
    it.fetching.end()
    it.shelf.updating.clear()
    it.fetching.pump()  # of an iteration that is over
    assert it.shelf.there == [0, 1]


def test_a_fetch_that_has_waited_may_find_no_room() -> None:
    it = Driven(1)
    it.shelf.updating.add(1)
    it.begin("fetch 0, fetch 1 | |", 0, 1)
    it.call(0)
    it.shelf.updating.clear()
    it.fetching.pump()
    assert it.shelf.there == [0] and it.fetching.misses == 1
    assert it.call(1) == ["release 0 at 1", "fetch 1 at 1"]


def test_without_room_the_farthest_next_use_gives_way() -> None:
    it = Driven(2)
    it.begin("| | | | |", 1, 2, 3, 1, 2)
    assert [it.call(1), it.call(2)] == [["fetch 1 at 0"], ["fetch 2 at 1"]]
    assert it.call(3) == ["release 2 at 2", "fetch 3 at 2"]
    assert it.call(1) == []
    assert it.call(2) == ["release 3 at 4", "fetch 2 at 4"]  # in the next iteration, 1 comes before 3


@pytest.mark.parametrize("gradients", [0, 1])
def test_pages_that_are_leaving_anyway_come_before_units(gradients: int) -> None:
    it = Driven(1 + gradients)
    it.begin()
    it.call(1)
    it.shelf.gradients = gradients
    assert it.call(2) == ["fetch 2 at 1"] if gradients else ["release 1 at 1", "fetch 2 at 1"]


def test_spare_shards_go_where_no_unit_can() -> None:
    it = Driven(2, shared=True)
    it.begin("gather 0, fetch 2 parameter | |", 0, 1)
    assert it.call(0) == ["gather 0 at 0", "fetch 2 shard at 0"]
    it.fetching.refcounts.hold(0)
    assert it.call(1) == ["evict 2 shard at 1", "gather 1 at 1"]


def test_a_backward_between_two_calls_gives_way_where_nothing_else_can() -> None:
    it = Driven(2)
    it.begin()
    it.fetching.enter(1, B)
    it.fetching.bring(1)
    it.fetching.refcounts.suspend_backward(1)
    it.call(2)
    assert it.call(3) == ["release 2 at 2", "fetch 3 at 2"]  # 2 has no reference
    it.fetching.refcounts.hold(3)
    assert it.call(4) == ["release 1 at 3", "fetch 4 at 3"]
    it.fetching.resume(1)
    it.fetching.bring(1)
    assert it.told() == ["release 4 at 3", "fetch 1 at 3"]
    it.fetching.enter(2, F)
    with pytest.raises(CapacityError):  # it computes again
        it.fetching.bring(2)


def test_a_unit_in_the_middle_is_fetched_again_once_the_plan_has_been_left() -> None:
    it = Driven()
    it.begin("fetch 1, fetch 2, fetch 3 | | |", 1, 2, 3)
    it.shelf.in_the_middle = {2, 3}
    it.call(1)
    it.call(2)
    assert it.fetching.plan_cursor.following and it.call(2) == ["release 2 at 2", "fetch 2 at 2"]
    it.shelf.in_the_middle = {3}
    it.fetching.refcounts.take(3)  # another call of it is in progress
    assert it.call(3) == [] and it.call(2) == []
    it.fetching.refcounts.give_back(3)
    assert it.call(3) == ["release 3 at 5", "fetch 3 at 5"]


def test_what_an_earlier_iteration_has_left_gives_way_to_planned_fetches() -> None:
    it = Driven(2)
    it.begin()
    it.call(3)
    it.call(4)
    it.fetching.end()
    assert sorted(it.shelf.there) == [3, 4]
    it.begin("fetch 1 | release 1, fetch 2 | release 2", 1, 2)
    before = it.fetching.misses
    assert it.call(1) == ["release 3 at 0", "fetch 1 at 0"] and it.fetching.misses == before


def test_a_unit_that_had_to_leave_the_place_of_an_earlier_iteration_is_fetched_to_its_own() -> None:
    it = Driven(1)
    it.framed = True
    it.begin()
    it.call(3)
    it.fetching.end()
    it.begin("fetch 3, fetch 1 | release 1 | release 3", 1, 3)
    it.told()
    before, unit = it.fetching.misses, it.shelf.units[3]
    release = unit.release

    def leave() -> None:
        release()
        it.shelf.pages = 2  # where it was, it divided the two

    unit.release = leave  # type: ignore[method-assign]
    assert it.call(1) == ["fetch 3 at 0", "release 3 at 0", "fetch 1 at 0", "fetch 3 at 0"]
    assert it.call(3) == ["release 1 at 1"] and it.fetching.misses == before


def test_a_plan_releases_a_unit_between_the_backwards_of_two_calls() -> None:
    it = Driven()
    it.begin("fetch 1 | release 1, fetch 2 | release 2, fetch 1 |", 1, 2, 1)
    it.fetching.enter(1, F)
    it.fetching.refcounts.give_back(1)
    it.fetching.refcounts.take_backward(1)
    it.fetching.refcounts.suspend_backward(1)
    assert not it.fetching.refcounts.needed(1) and it.fetching.refcounts.referenced(1)
    it.told()
    assert it.call(2) == ["release 1 at 1", "fetch 2 at 1"]
    it.fetching.resume(1)
    assert it.fetching.refcounts.needed(1)
    assert it.call(1) == ["release 2 at 2", "fetch 1 at 2"]


def test_what_fits_nowhere_is_refused() -> None:
    it = Driven(1)
    it.begin()
    it.call(1)
    it.fetching.refcounts.hold(1)
    it.fetching.enter(2, F)
    with pytest.raises(CapacityError, match="no room"):
        it.fetching.bring(2)


def test_expected_units_are_fetched_one_ahead_at_the_tick_around_them() -> None:
    it = Driven(by_need=(2, 3, 4))
    it.begin("fetch 0 | fetch 1 |", 0, 1)
    it.call(0)
    it.call(1)
    it.fetching.expect([2, 3, 4])
    assert it.told() == ["fetch 2 at 1"]
    assert [it.call(2), it.call(4)] == [["fetch 3 at 1"], ["fetch 4 at 1"]]  # 3 was left out
    assert it.fetching.plan_cursor.tick == 2 and it.fetching.plan_cursor.followed
    assert it.computed == [(0, 0), (1, 1), (2, 1), (4, 1)]


def test_units_by_need_give_way_to_a_plan_unless_expected() -> None:
    it = Driven(2, by_need=(2, 3))
    it.begin("| fetch 1 | fetch 4 |", 0, 0, 0)
    it.shelf.there = [2, 3]
    it.fetching.refcounts.hold(0)
    it.fetching.expect([2])
    it.told()
    it.fetching.enter(0, F)
    it.fetching.enter(0, F)
    assert it.told() == ["release 3 at 1", "fetch 1 at 1"]
    it.fetching.enter(0, F)
    assert it.told() == [] and it.fetching.misses == 1


def test_other_pages_are_taken_on_use_once_nothing_is_left_to_evict() -> None:
    it = Driven(3, by_need=(2, 3))
    it.shelf.own = 1
    it.begin()
    it.fetching.bring(3)
    it.shelf.there = [0, 3]
    it.fetching.refcounts.hold(0)
    it.told()
    it.fetching.bring(1)
    assert it.told() == ["release 3 at 0", "fetch 1 at 0"]
    it.fetching.expect([2])
    assert it.told() == [] and it.shelf.there == [0, 1]  # ahead of its use it waits


@pytest.mark.parametrize(
    ("pages", "by_need", "expected", "taken"),
    [(1, (), (), True), (0, (), (), False), (1, (1,), (), False), (2, (1, 2), (2, 1), True)],
)
def test_other_ranks_gathers_are_kept_where_they_are_wanted(
    pages: int, by_need: tuple[int, ...], expected: tuple[int, ...], taken: bool
) -> None:
    it = Driven(pages, by_need=by_need, shared=True)
    it.begin()
    it.fetching.expect(expected)
    it.shelf.agreed.clear()
    assert it.fetching.join_gather(1) == taken
    assert it.shelf.agreed == []  # they have asked
    assert not it.fetching.join_gather(1)  # it is there already, or no more wanted than before


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_are_asked_for_a_gather_that_they_have_not_agreed_on(shared: bool) -> None:
    it = Driven(shared=shared)
    it.begin()
    assert it.call(1) == ["gather 1 at 0" if shared else "fetch 1 at 0"]
    assert it.shelf.agreed == [1] * shared


def test_a_forward_goes_round_behind_the_root() -> None:
    it = Driven()
    it.begin("fetch 0, fetch 1 | fetch 2 | release 1 | release 2", 0, 1, 2, may_repeat=True)
    rounds = [it.call(unit) for unit in (0, 1, 2, 1, 2)]
    once = [["fetch 2 at 1"], ["release 1 at 2"]]
    assert rounds[1:3] == once
    assert rounds[3:] == [["release 2 at 3", "fetch 0 at 0", "fetch 1 at 0", *once[0]], once[1]]
    assert it.fetching.plan_cursor.followed


def test_a_failed_iteration_is_forgotten() -> None:
    it = Driven()
    it.begin("fetch 0 | fetch 1 | fetch 2", 0, 1)
    it.fetching.enter(0, F)
    it.fetching.abandon()
    assert not it.fetching.refcounts.referenced(0) and not it.fetching.plan_cursor.followed
    it.told()
    it.fetching.end()
    assert it.told() == []


@pytest.mark.parametrize(("one_way", "at_once"), [(False, [0, 2]), (True, [0])])
def test_on_one_way_nothing_is_fetched_before_what_is_needed_earlier_and_waits_for_an_update(
    one_way: bool, at_once: list[int]
) -> None:
    shelf = Shelf(4, 3)
    fetching = shelf.policy(one_way=one_way)
    trace = Trace(tuple(Tick(unit, F, (unit,)) for unit in range(3)))
    fetches = [Task(Operation.FETCH, unit, Kind.FULL, 0) for unit in range(3)]
    computes = [Task(Operation.COMPUTE, unit, Kind.FULL, unit) for unit in range(3)]
    shelf.updating.add(1)
    fetching.begin((Plan((*fetches, *computes), 3), trace), None, may_repeat=False)
    fetching.enter(0, F)
    assert shelf.there == at_once
    fetching.pump()
    assert shelf.there == at_once
    shelf.updating.clear()
    fetching.pump()
    assert sorted(shelf.there) == [0, 1, 2] and fetching.misses == 0


def test_each_call_gives_back_its_own_lease() -> None:
    refcounts = UnitRefcounts(2)
    refcounts.take(1)
    refcounts.take(1)
    refcounts.give_back(1)
    assert refcounts.used(1) and refcounts.referenced(1) and not refcounts.referenced(0)
    refcounts.give_back(1)
    assert not refcounts.referenced(1)


def test_a_backward_has_one_lease_however_often_it_is_given_back() -> None:
    refcounts = UnitRefcounts(1)
    refcounts.take_backward(0)
    refcounts.take_backward(0)
    assert refcounts.in_backward(0) and refcounts.used(0)
    refcounts.give_back_backward(0)
    refcounts.give_back_backward(0)
    assert not refcounts.referenced(0)
    refcounts.take(0)
    assert refcounts.used(0) and not refcounts.in_backward(0)


def test_what_the_plan_keeps_over_iterations_gives_way_to_no_fetch_that_is_not_planned() -> None:
    it = Driven(4, 6, by_need=(4, 5))
    it.begin("fetch 0, fetch 1, fetch 2 | | |", 0, 1, 2)
    for unit in (0, 1, 2, 4):
        it.call(unit)
    it.fetching.end()
    assert it.shelf.there == [0, 1, 2, 4]
    it.begin("| | |", 0, 1, 2)
    it.call(0)
    it.fetching.expect([5])
    assert it.told() == ["release 4 at 0", "fetch 5 at 0"]
    it.fetching.expect([5, 4])
    it.fetching.mark_used(5)  # 4 is next
    assert it.told()[-2:] == ["release 5 at 0", "fetch 4 at 0"]
    it.fetching.refcounts.take(4)
    it.fetching.expect([5])  # there is no room, and another rank's all-gather brings none, either
    assert not it.fetching.join_gather(3)
    assert it.told() == [] and it.call(1) == it.call(2) == []


def test_what_the_plan_keeps_stays_where_something_in_use_has_the_frames_of_a_fetch() -> None:
    it = Driven(3)
    it.begin("fetch 0, fetch 1, fetch 2 | | ", 0, 1)
    it.call(0)
    it.call(1)
    it.fetching.end()
    it.begin("| release 1, fetch 3 | release 3", 1, 0)
    it.fetching.refcounts.hold(1)
    it.call(1)
    assert it.call(0) == [] and it.shelf.there == [0, 1, 2]


def test_a_suspended_backward_is_idle_unless_something_else_uses_the_unit() -> None:
    refcounts = UnitRefcounts(2)
    refcounts.suspend_backward(0)  # it has none
    assert not refcounts.suspended(0)
    refcounts.take_backward(0)
    assert not refcounts.idle(0)
    refcounts.suspend_backward(0)
    assert refcounts.suspended(0) and refcounts.idle(0) and refcounts.referenced(0)
    refcounts.take(0)
    assert not refcounts.idle(0)
    refcounts.give_back(0)
    refcounts.hold(0)
    assert not refcounts.idle(0)
    refcounts.unhold(0)
    refcounts.resume_backward(0)
    assert not refcounts.idle(0) and refcounts.in_backward(0)
    refcounts.suspend_backward(0)
    refcounts.give_back_backward(0)
    assert not refcounts.suspended(0) and not refcounts.referenced(0)


def test_who_holds_a_unit_does_not_use_it() -> None:
    refcounts = UnitRefcounts(2)
    refcounts.hold(0)
    refcounts.hold(1)
    assert refcounts.held(0) and refcounts.referenced(0) and not refcounts.used(0)
    refcounts.unhold(0)
    assert not refcounts.referenced(0) and refcounts.held(1)
    refcounts.unhold_all()
    assert not refcounts.referenced(1)


def test_an_iteration_that_failed_leaves_no_lease() -> None:
    refcounts = UnitRefcounts(2)
    refcounts.take(0)
    refcounts.take_backward(1)
    refcounts.hold(1)
    refcounts.forget()
    assert not refcounts.referenced(0) and not refcounts.referenced(1)
    refcounts.take(0)
    refcounts.give_back(0)
    assert not refcounts.referenced(0)


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
def test_an_iteration_that_left_the_plan_does_not_return_to_it(other: tuple[int, Phase]) -> None:
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


def test_gradients_get_the_frames_of_evicted_shards_then_of_those_that_are_next() -> None:
    driven = Driven(shared=True)
    driven.begin(
        "fetch 1 parameter, fetch 2 parameter, gather 1 | evict 1 parameter, gather 2 | evict 2 parameter", 1, 2
    )
    driven.call(1)
    assert driven.shelf.shards == [1, 2]
    driven.call(2)
    driven.shelf.shards.append(1)  # as where an all-gather still reads it
    driven.fetching.evict_ended()
    assert driven.shelf.shards == [2, 1]
    driven.fetching.evict_ended()
    assert driven.shelf.shards == [1]
    assert driven.told() == []  # the eviction of 2 is reported at its trigger
    driven.fetching.end()
    assert driven.told() == ["evict 2 shard at 2"]
