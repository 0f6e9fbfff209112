"""What to fetch and what to give up, and when: as the plan has it, and what to do without one.

Owns the leases of units, which fetches wait for an update, and which units are expected; its course
(planning/plan_cursor.py) says
where the iteration is in its plan. Holds no byte and waits for nothing: `Units` does as it is told, and answers what does not
fit with a CapacityError. A run drives it with stores of pages (runtime/fetching/executor.py), a forecast with numbers
of pages
(runtime/deciding/predicted_memory.py).

Where there is no plan to follow (the order of units changed, or the plan left too little room): fetch on use, and give up
the unit whose next use lies farthest away (Belady). Never wrong, only slower.

I1: a unit is not given up while anybody leases it.
I2: what is told (`told`) are decisions, in order: a fetch that waits for its unit's update is told when its wait begins.
I3: units in `by_need` (experts, which another batch may not need) are in no plan: they make no ticks, are fetched when
    somebody expects or calls them, and are the first to be given up.
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
    """The device pages of units, real or on paper."""

    def gathers(self, unit: int) -> bool:
        """Whether other ranks share it."""

    def live(self, unit: int) -> bool:
        """Whether its bytes are there."""

    def fetched(self, unit: int) -> bool:
        """Whether they are there or on their way."""

    def movable(self, unit: int) -> bool:
        """Whether it holds pages that may be given up while nobody leases it."""

    def has_spare_shards(self, unit: int) -> bool:
        """Whether it holds shards that no all-gather reads."""

    def update_pending(self, unit: int) -> bool:
        """Whether an update has not reached it yet."""

    def start_fetch(self, unit: int, *, agreed: bool) -> None:
        """Takes pages and starts to fill them.

        Args:
            agreed: the ranks have agreed on its all-gather.

        Raises:
            CapacityError: they do not fit; nothing has changed.
        """

    def fetch_shards(self, unit: int) -> None:
        """As `start_fetch`, the shards for a later all-gather."""

    def release(self, unit: int) -> None:
        """Gives its pages up, if it holds any."""

    def evict(self, unit: int) -> None:
        """Gives its shards up, if it holds any."""

    def reclaim(self, wait: bool) -> bool:
        """Gives back pages of gradients that have left (or, with True, once they have); whether any came free."""


@dataclass(slots=True)
class Lookups:
    """How often compute asked for a unit's parameters, by where it found them.

    Attributes:
        kept: on the device, since their last use or for good.
        ahead: there, or on their way, fetched before compute asked for them.
        late: elsewhere: their fetch began then.
    """

    kept: int = 0
    ahead: int = 0
    late: int = 0


class FetchPolicy:
    """The policy of one rank.

    Args:
        units: does as it is told.
        count: of units.
        by_need: units that a plan cannot foresee.
        one_way: fetches take one way, one behind the other: none begins before one of an earlier need that waits for an
            update, which would then come behind it.
    """

    def __init__(self, units: Units, count: int, by_need: Collection[int] = (), *, one_way: bool = False) -> None:
        self._units = units
        self._one_way = one_way
        self._all = range(count)
        self._by_need = dict.fromkeys(sorted(by_need))
        self.refcounts = UnitRefcounts(count)
        self.plan_cursor = PlanCursor()
        self.told: Callable[[Task], None] = _nobody
        # state
        self._waiting: list[Task] = []
        self._expected: deque[int] = deque()
        self.uses = Lookups()
        self.misses = 0
        """Fetches that were late, or for which there was no room in time."""

    # -- the iteration -------------------------------------------------------------------------------------------------

    def begin(self, made: tuple[Plan, Trace] | None, traced: Trace | None, *, begins_again: bool) -> None:
        """An iteration starts; the arguments are its course's."""
        self.plan_cursor.begin(made, traced, begins_again=begins_again)

    def end(self) -> None:
        """The iteration is over: the plan's last tasks."""
        self._waiting = []
        self._expected.clear()
        self._perform(self.plan_cursor.last_tasks())
        self.refcounts.let_go_all()
        self.plan_cursor.forget()

    def abandon(self) -> None:
        """The iteration failed."""
        self._waiting = []
        self._expected.clear()
        self.refcounts.forget()
        self.plan_cursor.forget()

    def enter(self, unit: int, phase: Phase) -> int:
        """`unit` is about to compute, and leased from here on: the plan's tasks of this tick. Returns the tick's number; that
        of a unit in `by_need` is the number of the tick around it. `bring` and `computes` must follow."""
        if self.plan_cursor.goes_round(unit, phase):
            self._perform(self.plan_cursor.last_tasks())
            self._perform(self.plan_cursor.first_tasks())
            self.plan_cursor.go_round()
        self._units.reclaim(False)  # as the plan has it: gradients have left before the tick's fetches
        if phase is Phase.FORWARD:
            self.refcounts.take(unit)
        else:
            self.refcounts.take_backward(unit)
        if unit not in self._by_need:
            self._perform(self.plan_cursor.step(unit, phase))
        return self.plan_cursor.now

    def computes(self, unit: int) -> None:
        """`unit`, which has been entered and brought, is there."""
        self.told(Task(Operation.COMPUTE, unit, Kind.FULL, self.plan_cursor.now))
        self.has_come(unit)

    def _perform(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            match task.operation:
                case Operation.RELEASE:
                    if not self.refcounts.leased(task.unit):
                        self.told(task)
                        self._units.release(task.unit)
                case Operation.EVICT:
                    self.told(task)
                    self._units.evict(task.unit)
                case Operation.FETCH | Operation.GATHER:
                    self._fetch_ahead(task)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def bring(self, unit: int) -> None:
        """Makes sure that `unit` is there, or on its way.

        Raises:
            CapacityError: no other unit can be given up for it.
        """
        if self._units.live(unit):
            self.uses.kept += 1
        elif self._units.fetched(unit):
            self.uses.ahead += 1
        else:
            self.uses.late += 1
            self.misses += 1
            self._make_room_and_start(unit)

    def expect(self, units: Sequence[int]) -> None:
        """These will be called next, in this order: each is fetched while the one before computes."""
        self._expected = deque(units)
        self._fetch_expected()

    def has_come(self, unit: int) -> None:
        """`unit` is there: those expected before it are not, any more."""
        if unit in self._expected:
            while self._expected.popleft() != unit:
                pass
            self._fetch_expected()

    def _fetch_expected(self) -> None:
        if self._expected:
            self._fetch_ahead(self._full(self._expected[0]))

    def take_part(self, unit: int) -> bool:
        """Other ranks asked for an all-gather of `unit`: whether it is this rank's fetch, too, for which there is room."""
        # An expert that nobody expects here would stay until room is short.
        wanted = unit not in self._by_need or unit in self._expected
        return wanted and not self._units.fetched(unit) and self._starts(self._full(unit), agreed=True)

    def pump(self) -> None:
        """Starts the fetches that waited for an update."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            if self._waits(task):
                self._waiting.append(task)
            elif not self._starts(task):
                self.misses += 1

    def _full(self, unit: int) -> Task:
        """A fetch that is in no plan."""
        return Task(
            Operation.GATHER if self._units.gathers(unit) else Operation.FETCH, unit, Kind.FULL, self.plan_cursor.now
        )

    def _waits(self, task: Task) -> bool:
        return (self._one_way and bool(self._waiting)) or self._units.update_pending(task.unit)

    def _fetch_ahead(self, task: Task) -> None:
        if self._waits(task):
            self.told(task)
            self._waiting.append(task)
        elif self._starts(task):
            self.told(task)
        else:
            # The plan counts whole units; pages that a late release still holds leave this one to `bring`.
            self.misses += 1

    def _starts(self, task: Task, *, agreed: bool = False) -> bool:
        """Whether there is room without giving up anything that a plan keeps."""
        while True:
            try:
                self._start(task, agreed=agreed)
                return True
            except CapacityError:
                if not self._units.reclaim(False) and not self._give_up_by_need():
                    return False

    def _start(self, task: Task, *, agreed: bool = False) -> None:
        if task.kind is Kind.PARAMETER:
            self._units.fetch_shards(task.unit)
        elif not self._units.fetched(task.unit):
            # While ranks agree, this one may take part in what others asked for, which may look for pages to give up.
            self.refcounts.take(task.unit)
            try:
                self._units.start_fetch(task.unit, agreed=agreed)
            finally:
                self.refcounts.give_back(task.unit)

    # -- giving up ----------------------------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Everything that nobody leases."""
        for unit in self._all:
            if self._movable(unit):
                self._units.release(unit)
            self._units.evict(unit)

    def _movable(self, unit: int) -> bool:
        return not self.refcounts.leased(unit) and self._units.movable(unit)

    def _give_up(self, unit: int) -> None:
        self.told(Task(Operation.RELEASE, unit, Kind.FULL, self.plan_cursor.now))
        self._units.release(unit)
        self._units.evict(unit)

    def _give_up_by_need(self) -> bool:
        """Gives up a unit that is in no plan and that nobody expects; whether there was one."""
        for unit in self._by_need:
            if self._movable(unit) and unit not in self._expected:
                self._give_up(unit)
                return True
        return False

    def _make_room_and_start(self, unit: int) -> None:
        """Gives units up, farthest next use first, until `unit` fits; raises CapacityError if it cannot."""
        task = self._full(unit)
        while True:
            try:
                self._start(task)
                self.told(task)
                return
            except CapacityError:
                if self._units.reclaim(True):
                    continue  # the shortest wait: these bytes are leaving anyway
                victims = [other for other in self._all if other != unit and self._movable(other)]
                if victims:
                    self._give_up(max(victims, key=self.plan_cursor.next_use))
                    continue
                spare = [other for other in self._all if other != unit and self._units.has_spare_shards(other)]
                if not spare:
                    raise
                # Fetched for an all-gather that the plan had next and that did not come.
                for other in spare:
                    self.told(Task(Operation.EVICT, other, Kind.PARAMETER, self.plan_cursor.now))
                    self._units.evict(other)


def _nobody(task: Task) -> None:
    """Nobody listens."""
