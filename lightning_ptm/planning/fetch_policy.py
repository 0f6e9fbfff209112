"""Policy of prefetch and eviction: follows the plan, and falls back to fetch on use without one.

`FetchPolicy` owns the fetches that wait for an update, and the units that are expected; `UnitRefcounts` who uses a unit;
`PlanCursor` the position of the iteration in its plan, and in the trace that it may repeat. Holds no bytes and never waits:
the unit's `UnitPages` carry out its decisions, and raise CapacityError where pages do not fit. Those of a run are its stores
(runtime/units/store.py), those of a virtual run stores whose pages have no bytes (runtime/engine/virtual_run.py).

Without a plan to follow (the order of units changed, or the plan left too little room), a unit is fetched on use, and
the unit whose next use is farthest away is evicted (Belady). That is never wrong, only slower.

I1: a unit with a refcount is not evicted. Each call and each backward that takes a reference gives it back once.
I2: decisions are reported in order; a fetch that waits for its unit's update is reported when its wait begins.
I3: units in `by_need` (experts, which another batch may not need) are in no plan: they make no ticks, are fetched when
    they are expected or called, and are evicted first.
I4: an iteration that has left the plan's order does not follow it again, and one that has left the trace's order does
    not repeat it again. The tick is valid after the iteration, until another begins; plan and trace are not.
"""

from __future__ import annotations

import bisect
import enum
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.plan import GradientBuffer, Plan, Task
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Kind, Operation, Phase


class UnitRefcounts:
    """The refcounts of all units."""

    def __init__(self, count: int) -> None:
        self._uses = [0] * count
        """By unit, number of its calls in progress, and one more while its backward is."""
        self._backward: set[int] = set()
        self._suspended: set[int] = set()
        self._held: set[int] = set()

    def used(self, unit: int) -> bool:
        """Returns whether a call of `unit`, or its backward, is in progress."""
        return self._uses[unit] > 0

    def held(self, unit: int) -> bool:
        """Returns whether `unit` is held until the iteration, or its backward, ends."""
        return unit in self._held

    def referenced(self, unit: int) -> bool:
        """Returns whether `unit` is used or held."""
        return self._uses[unit] > 0 or unit in self._held

    def in_backward(self, unit: int) -> bool:
        """Returns whether the backward of `unit` has a reference."""
        return unit in self._backward

    def suspended(self, unit: int) -> bool:
        """Returns whether the backward of `unit` waits for a gradient of an earlier call of it."""
        return unit in self._suspended

    def idle(self, unit: int) -> bool:
        """Returns whether only a suspended backward refers to `unit`."""
        return unit in self._suspended and self._uses[unit] == 1 and unit not in self._held

    def needed(self, unit: int) -> bool:
        """Returns whether `unit` is used or held, and not only by a suspended backward."""
        return self.referenced(unit) and not self.idle(unit)

    def take(self, unit: int) -> None:
        """Takes a reference for a call of `unit`; `give_back` must follow."""
        self._uses[unit] += 1

    def give_back(self, unit: int) -> None:
        """Gives the reference of a call back."""
        self._uses[unit] -= 1

    def take_backward(self, unit: int) -> None:
        """Takes the reference of `unit`'s backward, which begins to compute."""
        if unit not in self._backward:
            self._backward.add(unit)
            self._uses[unit] += 1

    def give_back_backward(self, unit: int) -> bool:
        """Gives the backward's reference back, when it has ended or is suspended; returns whether it had one."""
        if unit not in self._backward:
            return False
        self._backward.discard(unit)
        self._suspended.discard(unit)
        self._uses[unit] -= 1
        return True

    def suspend_backward(self, unit: int) -> None:
        """Suspends the backward of `unit`, if it has a reference: what comes next is that of other units."""
        if unit in self._backward:
            self._suspended.add(unit)

    def resume_backward(self, unit: int) -> None:
        """Ends the suspension of `unit`."""
        self._suspended.discard(unit)

    def hold(self, unit: int) -> None:
        """Holds `unit` until `unhold` or the end of the iteration."""
        self._held.add(unit)

    def unhold(self, unit: int) -> None:
        """Ends the hold of `unit`."""
        self._held.discard(unit)

    def unhold_all(self) -> None:
        """Ends all holds, at the end of the iteration."""
        self._held.clear()

    def forget(self) -> None:
        """Drops all references, after a failed iteration."""
        self._uses = [0] * len(self._uses)
        self._backward.clear()
        self._suspended.clear()
        self._held.clear()


