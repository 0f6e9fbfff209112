"""Iterations of a run on paper: the policy of fetching (planning/fetching.py) over numbers of device pages, and gradients.

What to fetch and what to give up is decided by the policy that a run's executor drives with stores; what is known here is
when units begin, what they and their gradients take, and when they give it back. Allocates nothing.

I1: pages are taken and given back in the order in which the runtime does it; never more than the pool has.
I2: gradients take device pages from the end of a unit's last backward tick, which is when they are laid out there; where
    units take the same input, from that of the last of them to compute: its gradient comes to all at once. On one
    rank until the next trigger, when they have left. On several, whole and reduced: until the next unit's have been laid
    out where updates run behind the backward (an update is one unit behind, engine.py), else to the end of the backward.
    `.grad`, which autograd fills before that, is no page.
I3: nothing is late: a unit's update is done when it is wanted, and the bytes of a fetch are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.fetching import Fetching
from lightning_ptm.planning.gradients import gradient_tasks
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.runtime.route import Waits
from lightning_ptm.terms import Kind, Operation, Phase, Tier


@dataclasses.dataclass(frozen=True, slots=True)
class _Pages:
    """Of gradients on the device: as they are laid out, what ranks reduce them to, and what waits for the update."""

    full: int
    reduced: int
    passing: int

    @property
    def pages(self) -> int:
        return self.full + self.reduced + self.passing


class Paper:
    """The policy's units as numbers of pages, beside those that are taken once.

    Args:
        fixed_pages: of the device tier, taken once.
        again: of units that are in no plan, those whose layer is computed again in the backward.
        ends_with: units whose gradients are laid out with another one's, which takes what they take (I2), and that one.
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
        self._room = max(0, blueprint.pool_bytes[Tier.DEVICE] // blueprint.layout.page_size - fixed_pages)
        self._again = again
        self._ends_with = ends_with or {}
        self._by_need = frozenset(blueprint.by_need)
        self._layer_of = blueprint.experts.layer_of if blueprint.experts is not None else {}
        self.fetching = Fetching(self, len(blueprint.layout.units), blueprint.by_need)
        # State.
        self._ticks: tuple[Tick, ...] = ()
        self._trigger = 0
        self._used = 0
        self._peak = 0
        self._full: dict[int, int] = {}
        """Pages of gathered or fetched units."""
        self._shards: dict[int, int] = {}
        """Pages of shards that were fetched for a gather."""
        self._gradients: dict[tuple[int, bool], int] = {}
        """By unit, of flats that several ranks share, and of others."""
        self._summed: set[int] = set()
        """Units that have gradients of this step already."""
        self._behind: list[int] = []
        """Units whose gradients were laid out and have not gone to the update."""
        self._leaving: list[tuple[int, bool]] = []
        """Of units, those that leave behind the tick."""
        self._held: tuple[int, ...] = ()
        self._around: tuple[int, ...] = ()
        """Units that are live in the newest tick that is in the plan."""
        self._done: list[Task] = []
        """For units that are in no plan."""

    # -- the iteration ------------------------------------------------------------------------------------------------

    def run(self, plan: Plan, trace: Trace, planned: Trace | None = None, *, steps: bool = True) -> list[int]:
        """One iteration. Pages at the worst moment of each tick, and after the last.

        Args:
            trace: what happens in it, units that are in no plan included.
            planned: what the plan was made for, if it is another order.
            steps: whether the optimizer's step comes behind it.
        """
        self._ticks = trace.ticks
        self._done.clear()
        self.fetching.begin((plan, self._blueprint.planned(planned or trace)), None, begins_again=False)
        last = {unit: at for at, tick in enumerate(trace.ticks) if self._is_backward(at) for unit in tick.live}
        complete: dict[int, list[int]] = {}
        # The root is the last. Who waits for the same gradient hears of it in the order of the forward.
        for unit in sorted(last, key=lambda unit: (-self._ends_with.get(unit, unit), unit)):
            complete.setdefault(max(last[unit], last.get(self._ends_with.get(unit, unit), 0)), []).append(unit)
        found = []
        for at in range(len(trace.ticks)):
            self._begin(at)
            for place in self._entered(at):
                self._enter(place)
            self._trigger = at + 1
            for unit in complete.get(at, ()):
                self.fetching.leases.let_go(unit)
                if not self._blueprint.reduced_at_step:
                    self._end_backward(unit)
            for unit, ended in last.items():
                if ended == at:  # others' gradients may be late, and hold nothing of them here
                    self.fetching.leases.let_go(unit)
            found.append(min(self._peak, self._room))
        self._begin(len(trace.ticks))
        self.fetching.end()
        if steps:
            self._step()
        self._behind.clear()
        found.append(min(self._peak, self._room))
        self.reclaim(True)
        return found

    def _begin(self, at: int) -> None:
        self._trigger = at
        self.reclaim(False)
        self._peak = self._used

    def _is_backward(self, at: int) -> bool:
        return self._ticks[at].phase is Phase.BACKWARD

    def _entered(self, at: int) -> list[int]:
        """Places of the ticks that begin at one. In a backward, units that are in no plan are parts of the one behind them in
        the trace, where a unit stands for its end."""
        first = self._first(at)
        if not self._is_part(at):
            return [at] if first == at else []
        if self._is_part(at - 1):
            return [at]
        around = [place for place in range(at, len(self._ticks)) if not self._is_part(place)][:1]
        return [place for place in around if self._first(place) == at] + [at]

    def _first(self, at: int) -> int:
        """Where a tick begins that stands for its end."""
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
            self._around = tick.live
        for unit in self._held:
            self.fetching.leases.let_go(unit)
        self._held = (*self._around, *tick.live)
        for unit in self._held:
            self.fetching.leases.hold(unit)
        self.fetching.enter(tick.unit, tick.phase)
        self.fetching.bring(tick.unit)
        self.fetching.computes(tick.unit)
        if tick.phase is Phase.FORWARD:
            self.fetching.leases.give_back(tick.unit)
        else:
            self.fetching.leases.give_back_backward(tick.unit)

    def _expect(self, at: int) -> None:
        """The tokens of a layer have come: its units are called one after the other. A backward pass expects nobody, but
        where the layer is computed again in it: its units are called as in the forward, and stay until their backward."""
        tick = self._ticks[at]
        self._done.append(self._task(Operation.COMPUTE, tick.unit, Kind.FULL))
        if self._same_layer(at - 1, at):
            return
        end = next((place for place in range(at, len(self._ticks)) if not self._same_layer(place, at)), None)
        called = [each.unit for each in self._ticks[at:end]]
        if tick.phase is Phase.FORWARD:
            self.fetching.expect(called)
        elif tick.unit in self._again:
            self.fetching.expect(called[::-1])
            for unit in called[::-1]:
                self.fetching.leases.hold(unit)
                self.fetching.bring(unit)
                self.fetching.has_come(unit)

    def _same_layer(self, first: int, second: int) -> bool:
        before, after = self._ticks[first], self._ticks[second]
        return first >= 0 and (self._layer_of.get(before.unit), before.phase) == (
            self._layer_of[after.unit],
            after.phase,
        )

    def done(self, plan: Plan) -> Plan:
        """What was done in the last iteration: its plan and what follows gradients, and what was done for units that are in
        none, to the end."""
        places = [at for at, tick in enumerate(self._ticks) if tick.unit not in self._by_need]
        planned = self._blueprint.planned(Trace(self._ticks))
        whole = plan.beside(gradient_tasks(self._layout, self._blueprint.placement, planned))
        if not self._by_need:
            return whole
        for unit in sorted(self._by_need):
            self.release(unit)
            self.evict(unit)
        triggers = [*map(self._first, places), len(self._ticks)]
        moved = []
        for task in whole.tasks:
            at = places[task.trigger] if task.operation is Operation.COMPUTE else triggers[task.trigger]
            moved.append(dataclasses.replace(task, trigger=at))
        return Plan(tuple(moved), len(self._ticks)).beside(self._done)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _end_backward(self, unit: int) -> None:
        """All gradients of a unit are there, to be laid out (I2)."""
        if not self._layout.trainable_pages(unit):
            return
        shared, own = self._laid_out(unit, shared=True), self._laid_out(unit, shared=False)
        so_far = self._so_far(unit)
        at_once = 0
        if so_far or not self._gradients_leave(unit):  # whole on this rank: it is copied, or added, at once
            at_once = own.full
        pages = shared.pages + own.pages + so_far
        self._make_room(pages)
        self._hold(pages)
        self._used -= at_once
        self._gradients[unit, True] = shared.pages
        self._gradients[unit, False] = own.pages + so_far - at_once
        if self._gradients_leave(unit):
            self._leaving.append((unit, False))
        self._behind.append(unit)
        if not self._blueprint.outlive_backward and len(self._behind) > 1:
            self._update(self._behind.pop(0))

    def _laid_out(self, unit: int, *, shared: bool) -> _Pages:
        """What laying out the gradients of a unit's flats takes, of those that several ranks share, or of the others."""
        blueprint, layout = self._blueprint, self._layout
        full = reduced = passing = 0
        for flat in layout.flats_of(unit):
            if flat.shared is not shared or not blueprint.traits[flat.index]:
                continue
            route = blueprint.route(flat)
            # Such a gradient goes from `.grad` into its pages, or stays there.
            if not (layout.alone(flat) and route.tier.computes):
                full += -(-flat.padded_bytes // layout.page_size)
            reduced += flat.shard_pages if shared else 0
            passing += flat.shard_pages if route.waits is Waits.PASSING else 0
        return _Pages(full, reduced, passing)

    def _gradients_leave(self, unit: int) -> bool:
        return self._blueprint.gradient_home(unit) is not Tier.DEVICE

    def _update(self, unit: int) -> None:
        """A unit's reduction has ended, and its gradients go to the update: it is given up."""
        blueprint, layout = self._blueprint, self._layout
        for shared in (True,) if self._gradients_leave(unit) else (True, False):
            held = self._gradients.get((unit, shared), 0)
            stays = min(held, self._after_reduction(unit, shared=shared))
            self._used -= held - stays
            self._gradients[unit, shared] = stays
            self._leaving.append((unit, shared))
        self.release(unit)
        self.evict(unit)
        if unit in self._by_need:
            if layout.gathers(unit):
                self._done.append(self._task(Operation.REDUCE, unit, Kind.GRADIENT))
            if blueprint.placement.homes[unit].gradient is not Tier.DEVICE:
                self._done.append(self._task(Operation.OFFLOAD, unit, Kind.GRADIENT))
            self._done.append(self._task(Operation.UPDATE, unit, Kind.MASTER))

    def _after_reduction(self, unit: int, *, shared: bool) -> int:
        """Pages that wait for the update, or to leave."""
        takes = self._laid_out(unit, shared=shared)
        return takes.reduced if shared and self._gradients_leave(unit) else takes.passing

    def _step(self) -> None:
        """What is reduced once a step is reduced now, and what was not updated behind the backward is."""
        if self._blueprint.reduced_at_step:
            for unit in reversed(range(len(self._layout.units))):
                self._end_backward(unit)
        for unit in self._behind:
            self._update(unit)
        self._summed.clear()

    def _so_far(self, unit: int) -> int:
        """Pages of the buffers in which a unit's gradients are added to those of earlier passes, or widened."""
        gradients = self._blueprint.placement.gradients(unit)
        flats = [flat for flat in self._layout.flats_of(unit) if flat.trainable and not flat.shared]
        if not gradients.add_up_in_buffer or not flats:
            return 0
        if not any(flat.sums_gradients for flat in flats) and unit not in self._summed:
            self._summed.add(unit)
            return 0
        return sum(-(-flat.gradient_bytes // self._layout.page_size) for flat in flats)

    def _make_room(self, pages: int) -> None:
        """For gradients, as reduction.py does."""
        if self._used + pages > self._room:
            self.reclaim(True)
            self.fetching.release_all()

    # -- the policy's units -------------------------------------------------------------------------------------------

    def gathers(self, unit: int) -> bool:
        return self._layout.gathers(unit)

    def live(self, unit: int) -> bool:
        return unit in self._full or not self._moves(unit)

    def fetched(self, unit: int) -> bool:
        return self.live(unit)

    def movable(self, unit: int) -> bool:
        return unit in self._full

    def has_spare_shards(self, unit: int) -> bool:
        return unit in self._shards

    def update_pending(self, unit: int) -> bool:
        return False

    def _moves(self, unit: int) -> bool:
        """Whether it is not where it computes."""
        return self._full_pages(unit) > 0

    def _full_pages(self, unit: int) -> int:
        return self._layout.full_pages(unit, in_place=not self._away(unit))

    def _away(self, unit: int) -> bool:
        return self._blueprint.placement.homes[unit].parameter is not Tier.DEVICE

    def start_fetch(self, unit: int, *, agreed: bool) -> None:
        layout = self._layout
        full, shards = self._full_pages(unit), unit in self._shards or not (layout.gathers(unit) and self._away(unit))
        self._check_room(full + (0 if shards else layout.gathered_pages(unit)))
        self._full[unit] = full
        self._hold(full)
        if not shards:
            self.fetch_shards(unit)
        if unit in self._by_need:
            gathers = layout.gathers(unit)
            self._done.append(self._task(Operation.GATHER if gathers else Operation.FETCH, unit, Kind.FULL))

    def fetch_shards(self, unit: int) -> None:
        if unit in self._shards or not (self._layout.gathers(unit) and self._away(unit)):
            return
        pages = self._layout.gathered_pages(unit)
        self._check_room(pages)
        self._shards[unit] = pages
        self._hold(pages)
        if unit in self._by_need:
            self._done.append(self._task(Operation.FETCH, unit, Kind.PARAMETER))

    def release(self, unit: int) -> None:
        pages = self._full.pop(unit, 0)
        self._used -= pages
        if pages and unit in self._by_need:
            self._done.append(self._task(Operation.RELEASE, unit, Kind.FULL))

    def evict(self, unit: int) -> None:
        pages = self._shards.pop(unit, 0)
        self._used -= pages
        if pages and unit in self._by_need:
            self._done.append(self._task(Operation.EVICT, unit, Kind.PARAMETER))

    def reclaim(self, wait: bool) -> bool:
        freed = sum(self._gradients.pop(leaves, 0) for leaves in self._leaving)
        self._leaving.clear()
        if wait:  # for reductions under way
            for (unit, shared), pages in self._gradients.items():
                stays = min(pages, self._laid_out(unit, shared=shared).passing)
                self._gradients[unit, shared] = stays
                freed += pages - stays
        self._used -= freed
        return freed > 0

    def _hold(self, pages: int) -> None:
        self._used += pages
        self._peak = max(self._peak, self._used)

    def _check_room(self, pages: int) -> None:
        if self._used + pages > self._room:
            raise CapacityError(f"{pages} pages do not fit beside {self._used} of {self._room}")

    def _task(self, operation: Operation, unit: int, kind: Kind) -> Task:
        return Task(operation, unit, kind, self._trigger)


__all__ = ["Paper"]
