"""Scheduler: from homes and a trace to a plan for one iteration (Algorithm 1 of the paper).

An iteration is one micro-batch or several. Owns the order of tasks. Pure: equal inputs give equal plans on all ranks.
The device budget counts pages over instants (page_occupancy.py). Algorithm 1 issues all fetches at trigger 0 and pops
the last one while a unit does not fit. Its result is that each fetch, nearest need first, gets the earliest trigger
from which memory can hold its pages until the need. This file computes that directly, with one O(log ticks) query per
fetch instead of a replay of the memory for each.

I1: a unit is released at the trigger after its last use of a span, never later.
I2: of all copies, those with the nearest next use are kept between two uses (Belady).
I3: priorities: least demand first, then overlap by one tick for all, then fewer copies, then copies as early as
    possible.
    One kind of copy is kept before all others, if memory permits: a copy that the next backward of the same unit needs after
    a tick of the root. Each backward pass begins with such a tick, and micro-batches may go through a unit one after another.
I4: the plan says to which frames pages come (frames.py). Where not all lifetimes find adjacent frames, copies are kept and
    advanced in fewer pages.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_ptm.planning.capacity_words import device_capacity_error
from lightning_ptm.planning.device_demand import (
    Demand,
    GradientStay,
    entered_gradients,
    gradient_demands,
    gradient_stays,
    reserved_ticks,
)
from lightning_ptm.planning.frames import MANY, FrameBlock, place_blocks
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.lifetime import Uses, uses_of
from lightning_ptm.planning.page_occupancy import Occupancy, compute_instant, trigger_instant
from lightning_ptm.planning.placement_data import Budget, PassingPool, Placement
from lightning_ptm.planning.plan import ISSUE_ORDER, GradientFrame, Plan, Task
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Kind, Operation, Phase, Tier

_ATTEMPTS = 12
"""Schedules that are made until all lifetimes of one find frames; only one for very many lifetimes."""


@dataclass(slots=True)
class _Stay:
    """An interval of ticks in which a unit's copy is on the device.

    The copy enters at `trigger`, is needed from tick `need`, and leaves after `end`.
    """

    unit: int
    position: int
    """Index of the span of the unit that it serves."""
    kind: Kind
    pages: int
    trigger: int
    need: int
    end: int
    joins_previous: bool = False
    """Whether the data was kept since the previous stay, so that this stay needs no copy of its own."""
    joins_next: bool = False
    """Whether the data is kept until the next stay, so that it does not leave."""
    dropped: bool = False
    """Not needed any more: the gathered flat that it served was kept."""


def schedule(
    layout: ModelLayout, placement: Placement, trace: Trace, budget: Budget, pool: PassingPool | None = None
) -> Plan:
    """Returns the plan of one iteration.

    One rank: a unit with its home on the device needs no fetch; any other is fetched into its full run of pages and
    released. Several ranks: FETCH copies shard pages to the device, GATHER builds the full flats, EVICT frees the
    fetched pages.

    Args:
        layout: the model on this world size.
        placement: homes, from `place` with this layout.
        trace: one iteration; may differ from the one given to `place`.
        budget: bytes of this rank.
        pool: frames of passing pages; None: as many as `placement` has bytes for.

    Raises:
        CapacityError: a tick's units and gradients do not fit on the device.
    """
    problem = _Problem(layout, placement, trace, budget, pool)
    best: _Scheduler | None = None
    reserved: list[Demand] = []
    for attempt in range(_ATTEMPTS):
        scheduler = _Scheduler(problem, reserved)
        scheduler.choose()
        if best is None or len(scheduler.without_frames) < len(best.without_frames):
            best = scheduler
        if not scheduler.without_frames or scheduler.block_count > MANY:
            break
        # Fewer copies are kept and advanced at these instants: what is left is easier to place.
        pages = 1 + attempt // 2
        reserved += [Demand(block.first, block.last, pages) for block in scheduler.without_frames]
    assert best is not None
    return best.plan()


class _Problem:
    """The inputs of one call of `schedule`, and what follows from them alone."""

    def __init__(
        self, layout: ModelLayout, placement: Placement, trace: Trace, budget: Budget, pool: PassingPool | None
    ) -> None:
        self.layout = layout
        self.placement = placement
        self.trace = trace
        self.uses: Uses = uses_of(trace, len(layout.units))
        self.entered = entered_gradients(layout, self.uses)
        self.reserved_bytes = placement.at_home_bytes[Tier.DEVICE] + placement.staged_bytes(Tier.DEVICE)
        self.limit = min(placement.gather_bytes, budget[Tier.DEVICE] - self.reserved_bytes) // layout.page_size
        self.pool = pool or PassingPool(self.limit)
        self.reserved = reserved_ticks(trace, self.pool.around, self.pool.by_need)
        """Pages of units that no plan contains."""
        self.gradients: list[GradientStay] = [
            stay
            for use, gradients in zip(self.uses.units, placement.gradients, strict=True)
            for stay in gradient_stays(use, gradients, self.pool.in_grad)
        ]

    def frames(self, first: int, last: int) -> int:
        """Returns the limit of the frames of a block at the instants first..last."""
        at = bisect.bisect_left(self.reserved, first, key=lambda demand: demand.first)
        reserves = at < len(self.reserved) and self.reserved[at].first <= last
        return self.pool.frames - (self.pool.by_need if reserves else 0)

    def pages(self, unit: int, kind: Kind) -> Sequence[int]:
        """Returns the pages of each flat of a unit that a copy of this kind takes, in the order of flats."""
        page, at_home = self.layout.page_size, self.placement.homes[unit].parameter is Tier.DEVICE
        flats = self.layout.flats_of(unit)
        if kind is Kind.PARAMETER:
            return [flat.shard_pages for flat in flats if flat.shared]
        moved = [flat for flat in flats if flat.shared or not at_home or flat.code is not None]
        return [-(-flat.padded_bytes // page) for flat in moved]


class _Room:
    """Pages that are taken at each instant: of all that the budget counts, and of those that are frames of the pool."""

    def __init__(self, problem: _Problem) -> None:
        self.limit = problem.limit
        self.counted = Occupancy(problem.uses.tick_count)
        self._frames = problem.pool.frames
        # Gradients in `.grad` are counted, and have no frames.
        self._paged = Occupancy(problem.uses.tick_count) if problem.pool.frames < problem.limit else None
        if self._paged is not None:
            for stay in problem.gradients:
                self._paged.add(stay.first, stay.last, stay.pages)

    def add(self, first: int, last: int, pages: int) -> None:
        """Takes pages for a copy; gives them back if `pages` is negative."""
        self.counted.add(first, last, pages)
        if self._paged is not None:
            self._paged.add(first, last, pages)

    def add_gradient(self, demand: Demand) -> None:
        """Takes pages that the budget counts for a gradient."""
        demand.add_to(self.counted)

    def fits(self, first: int, last: int, pages: int) -> bool:
        """Returns whether so many more pages are free at each of the instants first..last."""
        return self.counted.peak(first, last) + pages <= self.limit and (
            self._paged is None or self._paged.peak(first, last) + pages <= self._frames
        )

    def earliest(self, floor: int, last: int, pages: int) -> int:
        """Returns the smallest instant x >= floor such that so many more pages are free from x to `last`."""
        start = self.counted.earliest(floor, last, self.limit - pages)
        if self._paged is None:
            return start
        return max(start, self._paged.earliest(floor, last, self._frames - pages))


class _Scheduler:
    """One plan for a problem: the stays found so far, and the pages that they take.

    Args:
        reserved: pages that copies must not take if they are kept or advanced.
    """

    def __init__(self, problem: _Problem, reserved: Sequence[Demand] = ()) -> None:
        # Configuration.
        self._problem = problem
        self._layout = problem.layout
        self._placement = problem.placement
        self._trace = problem.trace
        self._uses = problem.uses
        self._reserved = reserved
        # State.
        self._room = _Room(problem)
        self._full: list[list[_Stay]] = []
        self._shards: list[list[_Stay]] = []
        self._linger: list[Demand] = []
        self._frames: dict[tuple[int, Kind, int], tuple[int, ...]] = {}
        """By unit, kind and position of the first stay: the frames of a copy."""
        self._gradients: list[GradientFrame] = []
        self.without_frames: list[FrameBlock] = []
        """Lifetimes for which no adjacent frames were found."""
        self.block_count = 0
        """Number of all lifetimes."""

    def choose(self) -> None:
        """Runs the phases of I3, and places what they have chosen. Raises CapacityError as `schedule`."""
        self._take_least()
        for demand in self._reserved:
            self._room.add(demand.first, demand.last, demand.pages)
        self._keep_between_backwards()
        self._overlap_one_tick()
        stays = self._shards if self._layout.shared else self._full
        self._keep(stays)
        for stay in self._by_need(stays):
            self._advance(stay, floor=0)
        if self._layout.shared:
            self._gather_early()
        self._place()

    def plan(self) -> Plan:
        """Returns the tasks in order."""
        tasks = [*self._copies(), *self._computes()]
        order = {operation: rank for rank, operation in enumerate(ISSUE_ORDER)}
        # Within an operation, nearest need first.
        return Plan(
            tuple(sorted(tasks, key=lambda task: (task.trigger, order[task.operation], self._need(task), task.unit))),
            self._uses.tick_count,
            tuple(self._gradients),
        )

    def _place(self) -> None:
        """Chooses the frames of all copies and gradients (I4)."""
        copies: list[tuple[tuple[int, Kind, int], int]] = []
        blocks: list[FrameBlock] = []
        of_root: list[int] = []
        frames = self._problem.frames
        last_instant = compute_instant(self._uses.tick_count - 1) - compute_instant(0)
        for of_unit in (*self._full, *self._shards):
            begun: _Stay | None = None
            for stay in of_unit:
                if stay.dropped:
                    continue
                begun = stay if begun is None or not stay.joins_previous else begun
                if not stay.joins_next:
                    first, last = compute_instant(begun.trigger), compute_instant(stay.end)
                    sizes = self._problem.pages(stay.unit, stay.kind)
                    copies.append(((stay.unit, stay.kind, begun.position), len(sizes)))
                    limit = frames(first, last)
                    if not stay.unit and stay.kind is Kind.FULL and last - first >= last_instant:
                        of_root += range(len(blocks), len(blocks) + len(sizes))
                    blocks += [FrameBlock(first, last, pages, limit) for pages in sizes]
        gradients = self._problem.gradients
        blocks += [FrameBlock(each.first, each.last, each.pages, frames(each.first, each.last)) for each in gradients]
        self._end_with_root(blocks, of_root, gradients)
        self.block_count = len(blocks)
        frames_of = place_blocks(blocks, lowest=of_root)
        self.without_frames = [block for block, frame in zip(blocks, frames_of, strict=True) if frame is None]
        found = iter(frames_of)
        for copy, count in copies:
            of_flats = [next(found) for _ in range(count)]
            placed = tuple([frame for frame in of_flats if frame is not None])
            if len(placed) == count:
                self._frames[copy] = placed
        for gradient, frame in zip(gradients, found, strict=True):
            if frame is not None:
                self._gradients.append(GradientFrame(gradient.flat, gradient.kind, gradient.tick, frame))

    def _end_with_root(
        self, blocks: list[FrameBlock], of_root: Sequence[int], gradients: Sequence[GradientStay]
    ) -> None:
        """Keeps the root's frames from the last block's gradients, which come after the last tick, but before the root
        leaves; its own gradients come then.

        Args:
            blocks: changed; those of `gradients` are the last.
            of_root: numbers of the root's blocks, if it stays during all ticks.
        """
        leaves = trigger_instant(self._uses.tick_count)
        own = [
            number
            for number, stay in enumerate(gradients, len(blocks) - len(gradients))
            if stay.first == leaves and not self._layout.flats[stay.flat].unit
        ]
        there = [
            number for number, block in enumerate(blocks) if block.first <= leaves <= block.last and number not in own
        ]
        if sum(blocks[number].pages for number in (*of_root, *there)) <= self._problem.pool.frames:
            for number in of_root:
                blocks[number] = replace(blocks[number], last=leaves)
            for number in own:
                blocks[number] = replace(blocks[number], first=leaves + 1)

    def _take_least(self) -> None:
        """Fetches every unit at its need and drops it after its use; raises when not even that fits."""
        for unit, use in enumerate(self._uses.units):
            homes = self._placement.homes[unit]
            at_home = homes.parameter is Tier.DEVICE
            full_pages = self._layout.full_pages(unit, in_place=at_home)
            shard_pages = self._layout.gathered_pages(unit)
            spans = use.spans() if full_pages else ()
            self._full.append(
                [
                    _Stay(unit, position, Kind.FULL, full_pages, span.first, span.first, span.end)
                    for position, span in enumerate(spans)
                ]
            )
            fetched = self._layout.gathers(unit) and not at_home
            self._shards.append(
                [
                    _Stay(unit, position, Kind.PARAMETER, shard_pages, span.first, span.first, span.first)
                    for position, span in enumerate(spans if fetched else ())
                ]
            )
            for stay in self._full[unit] + self._shards[unit]:
                self._room.add(compute_instant(stay.trigger), compute_instant(stay.end), stay.pages)
            demands = gradient_demands(self._uses, unit, self._placement.gradients[unit], self._problem.entered)
            for demand in demands.least:
                self._room.add_gradient(demand)
            self._linger += demands.linger
        for demand in self._problem.reserved:
            self._room.add(demand.first, demand.last, demand.pages)
        counted = self._room.counted
        if counted.peak() > self._room.limit:
            raise device_capacity_error(
                self._layout,
                self._trace,
                counted.peak_instant() // 2,
                need_pages=counted.peak(),
                have_pages=self._room.limit,
                reserved_bytes=self._problem.reserved_bytes,
                unified=self._placement.staging_tier.computes,
            )

    def _keep_between_backwards(self) -> None:
        """Keeps copies of a unit during the tick of the root between two of its backwards (I3)."""
        ticks = self._trace.ticks
        for of_unit in self._full:
            for before, after in pairwise(of_unit):
                ends, begins = ticks[before.end], ticks[after.need]
                same = ends.unit == begins.unit == after.unit and ends.phase is begins.phase is Phase.BACKWARD
                if not same or after.need != before.end + 2 or ticks[before.end + 1].unit:
                    continue
                if self._join(before, after):
                    self._drop_shards(after.unit, after.position)

    def _join(self, before: _Stay, after: _Stay) -> bool:
        """Keeps a copy from one stay to the next if memory permits; returns whether it does."""
        first, last = compute_instant(before.end) + 1, trigger_instant(after.trigger)
        if not self._room.fits(first, last, after.pages):
            return False
        self._room.add(first, last, after.pages)
        before.joins_next = after.joins_previous = True
        return True

    def _overlap_one_tick(self) -> None:
        """Advances copies to one tick before their need, and lets gradients leave one tick later, if memory permits."""
        for stay in self._by_need(self._full):
            early = max(stay.need - 1, 0)
            if not self._layout.shared:
                self._advance(stay, floor=early)
                continue
            shards = self._shards[stay.unit]
            if shards:
                self._advance(shards[stay.position], floor=early)
            self._advance_gather(stay, floor=early)
            if shards:
                self._advance(shards[stay.position], floor=max(early - 1, 0))
        for linger in self._linger:
            if self._room.counted.peak(linger.first, linger.last) + linger.pages <= self._room.limit:
                self._room.add_gradient(linger)

    def _keep(self, stays: list[list[_Stay]]) -> None:
        """Joins stays of a unit over the gap between them, nearest next use first (I2)."""
        pairs = [pair for of_unit in stays for pair in pairwise(of_unit)]
        for before, after in sorted(pairs, key=lambda pair: (pair[1].need, pair[1].unit)):
            if not (after.joins_previous or before.dropped or after.dropped):
                self._join(before, after)

    def _gather_early(self) -> None:
        """Moves each gather to the earliest tick at which memory has room.

        If the flat can stay gathered since its previous use, its release and this gather are dropped.
        """
        for stay in self._by_need(self._full):
            if stay.position == 0:
                self._advance_gather(stay, floor=0)
                continue
            if stay.joins_previous:
                continue
            before = self._full[stay.unit][stay.position - 1]
            if self._join(before, stay):
                self._drop_shards(stay.unit, stay.position)
            else:
                self._advance_gather(stay, floor=before.end + 1)

    def _advance(self, stay: _Stay, floor: int) -> None:
        """Gives a copy the earliest trigger, not before `floor`, from which memory can hold it."""
        if stay.joins_previous or stay.dropped:
            return
        last = trigger_instant(stay.trigger)
        start = self._room.earliest(compute_instant(floor), last, stay.pages)
        # A copy holds its pages from the compute instant of its trigger on. `start` is at or before that instant.
        trigger = min(start // 2, stay.trigger)
        self._room.add(compute_instant(trigger), last, stay.pages)
        stay.trigger = trigger

    def _advance_gather(self, gather: _Stay, floor: int) -> None:
        """Advances a gather, not before its shard pages are on the device; these may then leave earlier."""
        shards = self._shards[gather.unit]
        if not shards or gather.joins_previous:
            self._advance(gather, floor)
            return
        shard = shards[gather.position]
        if not shard.joins_previous:
            floor = max(floor, shard.trigger)
        self._advance(gather, min(floor, gather.trigger))
        if not shard.joins_next:
            self._room.add(compute_instant(gather.trigger) + 1, compute_instant(shard.end), -shard.pages)
            shard.end = gather.trigger

    def _drop_shards(self, unit: int, position: int) -> None:
        """Drops the shard pages of a gather that is omitted because its flat was kept."""
        if not self._shards[unit]:
            return
        shard = self._shards[unit][position]
        if shard.joins_next:
            return  # The shard pages serve a later gather.
        shard.dropped = True
        if not shard.joins_previous:
            self._room.add(compute_instant(shard.trigger), compute_instant(shard.end), -shard.pages)
            return
        before, gather = self._shards[unit][position - 1], self._full[unit][position - 1]
        before.joins_next = False
        if gather.joins_previous:  # The stay before this one was kept for this one only.
            self._room.add(compute_instant(before.end) + 1, compute_instant(shard.end), -shard.pages)
            self._drop_shards(unit, position - 1)
        else:
            self._room.add(compute_instant(gather.trigger) + 1, compute_instant(shard.end), -shard.pages)
            before.end = gather.trigger

    def _by_need(self, stays: list[list[_Stay]]) -> list[_Stay]:
        return sorted((stay for of_unit in stays for stay in of_unit), key=lambda stay: (stay.need, stay.unit))

    def _copies(self) -> Iterator[Task]:
        for stays, leave in ((self._full, Operation.RELEASE), (self._shards, Operation.EVICT)):
            for of_unit in stays:
                for stay in of_unit:
                    gathered = stay.kind is Kind.FULL and self._layout.gathers(stay.unit)
                    enter = Operation.GATHER if gathered else Operation.FETCH
                    if not stay.joins_previous and not stay.dropped:
                        frames = self._frames.get((stay.unit, stay.kind, stay.position), ())
                        yield Task(enter, stay.unit, stay.kind, stay.trigger, frames)
                    if not stay.joins_next and not stay.dropped:
                        yield Task(leave, stay.unit, stay.kind, stay.end + 1)

    def _computes(self) -> Iterator[Task]:
        for number, tick in enumerate(self._trace.ticks):
            yield Task(Operation.COMPUTE, tick.unit, Kind.FULL, number)

    def _need(self, task: Task) -> int:
        """Returns the tick at which the task's copy is first used; the task's trigger when it brings no copy."""
        if task.operation in (Operation.FETCH, Operation.GATHER):
            return self._uses.next_use(task.unit, task.trigger - 1)
        return task.trigger
