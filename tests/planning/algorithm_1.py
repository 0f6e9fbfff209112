"""Algorithm 1 of the paper, literally, as a reference for the scheduler; and a clock for its schedules and for plans.

The "layers" of the algorithm are the uses of units in a trace, forward and backward. What the paper leaves open is read in
favour of the algorithm: a page that is moved for a second use while the first one has it stays and is not copied again; pages
that are still on the wait stack when their layer computes are moved then; of gradients only the least demand is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ptm.planning.device_demand import entered_gradients, gradient_demands
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.lifetime import uses_of
from lightning_ptm.planning.page_occupancy import Occupancy, compute_instant, trigger_instant
from lightning_ptm.planning.placement_data import Placement
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Kind, Operation


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy to the device, or an all-gather, issued at a trigger; `after`: what has to be complete before it starts."""

    name: tuple[int, ...]
    gathers: bool
    trigger: int
    pages: int
    after: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Transfers in issue order, and by tick those that its compute needs."""

    transfers: Sequence[Transfer]
    needed: Sequence[Sequence[tuple[int, ...]]]


@dataclass(slots=True, eq=False)
class _Page:
    """A page of a unit's shard for one use. Its data is there before if the use before has it at `trigger`."""

    use: _Use
    number: int
    gathered_pages: int
    trigger: int | None = None
    gather: int | None = None

    @property
    def stays(self) -> bool:
        before = self.use.before
        return before is not None and self.trigger is not None and self.trigger <= before.end

    @property
    def moved(self) -> int:
        """The trigger at which its data was copied."""
        assert self.trigger is not None
        before = self.use.before
        return before.pages[self.number].moved if self.stays and before is not None else self.trigger

    @property
    def instants(self) -> tuple[int, int]:
        """First and last instant in which it takes memory for this use."""
        before, trigger = self.use.before, self.trigger
        assert trigger is not None
        first = compute_instant(before.end) + 1 if self.stays and before is not None else compute_instant(trigger)
        return first, compute_instant(self.use.end)


@dataclass(slots=True, eq=False)
class _Use:
    """A layer of the algorithm: consecutive ticks in which a unit is used."""

    number: int
    unit: int
    first: int
    end: int
    before: _Use | None
    pages: list[_Page] = field(default_factory=list)


def _uses(layout: ModelLayout, trace: Trace) -> list[_Use]:
    found: list[_Use] = []
    for unit, use in enumerate(uses_of(trace, len(layout.units)).units):
        full, shard = layout.full_pages(unit), layout.gathered_pages(unit) if layout.shared else layout.full_pages(unit)
        before: _Use | None = None
        for span in use.spans():
            made = _Use(0, unit, span.first, span.end, before)
            for page in range(shard):
                gathered = full * (page + 1) // shard - full * page // shard if layout.shared else 0
                made.pages.append(_Page(made, page, gathered))
            found.append(made)
            before = made
    found.sort(key=lambda use: (use.first, use.unit))
    for number, use in enumerate(found):
        use.number = number
    return found