class PlanCursor:
    """The position in one iteration; `begin` resets it."""

    def __init__(self) -> None:
        self._planned: tuple[Plan, Trace] | None = None
        self._traced: Trace | None = None
        self._needed_at: tuple[Trace, dict[int, list[int]]] | None = None
        """A trace, and by unit the ticks that need it: of the last plan for which `next_use` was asked."""
        self.may_repeat = False
        """Whether the iteration may continue as if it had ended and another had begun. Others read it."""
        self._following = False
        self._repeating = False
        self.tick = 0
        """Number of ticks that have begun. Others read it."""
        self.now = 0
        """Index of the tick in progress; 0 before the first. Others read it, more than once a tick."""

    def begin(self, planned: tuple[Plan, Trace] | None, traced: Trace | None, *, may_repeat: bool) -> None:
        """Starts an iteration.

        Args:
            planned: the plan to follow, and the trace that it is for.
            traced: this rank's own newest trace.
            may_repeat: after the end of the plan or trace, the iteration may continue at the tick after the root's,
                as if it had ended and another had begun, while the root stays live (token-by-token generation).
        """
        self._planned, self._traced, self.may_repeat = planned, traced, may_repeat
        self.tick = self.now = 0
        self._following, self._repeating = planned is not None, traced is not None

    def forget(self) -> None:
        """Drops plan and trace: the iteration is over, or has failed."""
        self._planned = self._traced = None
        self.may_repeat = self._following = self._repeating = False

    @property
    def followed(self) -> bool:
        """Whether the iteration in progress has followed its plan, tick by tick, to the end."""
        return self._following and self._planned is not None and self.tick == self._planned[0].tick_count

    @property
    def repeated(self) -> bool:
        """Whether the iteration has repeated this rank's newest trace, tick by tick, to the end."""
        return self._repeating and self._traced is not None and self.tick == len(self._traced.ticks)

    def step(self, unit: int, phase: Phase) -> Sequence[Task]:
        """Begins a tick; returns the plan's tasks for it, none where the plan is not followed."""
        self.now = index = self.tick
        self.tick += 1
        if self._repeating and self._traced is not None:
            ticks = self._traced.ticks
            self._repeating = index < len(ticks) and ticks[index].unit == unit and ticks[index].phase is phase
        if self._following and self._planned is not None:
            ticks = self._planned[1].ticks
            self._following = index < len(ticks) and ticks[index].unit == unit and ticks[index].phase is phase
            if self._following:
                return self._planned[0].at[index]
        return ()

    def next_tasks(self) -> Sequence[Task]:
        """Returns the tasks of the next tick, or after the last one, if the plan is followed."""
        planned = self._planned if self._following else None
        return planned[0].at[self.tick] if planned is not None and self.tick <= planned[0].tick_count else ()

    def gradient_frame(self, flat: int, pages: GradientBuffer) -> int | None:
        """Returns the first frame that the plan has for pages of a flat's gradient whose backward ends now, or has ended;
        None if it has none, or is not followed."""
        if not self._following or self._planned is None:
            return None
        now = self.now
        for place in reversed(self._planned[0].frames.get((flat, pages), ())):
            if place.tick <= now:
                return place.frame
        return None

    @property
    def following(self) -> bool:
        """Whether the iteration has followed its plan so far."""
        return self._following

    def last_tasks(self) -> Sequence[Task]:
        """Returns the tasks after the plan's last tick, if the plan was followed to the end."""
        return self._planned[0].at[self.tick] if self.followed and self._planned is not None else ()

    def begins_next_round(self, unit: int, phase: Phase) -> bool:
        """Returns whether the tick that begins is the second tick of another round."""
        if not self.may_repeat:
            return False
        if self.followed:
            return self._planned is not None and _is_at(self._planned[1], 1, unit, phase)
        return self.repeated and self._traced is not None and _is_at(self._traced, 1, unit, phase)

    def first_tasks(self) -> Sequence[Task]:
        """Returns the tasks of the plan's first tick, with which another round begins.

        Returns none if the plan was not followed to the end.
        """
        return self._planned[0].at[0] if self.followed and self._planned is not None else ()

    def start_next_round(self) -> None:
        """Moves to the position after the first tick of another round."""
        self.tick, self.now = 1, 0

    def next_use(self, unit: int) -> int:
        """Returns the index of the tick in which a unit is needed next, counted on into the next iteration.

        Without a plan, it returns the unit's number.
        """
        if self._planned is None:
            return unit
        trace = self._planned[1]
        if self._needed_at is None or self._needed_at[0] is not trace:
            self._needed_at = trace, _ticks_by_unit(trace)
        of_unit, count = self._needed_at[1].get(unit, ()), len(trace.ticks)
        at = bisect.bisect_left(of_unit, self.tick)
        if at < len(of_unit):
            return of_unit[at]
        return count + (of_unit[0] if of_unit else count)


