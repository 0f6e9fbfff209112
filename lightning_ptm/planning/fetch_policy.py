"""Policy of prefetch and eviction: follows the plan, and falls back to fetch on use without one.

Owns the refcounts of units, the fetches that wait for an update, and the units that are expected; its `PlanCursor`
(planning/plan_cursor.py) knows the position of the iteration in its plan. Holds no bytes and never waits: `Units`
carries out its decisions, and raises CapacityError where pages do not fit. A run drives it with stores of pages
(runtime/fetching/executor.py), a virtual run with numbers of pages (runtime/deciding/predicted_memory.py).

Without a plan to follow (the order of units changed, or the plan left too little room), a unit is fetched on use, and
the unit whose next use is farthest away is evicted (Belady). That is never wrong, only slower.

I1: a unit with a refcount is not evicted.
I2: decisions are reported in order; a fetch that waits for its unit's update is reported when its wait begins.
I3: units in `by_need` (experts, which another batch may not need) are in no plan: they make no ticks, are fetched when
    they are expected or called, and are evicted first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.plan_cursor import PlanCursor
from lightning_ptm.planning.refcounts import UnitRefcounts
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Kind, Operation, Phase


class Units(Protocol):
    """The device pages of units: the stores of a run, or the page counts of a virtual run."""

    def gathers(self, unit: int) -> bool:
        """Returns whether other ranks share the unit, so that it needs an all-gather."""

    def live(self, unit: int) -> bool:
        """Returns whether the unit's full parameters are on the device."""

    def fetched(self, unit: int) -> bool:
        """Returns whether they are on the device or on their way."""

    def movable(self, unit: int) -> bool:
        """Returns whether the unit holds pages that may be evicted while its refcount is zero."""

    def has_spare_shards(self, unit: int) -> bool:
        """Returns whether the unit holds shards that no all-gather reads."""

    def update_pending(self, unit: int) -> bool:
        """Returns whether the unit's compute parameters still lack an update."""

    def start_fetch(self, unit: int, *, agreed: bool) -> None:
        """Allocates pages and starts to fill them.

        Args:
            agreed: the ranks have agreed on the all-gather.

        Raises:
            CapacityError: the pages do not fit; nothing has changed.
        """

    def fetch_shards(self, unit: int) -> None:
        """Fetches the unit's shards for a later all-gather. Raises as `start_fetch`."""

    def release(self, unit: int) -> None:
        """Frees the unit's full pages, if it holds any."""

    def evict(self, unit: int) -> None:
        """Frees the unit's fetched shards, if it holds any."""

    def reclaim(self, wait: bool) -> bool:
        """Frees pages of gradients that have left the device; returns whether any were freed.

        Args:
            wait: wait until gradients that are leaving have left.
        """


@dataclass(slots=True)
class Lookups:
    """Number of requests of compute for a unit's parameters, by where they were.

    Attributes:
        kept: on the device, since their last use or permanently.
        ahead: on the device or on their way, by a fetch that began before the request.
        late: not on the device: the fetch began with the request.
    """

    kept: int = 0
    ahead: int = 0
    late: int = 0