def algorithm_1(layout: ModelLayout, placement: Placement, trace: Trace, page_limit: int) -> Schedule | None:
    """Returns the schedule; None if a layer does not fit even after all movements of later layers have been popped."""
    uses, memory = _uses(layout, trace), Occupancy(len(trace.ticks))
    index = uses_of(trace, len(layout.units))
    entered = entered_gradients(layout, index)
    for unit in range(len(layout.units)):
        for demand in gradient_demands(index, unit, placement.gradients[unit], entered).least:
            demand.add_to(memory)

    def available(tick: int) -> int:
        return page_limit - memory.peak(trigger_instant(tick), compute_instant(tick))

    def move(page: _Page, trigger: int) -> None:
        page.trigger = trigger
        memory.add(*page.instants, 1)
        movements.append(page)

    # Phase 1
    movements: list[_Page] = []
    wait_stack: list[_Page] = []
    for use in uses:
        for page in use.pages:
            move(page, 0)
    for tick in range(len(trace.ticks)):
        layers = [use for use in uses if use.first == tick]
        here = [page for use in layers for page in use.pages]
        size = sum([page.gathered_pages for page in here])
        while available(tick) < size + sum([page.trigger is None for page in here]):
            later = [at for at, page in enumerate(movements) if page.use.first > tick]
            if not later:
                return None
            popped = movements.pop(later[-1])
            first, last = popped.instants
            memory.add(first, last, -1)
            popped.trigger = None
            wait_stack.append(popped)
        for page in [page for page in here if page.trigger is None]:
            wait_stack.remove(page)
            move(page, tick)
        for page in here if layout.shared else ():
            page.gather = tick
            memory.add(compute_instant(tick), compute_instant(page.use.end), page.gathered_pages)
        while wait_stack and available(tick) > 1:
            move(wait_stack.pop(), tick)
    # Phase 2
    for page in [page for use in uses for page in use.pages] if layout.shared else ():
        assert page.gather is not None and page.trigger is not None
        last = trigger_instant(page.gather)
        start = memory.earliest(compute_instant(page.moved), last, page_limit - page.gathered_pages)
        earlier = min(start // 2, page.gather)
        memory.add(compute_instant(earlier), last, page.gathered_pages)
        page.gather = earlier
    if memory.peak() > page_limit:
        return None
    return _schedule_of(uses, trace)


def _schedule_of(uses: Sequence[_Use], trace: Trace) -> Schedule:
    moves: list[Transfer] = []
    gathers: list[Transfer] = []
    needed: list[list[tuple[int, ...]]] = [[] for _ in trace.ticks]
    copies: dict[tuple[int, int], tuple[int, ...]] = {}
    for use in uses:
        for page in use.pages:
            name = (use.number, page.number)
            if not page.stays:
                assert page.trigger is not None
                moves.append(Transfer(name, False, page.trigger, 1))
                copies[use.unit, page.number] = name
            if page.gather is not None:
                after = (copies[use.unit, page.number],)
                gathers.append(Transfer((*name, 1), True, page.gather, page.gathered_pages, after))
            name = copies[use.unit, page.number] if page.gather is None else (*name, 1)
            for tick in range(use.first, use.end + 1):
                needed[tick].append(name)
    return Schedule([*moves, *gathers], needed)


def of_plan(layout: ModelLayout, plan: Plan, trace: Trace) -> Schedule:
    """The transfers of a plan: each moves or gathers a whole unit."""
    transfers: list[Transfer] = []
    latest: dict[tuple[int, Kind], tuple[int, ...]] = {}
    needed: list[list[tuple[int, ...]]] = [[] for _ in trace.ticks]
    for number, task in enumerate(plan.tasks):
        if task.operation is Operation.COMPUTE:
            live = [unit for unit in trace.ticks[task.trigger].live if (unit, Kind.FULL) in latest]
            needed[task.trigger] = [latest[unit, Kind.FULL] for unit in live]
        elif task.operation in (Operation.FETCH, Operation.GATHER):
            gathers = task.operation is Operation.GATHER
            whole = gathers or not layout.gathers(task.unit)
            pages = layout.full_pages(task.unit) if whole else layout.gathered_pages(task.unit)
            after = (latest[task.unit, Kind.PARAMETER],) if gathers else ()
            transfers.append(Transfer((number,), gathers, task.trigger, pages, after))
            latest[task.unit, task.kind] = (number,)
    return Schedule(transfers, needed)


def in_pages(schedule: Schedule) -> Schedule:
    """The same schedule, with each all-gather in parts of a page, which begin as soon as their page of the shard is there."""
    pages = {each.name: each.pages for each in schedule.transfers}
    transfers: list[Transfer] = []
    for each in schedule.transfers:
        for page in range(each.pages):
            after = [(*name, page * pages[name] // each.pages) for name in each.after]
            transfers.append(Transfer((*each.name, page), each.gathers, each.trigger, 1, tuple(after)))
    needed = [[(*name, page) for name in names for page in range(pages[name])] for names in schedule.needed]
    return Schedule(transfers, needed)


def step_seconds(schedule: Schedule, compute_s: Sequence[float], move_s: float, gather_s: float) -> float:
    """Returns the seconds of an iteration: one queue of copies, one of all-gathers, and the ticks' compute.

    Args:
        move_s, gather_s: of a page.
    """
    done: dict[tuple[int, ...], float] = {}
    free: Mapping[bool, list[float]] = {False: [0.0], True: [0.0]}
    by_trigger: list[list[Transfer]] = [[] for _ in compute_s]
    for transfer in schedule.transfers:
        by_trigger[transfer.trigger].append(transfer)
    now = 0.0
    for tick, seconds in enumerate(compute_s):
        for transfer in by_trigger[tick]:
            start = max([now, free[transfer.gathers][0], *(done[name] for name in transfer.after)])
            done[transfer.name] = start + transfer.pages * (gather_s if transfer.gathers else move_s)
            free[transfer.gathers][0] = done[transfer.name]
        now = max([now, *(done[name] for name in schedule.needed[tick])]) + seconds
    return now
