"""Virtual run: iterations of the fetch policy (planning/fetch_policy.py) and of gradients on page counts alone.

The policy that decides what to fetch and what to release is the one that a run's executor drives. This file knows when units
begin and when their gradients are complete; virtual_units.py counts the pages of units, virtual_gradients.py those of
gradients. Allocates nothing.

I1: a unit's gradients are complete at the end of its last backward tick. Where several units have the same input, autograd
    completes the gradients of all of them when the last has computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from lightning_ptm.planning.fetch_policy import FetchPolicy
from lightning_ptm.planning.gradient_tasks import gradient_tasks
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.virtual_gradients import VirtualGradients
from lightning_ptm.runtime.deciding.virtual_pool import DoneByNeed, VirtualPool
from lightning_ptm.runtime.deciding.virtual_units import VirtualUnits
from lightning_ptm.terms import Kind, Operation, Phase, Tier


class VirtualRun:
    """Virtual iterations of one rank.

    Args:
        fixed_pages: device pages that are allocated once for the run.
        again: units that no plan contains and whose layer is recomputed in the backward (activation checkpointing).
        ends_with: for units that share their input with a later one: that unit, with which their gradients complete (I1).
    """

    def __init__(
        self,
        blueprint: Blueprint,
        fixed_pages: int,
        again: Collection[int] = (),
        ends_with: Mapping[int, int] | None = None,
    ) -> None:
        # Configuration.
        self._blueprint = blueprint
        self._layout = blueprint.layout
        room = max(0, blueprint.pool_bytes[Tier.DEVICE] // blueprint.layout.page_size - fixed_pages)
        self._recomputed = again
        self._ends_with = ends_with or {}
        self._by_need = frozenset(blueprint.by_need)
        self._layer_of = blueprint.experts.layer_of if blueprint.experts is not None else {}
        self._pool = VirtualPool(room)
        self._done = DoneByNeed(blueprint.by_need)
        self._units = VirtualUnits(blueprint, self._pool, self._done, lambda wait: self._gradients.reclaim(wait))
        self.fetching = FetchPolicy(self._units, len(blueprint.layout.units), blueprint.by_need)
        self._gradients = VirtualGradients(blueprint, self._pool, self._done, self._units, self.fetching.release_all)
        # State.
        self._ticks: tuple[Tick, ...] = ()
        self._held: tuple[int, ...] = ()
        self._planned_live: tuple[int, ...] = ()
        """Live units of the latest tick that is in the plan."""

    # -- the iteration ------------------------------------------------------------------------------------------------

    def run(self, plan: Plan, trace: Trace, planned: Trace | None = None, *, steps: bool = True) -> list[int]:
        """Runs one iteration; returns the peak pages of each tick, and of the time after the last.

        Args:
            trace: ticks of the iteration, including those of units that no plan contains.
            planned: trace that the plan was made for, if its order differs.
            steps: whether the optimizer's step follows.
        """
        self._ticks = trace.ticks
        self._done.tasks.clear()
        self.fetching.begin((plan, self._blueprint.planned(planned or trace)), None, may_repeat=False)
        last = {unit: at for at, tick in enumerate(trace.ticks) if self._is_backward(at) for unit in tick.live}
        complete: dict[int, list[int]] = {}
        # The root completes last. Units that complete together do so in the order of the forward.
        for unit in sorted(last, key=lambda unit: (-self._ends_with.get(unit, unit), unit)):
            complete.setdefault(max(last[unit], last.get(self._ends_with.get(unit, unit), 0)), []).append(unit)
        found = []
        for at in range(len(trace.ticks)):
            self._begin(at)
            for place in self._entered(at):
                self._enter(place)
            self._done.at(at + 1)
            for unit in complete.get(at, ()):
                self.fetching.refcounts.unhold(unit)
                if not self._blueprint.reduced_at_step:
                    self._gradients.end_backward(unit)
            for unit, ended in last.items():
                if ended == at:  # gradients that complete later hold no reference to their unit
                    self.fetching.refcounts.unhold(unit)
            found.append(self._pool.worst)
        self._begin(len(trace.ticks))
        self.fetching.end()
        if steps:
            self._gradients.step()
        self._gradients.end_iteration()
        found.append(self._pool.worst)
        self._gradients.reclaim(True)
        return found

    def _begin(self, at: int) -> None:
        self._done.at(at)
        self._gradients.reclaim(False)
        self._pool.begin_tick()

    def _is_backward(self, at: int) -> bool:
        return self._ticks[at].phase is Phase.BACKWARD

    def _entered(self, at: int) -> list[int]:
        """Returns the indices of the ticks that begin at index `at`. In a backward, units that no plan contains (experts) run
        inside the unit that follows them in the trace, whose tick there marks its end."""
        first = self._first(at)
        if not self._is_part(at):
            return [at] if first == at else []
        if self._is_part(at - 1):
            return [at]
        around = [place for place in range(at, len(self._ticks)) if not self._is_part(place)][:1]
        return [place for place in around if self._first(place) == at] + [at]

    def _first(self, at: int) -> int:
        """Returns the index at which a tick begins, given the index of its end."""
        first = at
        while self._is_backward(at) and self._is_part(first - 1):
            first -= 1
        return first

    def _is_part(self, at: int) -> bool:
        return at >= 0 and self._is_backward(at) and self._ticks[at].unit in self._by_need

    def _enter(self, at: int) -> None:
        tick = self._ticks[at]
        if tick.unit in self._by_need:
            self._expect(at)
        else:
            self._planned_live = tick.live
        for unit in self._held:
            self.fetching.refcounts.unhold(unit)
        self._held = (*self._planned_live, *tick.live)
        for unit in self._held:
            self.fetching.refcounts.hold(unit)
        self.fetching.enter(tick.unit, tick.phase)
        self.fetching.bring(tick.unit)
        self.fetching.computes(tick.unit)
        if tick.phase is Phase.FORWARD:
            self.fetching.refcounts.give_back(tick.unit)
        else:
            self.fetching.refcounts.give_back_backward(tick.unit)

    def _expect(self, at: int) -> None:
        """Announces to the policy the experts that a layer's tokens are routed to, in the order of their calls. In a backward
        only if the layer is recomputed: its units are then called as in the forward, and stay until their backward."""
        tick = self._ticks[at]
        self._done.add(Operation.COMPUTE, tick.unit, Kind.FULL)
        if self._same_layer(at - 1, at):
            return
        end = next((place for place in range(at, len(self._ticks)) if not self._same_layer(place, at)), None)
        called = [each.unit for each in self._ticks[at:end]]
        if tick.phase is Phase.FORWARD:
            self.fetching.expect(called)
        elif tick.unit in self._recomputed:
            self.fetching.expect(called[::-1])
            for unit in called[::-1]:
                self.fetching.refcounts.hold(unit)
                self.fetching.bring(unit)
                self.fetching.mark_used(unit)

    def _same_layer(self, first: int, second: int) -> bool:
        before, after = self._ticks[first], self._ticks[second]
        return first >= 0 and (self._layer_of.get(before.unit), before.phase) == (
            self._layer_of[after.unit],
            after.phase,
        )

    def done(self, plan: Plan) -> Plan:
        """Returns all tasks of the last iteration: those of its plan, those of gradients, and those for units that no plan
        contains. Releases these units."""
        places = [at for at, tick in enumerate(self._ticks) if tick.unit not in self._by_need]
        planned = self._blueprint.planned(Trace(self._ticks))
        whole = plan.with_tasks(gradient_tasks(self._layout, self._blueprint.placement, planned))
        if not self._by_need:
            return whole
        for unit in sorted(self._by_need):
            self._units.release(unit)
            self._units.evict(unit)
        triggers = [*map(self._first, places), len(self._ticks)]
        moved = []
        for task in whole.tasks:
            at = places[task.trigger] if task.operation is Operation.COMPUTE else triggers[task.trigger]
            moved.append(dataclasses.replace(task, trigger=at))
        return Plan(tuple(moved), len(self._ticks)).with_tasks(self._done.tasks)