def _ticks_by_unit(trace: Trace) -> dict[int, list[int]]:
    """Returns, by unit, the indices of the ticks that need it."""
    found: dict[int, list[int]] = {}
    for index, tick in enumerate(trace.ticks):
        for unit in tick.live:
            found.setdefault(unit, []).append(index)
    return found


def _is_at(trace: Trace, index: int, unit: int, phase: Phase) -> bool:
    """Returns whether tick `index` of a trace is this unit and phase."""
    return index < len(trace.ticks) and (trace.ticks[index].unit, trace.ticks[index].phase) == (unit, phase)


class Among(enum.Enum):
    """The device pages that a fetch may take instead of the planned ones."""

    PLANNED = "planned"
    """No others."""
    OWN = "own"
    """Those for units of the same kind: units that plans contain, which leave adjacent pages for gradients, or those of
    `by_need`, which take any."""
    ANY = "any"


class UnitPages(Protocol):
    """The device pages of one unit (`UnitStore`)."""

    @property
    def sharded(self) -> Sequence[object]:
        """The flats that other ranks share; if there are any, the unit needs an all-gather."""

    @property
    def live(self) -> bool:
        """Whether the unit's full parameters are on the device."""

    @property
    def fetched(self) -> bool:
        """Whether the unit's parameters are on the device or on their way."""

    @property
    def movable(self) -> bool:
        """Whether the unit holds pages that may be evicted while its refcount is zero."""

    @property
    def has_spare_shards(self) -> bool:
        """Whether the unit holds shards that no all-gather reads."""

    @property
    def divides_free_pages(self) -> bool:
        """Whether the unit's pages are where, without a plan, gradients of another unit may find no adjacent pages."""

    def start_fetch(
        self, agree: Callable[[], None] | None, frames: Sequence[int] = (), *, among: Among = Among.ANY
    ) -> None:
        """Allocates pages and starts to fill them.

        Args:
            agree: called before the all-gather starts: all ranks must have agreed on it. None: they have already.
            frames: see `Task.frames`.
            among: the pages to take if those are not free.

        Raises:
            CapacityError: the pages do not fit; nothing has changed.
        """

    def fetch_shards(self, frames: Sequence[int] = (), *, among: Among = Among.ANY) -> None:
        """Fetches the unit's shards for a later all-gather. Args and errors as `start_fetch`."""

    def release(self) -> None:
        """Frees the unit's full pages, if it holds any."""

    def evict(self) -> None:
        """Frees the unit's fetched shards, if it holds any; if an all-gather reads them, once the unit is live."""

    def finish_evictions(self) -> None:
        """Waits for the all-gathers that read evicted shards, and frees these."""


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
        units: by unit, its pages.
        update_pending: returns whether the unit's compute parameters still lack an update.
        reclaim: frees pages of gradients that have left the device (with True, also of those that are still being copied;
            see `GradientShard.release`); returns whether any were freed.
        agree: agrees with the other ranks on the unit's all-gather.
        by_need: units that a plan cannot foresee.
        one_way: fetches share one link in order, so no fetch overtakes an earlier one that waits for an update;
            otherwise the earlier one would be queued after it.
    """

    def __init__(
        self,
        units: Sequence[UnitPages],
        update_pending: Callable[[int], bool],
        reclaim: Callable[[bool], bool],
        agree: Callable[[int], None],
        by_need: Collection[int] = (),
        *,
        one_way: bool = False,
    ) -> None:
        self._units = units
        self._update_pending = update_pending
        self._reclaim = reclaim
        self._agree = agree
        self._one_way = one_way
        self._all = range(len(units))
        self._by_need = dict.fromkeys(sorted(by_need))
        self.refcounts = UnitRefcounts(len(units))
        self.plan_cursor = PlanCursor()
        self.on_decision: Callable[[Task], None] | None = None
        """Listener of decisions; None: there is none."""
        # state
        self.waiting: list[Task] = []
        """Fetches that wait for an update. Others read it."""
        self._here: set[int] = set()
        """Units that may have pages on the device: those fetched since `_candidates` last looked, or found there then."""
        self._without_room: list[Task] = []
        """Planned fetches whose frames were not free at their tick."""
        self._overdue: list[Task] = []
        """Planned releases of units that were in use at their tick."""
        self._left_over: set[int] = set()
        """Units that earlier iterations have left on the device, and that were not fetched since: where an iteration without
        this plan has left them, they may be in its frames."""
        self._elsewhere: dict[int, list[Task]] = {}
        """By unit, planned fetches that found it on the device, where an earlier iteration has left it."""
        self._displaced: list[Task] = []
        """Those of units that had to leave that place since."""
        self._evicted: set[int] = set()
        """Units whose shards have been evicted; all-gathers may still read some."""
        self._expected: deque[int] = deque()
        self.lookups = Lookups()
        self.misses = 0
        """Fetches that were late, or for which there was no room in time."""

    # -- the iteration -------------------------------------------------------------------------------------------------

    def begin(self, planned: tuple[Plan, Trace] | None, traced: Trace | None, *, may_repeat: bool) -> None:
        """Starts an iteration. Args as `PlanCursor.begin`."""
        self.plan_cursor.begin(planned, traced, may_repeat=may_repeat)
        self._left_over = {unit for unit in self._all if self._on_device(unit)} if planned is not None else set()

    def end(self) -> None:
        """Ends the iteration with the plan's last tasks."""
        self._drop_unstarted()
        self._perform(self.plan_cursor.last_tasks())
        self.refcounts.unhold_all()
        self.plan_cursor.forget()

    def abandon(self) -> None:
        """Resets the policy after a failed iteration."""
        self._drop_unstarted()
        self.refcounts.forget()
        self.plan_cursor.forget()

    def _drop_unstarted(self) -> None:
        self.waiting = []
        self._without_room = []
        self._overdue = []
        self._left_over.clear()
        self._elsewhere.clear()
        self._displaced = []
        self._evicted.clear()
        self._expected.clear()

    def enter(self, unit: int, phase: Phase) -> int:
        """Takes a refcount on `unit`, which is about to compute, and performs the plan's tasks of this tick.

        `bring` and `computes` must follow. Returns the tick's number; for a unit in `by_need`, the number of the
        enclosing tick.
        """
        if self.plan_cursor.may_repeat and self.plan_cursor.begins_next_round(unit, phase):
            self._perform(self.plan_cursor.last_tasks())
            self._perform(self.plan_cursor.first_tasks())
            self.plan_cursor.start_next_round()
        self._reclaim(False)  # the plan assumes that gradients have left before the tick's fetches
        if unit not in self._by_need:
            tasks = self.plan_cursor.step(unit, phase)
            if not self.plan_cursor.following:
                self._without_room = []
                self._overdue = []
                self._displaced = []
                if not self.refcounts.referenced(unit):
                    self._leave_middle(unit)
        else:
            tasks = ()
        if phase is Phase.FORWARD:
            self.refcounts.take(unit)
        else:
            self.refcounts.take_backward(unit)
        if tasks:
            self._perform(tasks)
        return self.plan_cursor.now

    def resume(self, unit: int) -> None:
        """Resumes the suspended backward of `unit`; `bring` must follow where the unit is not live any more."""
        if not self.plan_cursor.following and self.refcounts.idle(unit):
            self._leave_middle(unit)
        self.refcounts.resume_backward(unit)

    def _leave_middle(self, unit: int) -> None:
        """Evicts a unit that is about to be used, if a plan that is no longer followed has put it where it divides the free
        pages: it is fetched again to where it does not."""
        if unit and self._units[unit].movable and self._units[unit].divides_free_pages:
            self._evict(unit)

    def computes(self, unit: int) -> None:
        """Reports that `unit`, after `enter` and `bring`, computes."""
        if self.on_decision is not None:
            self.on_decision(Task(Operation.COMPUTE, unit, Kind.FULL, self.plan_cursor.now))
        if self._expected:
            self.mark_used(unit)

    def release_ended(self) -> None:
        """Releases the units, no longer in use, whose planned release is due: at the next tick, or earlier.

        Called when the backward of a unit has ended, before its gradients take pages.
        """
        self._reclaim(False)  # between the backwards of the first block and of the root no unit is entered
        overdue, self._overdue = self._overdue, []
        for task in overdue:
            self._release_unused(task)
        for task in self.plan_cursor.next_tasks():
            if task.operation is Operation.RELEASE and not self.refcounts.needed(task.unit):
                self._units[task.unit].release()  # a decision of the next tick, and reported there

    def evict_ended(self) -> None:
        """Frees evicted shards that all-gathers still read; if there are none, those that the plan evicts at the next tick.

        Makes the current stream wait for these all-gathers. Called when gradients find a shard in their planned frames.
        """
        if not self._evicted:
            for task in self.plan_cursor.next_tasks():
                if task.operation is Operation.EVICT:  # a decision of the next tick, and reported there
                    self._units[task.unit].evict()
                    self._evicted.add(task.unit)
        self._finish_evictions()

    def _release_unused(self, task: Task) -> None:
        self._elsewhere.pop(task.unit, None)
        if self.refcounts.needed(task.unit):
            self._overdue.append(task)
        else:
            self._decided(task)
            self._units[task.unit].release()

    def _perform(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if task.operation is Operation.RELEASE:
                self._release_unused(task)
        for task in tasks:
            if task.operation is Operation.EVICT:
                self._decided(task)
                self._units[task.unit].evict()
                self._evicted.add(task.unit)
        if self._without_room:
            self._retry()
        for task in tasks:
            if task.operation in (Operation.FETCH, Operation.GATHER):
                self._fetch_ahead(task)
        self._fetch_displaced()

    def _fetch_displaced(self) -> None:
        """Fetches the units that others have displaced to their places in the plan."""
        while self._displaced:
            self._fetch_ahead(self._displaced.pop(0))

    def _retry(self) -> None:
        """Starts the planned fetches that found no room at their tick, where there is room now."""
        tasks, self._without_room = self._without_room, []
        for task in tasks:
            if task.kind is Kind.FULL and self._units[task.unit].fetched:
                continue
            if self._waits(task) or not self._try_start(task):
                self._without_room.append(task)
            else:
                self._decided(task)

    def _decided(self, task: Task) -> None:
        if self.on_decision is not None:
            self.on_decision(task)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def bring(self, unit: int) -> None:
        """Makes sure that `unit`, which is not live, is on its way to the device.

        Raises:
            CapacityError: no other unit can be evicted for it.
        """
        if self._units[unit].fetched:
            self.lookups.ahead += 1
        else:
            self.lookups.late += 1
            self.misses += 1
            self._make_room_and_start(unit)

    def note_kept(self) -> None:
        """Counts a request of compute for a unit that is on the device."""
        self.lookups.kept += 1

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
        return wanted and not self._units[unit].fetched and self._try_start(self._unplanned_fetch(unit), agreed=True)

    def pump(self) -> None:
        """Starts the fetches that waited for an update, where it has arrived."""
        self._reclaim(False)  # the gradient that the update has used may be in their frames
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            if self._waits(task):
                self.waiting.append(task)
            elif not self._try_start(task):
                self._found_no_room(task)
        self._fetch_displaced()

    def _found_no_room(self, task: Task) -> None:
        """Counts a fetch that found no room; a planned one is tried again in the next tick, then on use."""
        self.misses += 1
        if task.frames:
            self._without_room.append(task)

    def _unplanned_fetch(self, unit: int) -> Task:
        """Returns a task to fetch a unit outside of the plan."""
        return Task(
            Operation.GATHER if self._units[unit].sharded else Operation.FETCH, unit, Kind.FULL, self.plan_cursor.now
        )

    def _waits(self, task: Task) -> bool:
        return (self._one_way and bool(self.waiting)) or self._update_pending(task.unit)

    def _fetch_ahead(self, task: Task) -> None:
        if self._waits(task):
            self._decided(task)
            self.waiting.append(task)
        elif self._try_start(task):
            self._decided(task)
        else:
            self._found_no_room(task)  # something has its frames longer than planned

    def _try_start(self, task: Task, *, agreed: bool = False) -> bool:
        """Starts a fetch if there is room without evicting anything that the plan keeps; returns whether it started.

        A planned fetch takes no other frames, and waits for what has left them according to the plan.
        """
        settled = not task.frames
        planned = not agreed and task.unit not in self._by_need
        while True:
            try:
                self._start(task, agreed=agreed, among=Among.PLANNED if task.frames else Among.OWN)
                return True
            except CapacityError:
                if self._reclaim(False):
                    continue
                if not settled:
                    settled = True
                    self._finish_evictions()
                    self._reclaim(True)
                elif not (self._evict_by_need() or (planned and self._evict_left_over())):
                    return False

    def _finish_evictions(self) -> None:
        for unit in self._evicted:
            self._units[unit].finish_evictions()
        self._evicted.clear()

    def _start(self, task: Task, *, agreed: bool = False, among: Among) -> None:
        if task.frames and task.unit in self._left_over and self._on_device(task.unit):
            self._elsewhere.setdefault(task.unit, []).append(task)
        self._here.add(task.unit)
        if task.kind is Kind.PARAMETER:
            self._units[task.unit].fetch_shards(task.frames, among=among)
        elif not self._units[task.unit].fetched:
            # While ranks agree, this rank may take part in another rank's all-gather, which may evict units: not this one.
            self.refcounts.take(task.unit)
            try:
                unit = self._units[task.unit]
                asks = partial(self._agree, task.unit) if unit.sharded and not agreed else None
                unit.start_fetch(asks, task.frames, among=among)
                self._left_over.discard(task.unit)
            finally:
                self.refcounts.give_back(task.unit)
            if self._without_room:
                self._without_room = [each for each in self._without_room if each.unit != task.unit]
            if self.waiting:  # fetches of this unit that wait would otherwise fetch it again, after its release
                self.waiting = [each for each in self.waiting if each.unit != task.unit]

    # -- eviction -----------------------------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Releases and evicts all units without a refcount."""
        for unit in self._all:
            if self._movable(unit):
                self._units[unit].release()
            self._units[unit].evict()

    def _movable(self, unit: int) -> bool:
        return not self.refcounts.referenced(unit) and self._units[unit].movable

    def _evict(self, unit: int) -> None:
        self._decided(Task(Operation.RELEASE, unit, Kind.FULL, self.plan_cursor.now))
        self._units[unit].release()
        self._units[unit].evict()

    def _on_device(self, unit: int) -> bool:
        return unit not in self._by_need and (self._units[unit].movable or self._units[unit].has_spare_shards)

    def _evict_left_over(self) -> bool:
        """Evicts a unit that an earlier iteration has left on the device, unless a unit in use may have the frames that are
        needed; returns whether there was one."""
        if self._overdue:
            return False
        left = [unit for unit in self._left_over if self._on_device(unit) and not self.refcounts.referenced(unit)]
        if left:
            unit = max(left, key=self.plan_cursor.next_use)
            self._left_over.discard(unit)
            self._evict(unit)
            self._displaced += self._elsewhere.pop(unit, ())
        return bool(left)

    def _evict_by_need(self) -> bool:
        """Evicts a unit that is in no plan and is not expected; returns whether there was one."""
        for unit in self._by_need:
            if self._movable(unit) and unit not in self._expected:
                self._evict(unit)
                return True
        return False

    def _candidates(self) -> Sequence[int]:
        """Returns the units that have pages on the device, in order."""
        units = self._units
        self._here = {unit for unit in self._here if units[unit].movable or units[unit].has_spare_shards}
        return sorted(self._here)

    def evict_farthest(self, but: int | None = None) -> bool:
        """Evicts the unit, other than `but`, that is not in use and has the farthest next use; returns whether there was
        one."""
        if self._evict_one_of(self._candidates(), but):
            return True
        self._here.update(self._all)  # a unit may be on the device without a fetch of this policy
        return self._evict_one_of(self._candidates(), but)

    def _evict_one_of(self, units: Sequence[int], but: int | None) -> bool:
        candidates = [other for other in units if other != but]
        idle = [other for other in candidates if self._units[other].movable]
        victims = [other for other in idle if not self.refcounts.referenced(other)]
        if victims:
            self._evict(max(victims, key=self.plan_cursor.next_use))
            return True
        # Shards that were fetched for an all-gather that was next in the plan and that did not happen.
        spare = [other for other in candidates if self._units[other].has_spare_shards]
        for other in spare:
            self._decided(Task(Operation.EVICT, other, Kind.PARAMETER, self.plan_cursor.now))
            self._units[other].evict()
        if spare:
            return True
        suspended = [other for other in idle if self.refcounts.idle(other)]
        if suspended:  # the calls that were last are those whose backward came first
            self._evict(max(suspended, key=self.plan_cursor.next_use))
        return bool(suspended)

    def _make_room_and_start(self, unit: int) -> None:
        """Evicts units, farthest next use first, until `unit` fits; raises CapacityError if it cannot.

        As long as it can, it takes pages that divide no others, and leaves those of units of `by_need` to these: the least
        device memory has room for each of the two kinds in its own pages.
        """
        for planned in [each for each in self._without_room if each.unit == unit]:
            if self._try_start(planned):
                self._decided(planned)
                if planned.kind is Kind.FULL:
                    return
        task = self._unplanned_fetch(unit)
        among = Among.OWN
        while True:
            try:
                self._start(task, among=among)
                self._decided(task)
                return
            except CapacityError:
                if self._reclaim(True):
                    continue  # the shortest wait: these gradients are leaving anyway
                if self.evict_farthest(but=unit):
                    continue
                if among is Among.ANY:
                    raise
                among = Among.ANY
