"""An iteration on paper: device pages at each tick, and what the executor does of itself for units that are in no plan.

Follows a plan as the executor does, and counts what stores and gradients take and give back. Allocates nothing. What is
decided here is what the executor and the engine decide: experts that ranks divide are fetched when their tokens have come,
each while the one before computes, stay until their update, and are the first to be given up (executor.py, I4).

I1: pages are taken and given back in the order in which the runtime does it; never more than the pool has.
I2: gradients take device pages from the end of a unit's last backward tick, which is when they are laid out there. On one
    rank until the next trigger, when they have left. On several, whole and reduced: until the next unit's have been laid
    out where updates run behind the backward (an update is one unit behind, engine.py), else to the end of the backward.
    `.grad`, which autograd fills before that, is no page.
I3: the first iteration's backward follows no plan (the root's comes first there, not last): units then stay until their
    update, or until room is short.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from lightning_ptm.planning.plan import ISSUE_ORDER, Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.terms import Kind, Operation, Phase, Tier


class Replay:
    """Device pages at ticks of one iteration, beside those that are taken once.

    Args:
        trace: the iteration, units that are in no plan included.
        fixed_pages: of the device tier, taken once.
        again: of units that are in no plan, those whose layer is computed again in the backward.
        follows: whether the backward follows the plan, too (I3).
    """

    def __init__(
        self, drawn: Blueprint, trace: Trace, fixed_pages: int, again: Collection[int], *, follows: bool = True
    ) -> None:
        # Configuration.
        self._drawn = drawn
        self._layout = drawn.layout
        self._ticks = trace.ticks
        self._room = max(0, drawn.pool_bytes[Tier.DEVICE] // drawn.layout.page_size - fixed_pages)
        self._again = again
        self._follows = follows
        self._one_rank = drawn.layout.world_size == 1
        self._by_need = frozenset(drawn.by_need)
        layers = enumerate(drawn.experts.units) if drawn.experts is not None else ()
        self._layer_of = {unit: place for place, layer in layers for of_expert in layer for unit in of_expert}
        last = {unit: at for at, tick in enumerate(trace.ticks) if tick.phase is Phase.BACKWARD for unit in tick.live}
        self._complete: list[list[int]] = [[] for _ in trace.ticks]
        """Units whose gradients are complete at the end of a tick."""
        for unit, at in last.items():
            self._complete[at].append(unit)
        # State.
        self._trigger = 0
        self._used = 0
        self._peak = 0
        self._full: dict[int, int] = {}
        """Pages of gathered or fetched units."""
        self._shards: dict[int, int] = {}
        """Pages of shards that were fetched for a gather."""
        self._gradients: dict[int, int] = {}
        self._behind: list[int] = []
        """Units whose gradients were laid out and have not gone to the update."""
        self._leaving: list[int] = []
        """Units whose gradients leave behind the tick."""
        self._spare: list[int] = []
        self._others: list[int] = []
        """Units that may be given up, and some that have been: those that are in no plan; others, where none is followed.
        Heaps."""
        self._issued: list[Task] = []

    def run(self, plan: Plan) -> tuple[list[int], Plan]:
        """Pages at the worst moment of each tick, and after the last; and what was done, `plan` included.

        Args:
            plan: for `drawn.planned(trace)`.
        """
        planned = self._in_whole_trace(plan) if self._by_need else plan
        triggers: list[list[Task]] = [[] for _ in range(planned.tick_count + 1)]
        for task in planned.tasks:
            triggers[task.trigger].append(task)
        found = []
        for trigger, due in enumerate(triggers):
            self._trigger = trigger
            self._let_leave()
            self._peak = self._used
            tick = self._ticks[trigger] if trigger < planned.tick_count else None
            if self._follows or (tick is not None and tick.phase is Phase.FORWARD):
                for task in due:
                    self._take(task)
            elif tick is not None:
                self._fetch(tick.unit, tick.live)
            if tick is None:
                self._finish()
            else:
                if tick.unit in self._by_need:
                    self._call(tick)
                for unit in self._complete[trigger]:
                    self._lay_out_gradients(unit)
            found.append(min(self._peak, self._room))
        if not self._by_need:
            return found, plan
        order = {operation: rank for rank, operation in enumerate(ISSUE_ORDER)}
        tasks = sorted((*planned.tasks, *self._issued), key=lambda task: (task.trigger, order[task.operation]))
        return found, Plan(tuple(tasks), planned.tick_count)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def _in_whole_trace(self, plan: Plan) -> Plan:
        """The plan's tasks among the ticks of units that are in none.

        Those are parts of the tick around them: in the forward they come behind its beginning, in the backward as well,
        though the trace, in which a unit stands for its end, has them before it.
        """
        places = [at for at, tick in enumerate(self._ticks) if tick.unit not in self._by_need]
        triggers = []
        for at in places:
            first = at
            while self._ticks[at].phase is Phase.BACKWARD and self._is_before(first):
                first -= 1
            triggers.append(first)
        triggers.append(len(self._ticks))
        moved = []
        for task in plan.tasks:
            computes = task.operation is Operation.COMPUTE
            at = places[task.trigger] if computes else triggers[task.trigger]
            moved.append(Task(task.operation, task.unit, task.kind, task.first_page, task.last_page, at))
        for at, tick in enumerate(self._ticks):
            if tick.unit in self._by_need:
                self._issue(Operation.COMPUTE, tick.unit, Kind.FULL, at)
        return Plan(tuple(moved), len(self._ticks))

    def _is_before(self, at: int) -> bool:
        """Whether the tick before is the backward of a unit that is in no plan."""
        before = self._ticks[at - 1]
        return before.unit in self._by_need and before.phase is Phase.BACKWARD

    def _take(self, task: Task) -> None:
        layout, unit = self._layout, task.unit
        match task.operation:
            case Operation.FETCH | Operation.GATHER if task.kind is Kind.FULL:
                self._make_room(layout.full_pages(unit), (unit,))
                self._take_full(unit)
            case Operation.FETCH:
                pages = task.last_page - task.first_page
                self._make_room(pages, (unit,))
                self._shards[unit] = pages
                self._hold(pages)
            case Operation.RELEASE:
                self._used -= self._full.pop(unit, 0)
            case Operation.EVICT:
                self._used -= self._shards.pop(unit, 0)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _lay_out_gradients(self, unit: int) -> None:
        drawn, layout = self._drawn, self._layout
        full, reduced = layout.full_gradient_pages(unit), layout.trainable_pages(unit)
        home = drawn.gradient_home(unit)
        if self._one_rank:
            if home is not Tier.DEVICE:
                self._gradients[unit] = full
                self._hold(full)
                self._leaving.append(unit)
            return
        if not reduced or (drawn.accumulates_whole and self._trigger < len(self._ticks)):
            return
        passes = self._passes(unit)
        part = reduced if layout.gathers(unit) else 0
        pages = full + part + (reduced if passes else 0)
        self._make_room(pages, (unit, *self._behind))
        self._hold(pages)
        if not part and home is Tier.DEVICE:  # whole on one rank: it is copied at once
            self._used -= full
            pages -= full
        self._gradients[unit] = pages
        if not part and home is not Tier.DEVICE:
            self._leaving.append(unit)
        self._behind.append(unit)
        if drawn.update_in_backward and len(self._behind) > 1:
            self._update(self._behind.pop(0), self._trigger + 1)

    def _update(self, unit: int, trigger: int) -> None:
        """A unit's reduction has ended, and its gradients go to the update: it is given up."""
        drawn, layout = self._drawn, self._layout
        waits = layout.trainable_pages(unit)
        stays = waits if self._passes(unit) or (layout.gathers(unit) and self._home(unit) is not Tier.DEVICE) else 0
        stays = min(stays, self._gradients.get(unit, 0))
        self._used -= self._gradients.get(unit, 0) - stays
        self._gradients[unit] = stays
        self._leaving.append(unit)
        if unit in self._by_need:
            if layout.gathers(unit):
                self._issue(Operation.REDUCE, unit, Kind.GRADIENT, trigger)
            if drawn.placement.homes[unit].gradient is not Tier.DEVICE:
                self._issue(Operation.OFFLOAD, unit, Kind.GRADIENT, trigger)
            self._issue(Operation.UPDATE, unit, Kind.MASTER, trigger)
        if layout.gathers(unit) or drawn.placement.homes[unit].parameter is not Tier.DEVICE:
            self._give_up(unit, trigger)

    def _finish(self) -> None:
        """The backward has ended, and the step is taken. What is reduced once a step is reduced now; the first iteration has
        no step then."""
        if self._drawn.accumulates_whole and self._follows:
            for unit in reversed(range(len(self._layout.units))):
                self._lay_out_gradients(unit)
        for unit in self._behind:
            self._update(unit, self._trigger)
        self._behind.clear()
        for unit in [unit for unit in self._full if unit in self._by_need]:
            self._give_up(unit, self._trigger)

    def _passes(self, unit: int) -> bool:
        return (
            self._home(unit) is Tier.DEVICE
            and not self._drawn.placement.keeps_gradients
            and self._drawn.lock_free is None
        )

    def _home(self, unit: int) -> Tier:
        return self._drawn.gradient_home(unit)

    def _let_leave(self) -> None:
        for unit in self._leaving:
            self._used -= self._gradients.pop(unit, 0)
        self._leaving.clear()

    # -- units that no plan fetches -----------------------------------------------------------------------------------

    def _call(self, tick: Tick) -> None:
        """The tick is of a unit that is in no plan: it is fetched if it is not there, and so is the one expected next."""
        self._fetch(tick.unit, (tick.unit,))
        # A backward pass expects nobody, but where the layer is computed again in it.
        following = self._ticks[self._trigger + 1] if self._trigger + 1 < len(self._ticks) else tick
        expected = following.phase is tick.phase and (tick.phase is Phase.FORWARD or tick.unit in self._again)
        if expected and self._layer_of.get(following.unit) == self._layer_of[tick.unit]:
            self._fetch(following.unit, (tick.unit, following.unit))

    def _fetch(self, unit: int, wanted: Collection[int]) -> None:
        layout = self._layout
        gathers, away = layout.gathers(unit), self._drawn.placement.homes[unit].parameter is not Tier.DEVICE
        if unit in self._full or not (gathers or away):
            return
        pages = layout.full_pages(unit)
        shard = layout.shard_pages(unit) if gathers and away and unit not in self._shards else 0
        self._make_room(pages + shard, wanted)
        self._take_full(unit)
        if shard:
            self._shards[unit] = shard
            self._hold(shard)
            self._issue(Operation.FETCH, unit, Kind.PARAMETER, self._trigger)
        self._issue(Operation.GATHER if gathers else Operation.FETCH, unit, Kind.FULL, self._trigger)

    def _take_full(self, unit: int) -> None:
        self._full[unit] = self._layout.full_pages(unit)
        if unit in self._by_need:
            heapq.heappush(self._spare, unit)
        elif not self._follows and unit != 0:
            heapq.heappush(self._others, unit)
        self._hold(self._full[unit])

    def _give_up(self, unit: int, trigger: int) -> None:
        full, shard = self._full.pop(unit, 0), self._shards.pop(unit, 0)
        self._used -= full + shard
        if unit in self._by_need and full:
            self._issue(Operation.RELEASE, unit, Kind.FULL, trigger)
        if unit in self._by_need and shard:
            self._issue(Operation.EVICT, unit, Kind.PARAMETER, trigger)

    def _issue(self, operation: Operation, unit: int, kind: Kind, trigger: int) -> None:
        layout = self._layout
        pages = layout.trainable_pages(unit) if kind in (Kind.GRADIENT, Kind.MASTER) else layout.shard_pages(unit)
        self._issued.append(Task(operation, unit, kind, 0, pages, trigger))

    # -- pages --------------------------------------------------------------------------------------------------------

    def _hold(self, pages: int) -> None:
        self._used += pages
        self._peak = max(self._peak, self._used)

    def _make_room(self, pages: int, wanted: Collection[int]) -> None:
        """Gives up units that nobody wants now until so many pages are free: those that are in no plan, first ones first;
        where no plan is followed, others, too."""
        kept: list[int] = []
        for units in (self._spare, self._others):
            while units and self._used + pages > self._room:
                unit = heapq.heappop(units)
                if unit in wanted:
                    kept.append(unit)
                else:
                    self._give_up(unit, self._trigger)
            for unit in kept:
                heapq.heappush(units, unit)
            kept.clear()
