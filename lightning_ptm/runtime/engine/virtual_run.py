"""Virtual run: iterations of a rank over memory without bytes, driven by the ticks of a trace.

The allocator, the stores of units, the executor with its policy, the reactions to a unit's backward, the reduction and the
pages of gradients are those of a run. They work on a device without memory (memory/virtual_backend.py), with ranks that do
alike (comm/virtual.py). This file stands in for autograd (ticks begin and end units, and bring gradients), for the
parameters, which have no values, and for the updater: updates take no time.

I1: a unit's gradients are complete at the end of its last backward tick. Where several units have the same input, autograd
    completes the gradients of all of them when the last has computed.
I2: nothing is late: updates and fetches have finished when a unit is needed.
I3: an iteration that ends with a step is not inside `no_sync()`, except in pipeline stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptm.comm import Communicators, NeededCollective
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.comm.virtual import VirtualCommunicator
from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.events import Events
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.virtual_backend import VirtualBackend
from lightning_ptm.planning.fetch_policy import Among
from lightning_ptm.planning.gradient_tasks import gradient_tasks
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.autograd.backward_actions import BackwardActions
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.engine.disk_writes import DiskWrites, disk_writes
from lightning_ptm.runtime.engine.set_up import RunPages, check_taken
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.fetching.tracer import Tracer
from lightning_ptm.runtime.units.binding import FlatBinding
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.reduction import Reduction
from lightning_ptm.terms import Kind, Mode, Operation, Phase, Tier

Record = Callable[[Operation, int, Kind], None]
"""Receives the tasks that are done for a unit."""


class VirtualRun:
    """Virtual iterations of one rank.

    Args:
        again: units that no plan contains and whose layer is recomputed in the backward (activation checkpointing).
        ends_with: for units that share their input with a later one: that unit, with which their gradients complete (I1).
    """

    def __init__(
        self, blueprint: Blueprint, again: Collection[int] = (), ends_with: Mapping[int, int] | None = None
    ) -> None:
        # Configuration.
        self._blueprint = blueprint
        self._recomputed = again
        self._ends_with = ends_with or {}
        self._by_need = frozenset(blueprint.by_need)
        self._layer_of = blueprint.experts.layer_of if blueprint.experts is not None else {}
        self._build()
        self.fetching = self._executor.fetching
        # State.
        self._trigger = 0
        """Tick at which the next tasks are issued."""
        self._tasks: list[Task] = []
        """Tasks done for units that no plan contains, in order."""
        self._ticks: tuple[Tick, ...] = ()
        self._held: tuple[int, ...] = ()
        self._planned_live: tuple[int, ...] = ()
        """Live units of the latest tick that is in the plan."""

    def _build(self) -> None:
        """Builds the parts of a run as the engine does, and takes the pages that are taken once."""
        blueprint, backend = self._blueprint, VirtualBackend()
        self._allocator = Allocator(
            page_size=blueprint.layout.page_size, backend=backend, sizes=dict(blueprint.pool_bytes)
        )
        held = [bool(blueprint.layout.flats_of(unit.index)) for unit in blueprint.units]
        units = tuple(_with_stand_ins(unit) if here else unit for unit, here in zip(blueprint.units, held, strict=True))
        pages = RunPages(
            dataclasses.replace(blueprint, units=units),
            self._allocator,
            _ranks(blueprint),
            backend.device,
            advance_updates=lambda: self._updates.make_room(),
            evict_idle_unit=lambda: self._executor.fetching.evict_farthest(),
            frame_of_gradient=lambda flat, pages: self._executor.fetching.plan_cursor.gradient_frame(flat, pages),
            evict_ended=lambda: self._executor.fetching.evict_ended(),
            binding=_StandIns,
        )
        # A model may have ten thousands of experts, most of them on other ranks.
        stores = tuple(
            self._recorded(pages.store(unit.index)) if here else UnitStore(unit, ())
            for unit, here in zip(units, held, strict=True)
        )
        for store in (store for unit in stores for store in unit.flats if store.resident):
            store.bind_resident()
        pages.take_gradient_pages()
        self._flats = tuple(pages.flats(store) for store in stores)
        self._reserve(Waits.KEPT, self._flats)
        pages.staging()
        pages.buffers_for_saves()
        pages.spares()
        pages.activation_staging()
        check_taken(blueprint, self._allocator, {})
        self._reserve(Waits.FROM_FIRST, self._flats[::-1])
        allocator = self._allocator
        used = allocator.capacity_bytes(Tier.DEVICE) - allocator.free_bytes(Tier.DEVICE)
        self.fixed_pages = used // blueprint.layout.page_size
        """Device pages that are taken once."""
        alike: Any = _AllAlike()
        updates: Any = _Updates(blueprint, stores, self._flats, self._record)
        self._updates: _Updates = updates
        self._in_flight = pages.in_flight
        self._reduction = Reduction(
            self._flats, alike, self._in_flight, lambda: self._executor.fetching.evict_farthest()
        )
        self._executor = Executor(
            stores,
            Tracer((), lambda: 0, backend),
            alike,
            lambda unit: False,
            _no_wait,
            _no_wait,
            lambda mode, trace: None,
            _no_values,
            self._reclaim,
            Events(),
            tuple,
            blueprint.by_need,
        )
        alone = blueprint.holders.mesh.world_size == 1
        self._backwards = BackwardActions(
            blueprint.units, stores, self._flats, self._executor, self._reduction, updates, alike, alone=alone
        )

    def _reserve(self, waits: Waits, flats: Iterable[Iterable[FlatUpdate]]) -> None:
        """Takes the pages of gradients that wait in `waits`, unit by unit."""
        for flat in (flat for of_unit in flats for flat in _distinct(of_unit)):
            if flat.gradient.route.waits is waits:
                flat.gradient.reserve()

    # -- the iteration ------------------------------------------------------------------------------------------------

    def run(self, plan: Plan, trace: Trace, planned: Trace | None = None, *, steps: bool = True) -> list[int]:
        """Runs one iteration; returns the peak number of device pages in each tick, and then after the last tick.

        Pages that are allocated once for the whole run are not counted.

        Args:
            trace: ticks of the iteration, including those of units that no plan contains.
            planned: trace that the plan was made for, if its order differs.
            steps: whether the optimizer's step follows.
        """
        self._ticks = trace.ticks
        self._tasks.clear()
        self._executor.plans.adopt(Mode.TRAIN, plan, self._blueprint.planned(planned or trace))
        self._executor.begin(Mode.TRAIN, trace=False)
        found: list[int] = []
        # The last backward before a step reduces all gradients (I3); in stages, the step reduces them.
        postponed = self._blueprint.reduced_at_step and (self._blueprint.holders.in_stages or not steps)
        self._updates.in_backward = not (self._blueprint.outlive_backward or postponed)
        with self._backwards.of_the_loss(), self._reduction.postponed() if postponed else contextlib.nullcontext():
            self._run_ticks(found)
        self._executor.end()
        if steps:
            self._reduction.collect_postponed()
            self._updates.step()
            self._reduction.begin_step()
        found.append(self._peak())
        self._reclaim(True)
        return found

    def _run_ticks(self, found: list[int]) -> None:
        ticks = self._ticks
        last = {unit: at for at, tick in enumerate(ticks) if self._is_backward(at) for unit in tick.live}
        complete: dict[int, list[int]] = {}
        # The root completes last. Units that complete together do so in the order of the forward.
        for unit in sorted(last, key=lambda unit: (-self._ends_with.get(unit, unit), unit)):
            complete.setdefault(max(last[unit], last.get(self._ends_with.get(unit, unit), 0)), []).append(unit)
        ended: dict[int, list[int]] = {}
        for unit, at in last.items():
            ended.setdefault(at, []).append(unit)
        refcounts = self.fetching.refcounts
        for at in range(len(ticks)):
            self._begin(at)
            for place in self._entered(at):
                self._enter(place)
            self._trigger = at + 1
            for unit in complete.get(at, ()):
                refcounts.unhold(unit)
                self._end_backward(unit)
            for unit in ended.get(at, ()):  # gradients that complete later hold no reference to their unit
                refcounts.unhold(unit)
            found.append(self._peak())
        self._begin(len(ticks))
        self._backwards.backward_ended()

    def _begin(self, at: int) -> None:
        self._trigger = at
        self._reclaim(False)
        self._allocator.begin_peak(Tier.DEVICE)

    def _peak(self) -> int:
        return self._allocator.peak_bytes(Tier.DEVICE) // self._blueprint.layout.page_size - self.fixed_pages

    def _used_pages(self) -> int:
        allocator = self._allocator
        used = allocator.capacity_bytes(Tier.DEVICE) - allocator.free_bytes(Tier.DEVICE)
        return used // self._blueprint.layout.page_size

    def _end_backward(self, unit: int) -> None:
        """Brings the gradients of a unit, and ends its backward."""
        for flat in _distinct(self._flats[unit]):
            for parameter in flat.store.binding.parameters:
                if parameter.requires_grad:
                    parameter.grad = _without_values(parameter)
        self._backwards.unit_backward_ended(unit)

    def _reclaim(self, wait: bool) -> bool:
        ended = self._updates.end()
        return self._in_flight.release(wait) or ended

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
        self._executor.enter(tick.unit, tick.phase)
        if tick.phase is Phase.FORWARD:
            self._executor.leave(tick.unit)
        else:
            self._executor.leave_backward(tick.unit)

    def _expect(self, at: int) -> None:
        """Announces to the policy the experts that a layer's tokens are routed to, in the order of their calls. In a backward
        only if the layer is recomputed: its units are then called as in the forward, and stay until their backward."""
        tick = self._ticks[at]
        self._record(Operation.COMPUTE, tick.unit, Kind.FULL)
        if self._same_layer(at - 1, at):
            return
        end = next((place for place in range(at, len(self._ticks)) if not self._same_layer(place, at)), None)
        called = [each.unit for each in self._ticks[at:end]]
        if tick.phase is Phase.FORWARD:
            self._executor.expect(called)
        elif tick.unit in self._recomputed:
            self._executor.expect(called[::-1])
            for unit in called[::-1]:
                self._executor.hold(unit)

    def _same_layer(self, first: int, second: int) -> bool:
        before, after = self._ticks[first], self._ticks[second]
        return first >= 0 and (self._layer_of.get(before.unit), before.phase) == (
            self._layer_of[after.unit],
            after.phase,
        )

    # -- what was done ------------------------------------------------------------------------------------------------

    def _record(self, operation: Operation, unit: int, kind: Kind) -> None:
        """Records a task of a unit that no plan contains; ignores other units, whose tasks are in the plan."""
        if unit in self._by_need:
            self._tasks.append(Task(operation, unit, kind, self._trigger))

    def _recorded(self, store: UnitStore) -> UnitStore:
        if store.unit.index not in self._by_need:
            return store
        return _RecordedStore(store.unit, store.flats, store.remote, store.late, record=self._record)

    def disk_writes(self, folders: int) -> DiskWrites:
        """Returns the bytes that a step writes to each of so many folders of the disk tier."""
        return disk_writes(
            (flat for flats in self._flats for flat in flats),
            folders,
            self._blueprint.layout.page_size,
            late_versions=self._blueprint.lock_free is not None,
            once=self._blueprint.reduced_at_step,
        )

    def done(self, plan: Plan) -> Plan:
        """Returns all tasks of the last iteration: those of its plan, those of gradients, and those for units that no plan
        contains. Releases these units."""
        blueprint = self._blueprint
        places = [at for at, tick in enumerate(self._ticks) if tick.unit not in self._by_need]
        planned = blueprint.planned(Trace(self._ticks))
        whole = plan.with_tasks(gradient_tasks(blueprint.layout, blueprint.placement, planned))
        if not self._by_need:
            return whole
        self._executor.release_all()
        triggers = [*map(self._first, places), len(self._ticks)]
        moved = []
        for task in whole.tasks:
            at = places[task.trigger] if task.operation is Operation.COMPUTE else triggers[task.trigger]
            moved.append(dataclasses.replace(task, trigger=at))
        return Plan(tuple(moved), len(self._ticks)).with_tasks(self._tasks)


class _Updates:
    """Stand-in for the updates: takes gradients as they do, and has used them when the next tick begins (I2)."""

    armed = True

    def __init__(
        self,
        blueprint: Blueprint,
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        record: Record,
    ) -> None:
        self._blueprint = blueprint
        self._stores = stores
        self._flats = [list(_distinct(of_unit)) for of_unit in flats]
        self._record = record
        # state
        self.in_backward = True
        """Whether a unit is updated when its gradients are complete; otherwise the step updates it."""
        self._running: list[Callable[[], None]] = []
        """Give back the gradients of the updates in progress."""

    def unit_ready(self, unit: int) -> None:
        """Updates a unit whose gradients are complete, unless all updates wait for the step."""
        if self.in_backward:
            self._update(unit)

    def step(self) -> None:
        """Updates the remaining units; nothing is left of the gradients."""
        for unit in range(len(self._flats)):
            self._update(unit)
        self.end()
        for flat in (flat for flats in self._flats for flat in flats):
            flat.gradient.give_up_step()  # as the end of a step, without used gradients to show
            flat.gradient.clear()

    def _update(self, unit: int) -> None:
        ready = [flat for flat in self._flats[unit] if flat.gradient.any]
        for gradient in (flat.gradient for flat in ready):
            if gradient.route.waits is Waits.QUEUED:
                self._running.append(gradient.detach()[2])
            else:
                gradient.source()
                gradient.hand_over()
                gradient.drop_handed()
                self._running.append(gradient.used)
        if ready:
            if self._blueprint.lock_free is None:  # its updates write to other pages than those that were fetched
                self._stores[unit].release()
                self._stores[unit].evict()
            if self._stores[unit].sharded:
                self._record(Operation.REDUCE, unit, Kind.GRADIENT)
            if not self._blueprint.placement.homes[unit].gradient.computes:
                self._record(Operation.OFFLOAD, unit, Kind.GRADIENT)
            self._record(Operation.UPDATE, unit, Kind.MASTER)

    def end(self) -> bool:
        """Ends the updates in progress; returns whether there were any."""
        running, self._running = self._running, []
        for give_back in running:
            give_back()
        return bool(running)

    def make_room(self) -> None:
        """Ends the updates in progress for the pages of their gradients."""
        if not self.end():
            raise CapacityError(
                "more gradients wait for the optimizer's step than RAM has pages for; raise host_memory"
            )

    def graph_ended(self) -> None: ...

    def progress(self) -> None: ...


class _AllAlike:
    """Stand-in for agreement and barriers: assumes that all ranks make the same requests, and never waits."""

    def request(self, request: NeededCollective) -> Decision:
        return Decision(request, unanimous=True, flags=request.flag)

    def reach(self, position: int, flags: int = 0) -> int:
        return flags


class _StandIns(FlatBinding):
    """Binding of parameters without values: their storage never changes.

    Args as FlatBinding; those that are about values do not matter.
    """

    def __init__(
        self, layout: FlatLayout, parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device, **more: Any
    ) -> None:
        super().__init__(layout, parameters, dtype, device, held=more.get("held", True))

    def bind(self, full: Tensor) -> None:
        self.note_bound(full)

    def unbind(self, *, absent: str = "") -> None:
        self.note_bound(None)

    def check_views(self) -> None: ...


@dataclasses.dataclass(slots=True)
class _RecordedStore(UnitStore):
    """Store of a unit that no plan contains; records what is done with it."""

    record: Record = dataclasses.field(kw_only=True)

    def start_fetch(
        self, agree: Callable[[], None] | None, frames: Sequence[int] = (), *, among: Among = Among.ANY
    ) -> None:
        had_shards = self.has_spare_shards
        UnitStore.start_fetch(self, agree, frames, among=among)
        if not had_shards and self._fetches_shards:
            self.record(Operation.FETCH, self.unit.index, Kind.PARAMETER)
        self.record(Operation.GATHER if self.sharded else Operation.FETCH, self.unit.index, Kind.FULL)

    def fetch_shards(self, frames: Sequence[int] = (), *, among: Among = Among.ANY) -> None:
        had_shards = self.has_spare_shards
        UnitStore.fetch_shards(self, frames, among=among)
        if not had_shards and self._fetches_shards:
            self.record(Operation.FETCH, self.unit.index, Kind.PARAMETER)

    def release(self) -> None:
        had = self.movable
        UnitStore.release(self)
        if had:
            self.record(Operation.RELEASE, self.unit.index, Kind.FULL)

    def evict(self) -> None:
        had_shards = self.has_spare_shards
        UnitStore.evict(self)
        if had_shards:
            self.record(Operation.EVICT, self.unit.index, Kind.PARAMETER)

    @property
    def _fetches_shards(self) -> bool:
        return any(not flat.home.tier.computes for flat in self.sharded)


def _ranks(blueprint: Blueprint) -> Communicators:
    """Returns communicators of the ranks that share flats and plans; they need not exist."""
    mesh, holders = blueprint.holders.mesh, blueprint.holders
    # Where ranks own whole parameters, the layout is of one rank; otherwise any rank will do.
    owned = [(holders.of_flat(flat).ranks, flat.rank) for flat in blueprint.layout.flats if flat.shares]
    ranks, place = max(owned, key=lambda pair: len(pair[0]), default=((0,), 0))
    return Communicators(mesh, VirtualCommunicator(ranks[place], mesh.world_size))


def _with_stand_ins(unit: Unit) -> Unit:
    """Returns the unit with parameters of the same shapes, and no memory."""
    return dataclasses.replace(
        unit,
        parameters=tuple(dataclasses.replace(item, parameter=_stand_in(item.parameter)) for item in unit.parameters),
    )


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_without_values(parameter), parameter.requires_grad)


def _without_values(tensor: Tensor) -> Tensor:
    with torch.DisableTorchFunctionSubclass():  # closed parameters refuse to be read
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _distinct(flats: Iterable[FlatUpdate]) -> Iterable[FlatUpdate]:
    """Returns one entry for each gradient."""
    return {id(flat.gradient): flat for flat in flats}.values()


def _no_wait(unit: int) -> None:
    """Does nothing: updates have finished (I2)."""


def _no_values(tensor: PagedTensor) -> Tensor:
    raise InternalError(f"{tensor.name} was to be read in a virtual run, whose memory has no values")