class FetchPolicy:
    """The prefetch and eviction policy of one rank.

    Args:
        units: carries out the decisions.
        count: number of units.
        by_need: units that a plan cannot foresee.
        one_way: fetches share one link in order, so no fetch overtakes an earlier one that waits for an update;
            otherwise the earlier one would be queued after it.
    """

    def __init__(self, units: Units, count: int, by_need: Collection[int] = (), *, one_way: bool = False) -> None:
        self._units = units
        self._one_way = one_way
        self._all = range(count)
        self._by_need = dict.fromkeys(sorted(by_need))
        self.refcounts = UnitRefcounts(count)
        self.plan_cursor = PlanCursor()
        self.on_decision: Callable[[Task], None] = _ignore
        # state
        self._waiting: list[Task] = []
        self._expected: deque[int] = deque()
        self.lookups = Lookups()
        self.misses = 0
        """Fetches that were late, or for which there was no room in time."""

    # -- the iteration -------------------------------------------------------------------------------------------------

    def begin(self, planned: tuple[Plan, Trace] | None, traced: Trace | None, *, may_repeat: bool) -> None:
        """Starts an iteration. Args as `PlanCursor.begin`."""
        self.plan_cursor.begin(planned, traced, may_repeat=may_repeat)

    def end(self) -> None:
        """Ends the iteration with the plan's last tasks."""
        self._waiting = []
        self._expected.clear()
        self._perform(self.plan_cursor.last_tasks())
        self.refcounts.unhold_all()
        self.plan_cursor.forget()

    def abandon(self) -> None:
        """Resets the policy after a failed iteration."""
        self._waiting = []
        self._expected.clear()
        self.refcounts.forget()
        self.plan_cursor.forget()

    def enter(self, unit: int, phase: Phase) -> int:
        """Takes a refcount on `unit`, which is about to compute, and performs the plan's tasks of this tick.

        `bring` and `computes` must follow. Returns the tick's number; for a unit in `by_need`, the number of the
        enclosing tick.
        """
        if self.plan_cursor.begins_next_round(unit, phase):
            self._perform(self.plan_cursor.last_tasks())
            self._perform(self.plan_cursor.first_tasks())
            self.plan_cursor.start_next_round()
        self._units.reclaim(False)  # the plan assumes that gradients have left before the tick's fetches
        if phase is Phase.FORWARD:
            self.refcounts.take(unit)
        else:
            self.refcounts.take_backward(unit)
        if unit not in self._by_need:
            self._perform(self.plan_cursor.step(unit, phase))
        return self.plan_cursor.now

    def computes(self, unit: int) -> None:
        """Reports that `unit`, after `enter` and `bring`, computes."""
        self.on_decision(Task(Operation.COMPUTE, unit, Kind.FULL, self.plan_cursor.now))
        self.mark_used(unit)

    def _perform(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            match task.operation:
                case Operation.RELEASE:
                    if not self.refcounts.referenced(task.unit):
                        self.on_decision(task)
                        self._units.release(task.unit)
                case Operation.EVICT:
                    self.on_decision(task)
                    self._units.evict(task.unit)
                case Operation.FETCH | Operation.GATHER:
                    self._fetch_ahead(task)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def bring(self, unit: int) -> None:
        """Makes sure that `unit` is on the device or on its way.

        Raises:
            CapacityError: no other unit can be evicted for it.
        """
        if self._units.live(unit):
            self.lookups.kept += 1
        elif self._units.fetched(unit):
            self.lookups.ahead += 1
        else:
            self.lookups.late += 1
            self.misses += 1
            self._make_room_and_start(unit)

    def expect(self, units: Sequence[int]) -> None:
        """Announces the units that will be called next, in order: each is fetched while the one before computes."""
        self._expected = deque(units)
        self._fetch_expected()

    def mark_used(self, unit: int) -> None:
        """Removes `unit`, which is being used, and the units before it from the expected ones, and fetches the next."""
        if unit in self._expected:
            while self._expected.popleft() != unit:
                pass
            self._fetch_expected()

    def _fetch_expected(self) -> None:
        if self._expected:
            self._fetch_ahead(self._unplanned_fetch(self._expected[0]))

    def join_gather(self, unit: int) -> bool:
        """Joins an all-gather that other ranks requested, if this rank wants `unit` and has room.

        Returns whether the fetch of `unit` started.
        """
        # An expert that this rank does not expect would stay on the device until room is short.
        wanted = unit not in self._by_need or unit in self._expected
        return wanted and not self._units.fetched(unit) and self._try_start(self._unplanned_fetch(unit), agreed=True)

    def pump(self) -> None:
        """Starts the fetches that waited for an update, where it has arrived."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            if self._waits(task):
                self._waiting.append(task)
            elif not self._try_start(task):
                self.misses += 1

    def _unplanned_fetch(self, unit: int) -> Task:
        """Returns a task to fetch a unit outside of the plan."""
        return Task(
            Operation.GATHER if self._units.gathers(unit) else Operation.FETCH, unit, Kind.FULL, self.plan_cursor.now
        )

    def _waits(self, task: Task) -> bool:
        return (self._one_way and bool(self._waiting)) or self._units.update_pending(task.unit)

    def _fetch_ahead(self, task: Task) -> None:
        if self._waits(task):
            self.on_decision(task)
            self._waiting.append(task)
        elif self._try_start(task):
            self.on_decision(task)
        else:
            # The plan counts whole units, but a late release may still hold pages. Then `bring` fetches this unit.
            self.misses += 1

    def _try_start(self, task: Task, *, agreed: bool = False) -> bool:
        """Starts a fetch if there is room without evicting anything that the plan keeps; returns whether it started."""
        while True:
            try:
                self._start(task, agreed=agreed)
                return True
            except CapacityError:
                if not self._units.reclaim(False) and not self._evict_by_need():
                    return False

    def _start(self, task: Task, *, agreed: bool = False) -> None:
        if task.kind is Kind.PARAMETER:
            self._units.fetch_shards(task.unit)
        elif not self._units.fetched(task.unit):
            # While ranks agree, this rank may take part in another rank's all-gather, which may evict units: not this one.
            self.refcounts.take(task.unit)
            try:
                self._units.start_fetch(task.unit, agreed=agreed)
            finally:
                self.refcounts.give_back(task.unit)

    # -- eviction -----------------------------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Releases and evicts all units without a refcount."""
        for unit in self._all:
            if self._movable(unit):
                self._units.release(unit)
            self._units.evict(unit)

    def _movable(self, unit: int) -> bool:
        return not self.refcounts.referenced(unit) and self._units.movable(unit)

    def _evict(self, unit: int) -> None:
        self.on_decision(Task(Operation.RELEASE, unit, Kind.FULL, self.plan_cursor.now))
        self._units.release(unit)
        self._units.evict(unit)

    def _evict_by_need(self) -> bool:
        """Evicts a unit that is in no plan and is not expected; returns whether there was one."""
        for unit in self._by_need:
            if self._movable(unit) and unit not in self._expected:
                self._evict(unit)
                return True
        return False

    def _make_room_and_start(self, unit: int) -> None:
        """Evicts units, farthest next use first, until `unit` fits; raises CapacityError if it cannot."""
        task = self._unplanned_fetch(unit)
        while True:
            try:
                self._start(task)
                self.on_decision(task)
                return
            except CapacityError:
                if self._units.reclaim(True):
                    continue  # the shortest wait: these gradients are leaving anyway
                victims = [other for other in self._all if other != unit and self._movable(other)]
                if victims:
                    self._evict(max(victims, key=self.plan_cursor.next_use))
                    continue
                spare = [other for other in self._all if other != unit and self._units.has_spare_shards(other)]
                if not spare:
                    raise
                # They were fetched for an all-gather that was next in the plan and that did not happen.
                for other in spare:
                    self.on_decision(Task(Operation.EVICT, other, Kind.PARAMETER, self.plan_cursor.now))
                    self._units.evict(other)


def _ignore(task: Task) -> None:
    """Default listener: ignores the decision."""
