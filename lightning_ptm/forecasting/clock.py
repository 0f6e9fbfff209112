"""Simulated clock of a plan on a given machine: links are queues, compute takes the seconds of a trace.

Owns the clock of consecutive steps. Each link does one thing at a time: fetches and gradients in issue order, updates in the
gaps between them, since only a few of an update's chunks are in flight at a time. Pages stream, so a task that crosses
several links takes as long as the slowest of them. Waits for free pages are not modelled: a plan takes pages only where they
are free by its triggers. Where updates share the cores with compute, their arithmetic is done between ticks, chunk by chunk,
once chunks are read, or when compute waits for it; planning/chunks.py, which a real run uses, too, decides the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from lightning_ptm.errors import InternalError
from lightning_ptm.forecasting.queues import Load, Queues, YieldingLoad
from lightning_ptm.forecasting.rates import Activity, Hardware, Stall, Timing
from lightning_ptm.forecasting.send_order import Exchanged, SendOrder
from lightning_ptm.forecasting.timed_chunks import Moment, TimedChunk, TimedJob, comes_s
from lightning_ptm.forecasting.update_extras import NO_EXTRAS, UpdateExtra, with_extra
from lightning_ptm.planning.chunks import ChunkBounds, Chunks, WantedChunk, chunk_bounds_of
from lightning_ptm.planning.layout import FlatLayout, ModelLayout
from lightning_ptm.planning.placement_data import Budget, Placement
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.planning.tier_paths import links_between
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.planning.update_order import first_to_wait_for, read_ahead, update_order
from lightning_ptm.terms import Kind, Link, Operation, Tier, chunk_numel

_BATCH_ROUNDS = 4
"""Rounds of agreement among all ranks for a batch: its arrival, signals, the begin of its step, the end of its backward."""
_BEFORE_USE = (Operation.FETCH, Operation.GATHER)
"""Operations before the first use of a unit's parameters; others come behind the last one."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Time at which something that compute may wait for is complete, and the operation that took until then."""

    at_s: float
    cause: Operation


@dataclass(slots=True)
class _UpdateLoads:
    """Loads of an update, or of a chunk of it: reads of master states and gradients, arithmetic, writes."""

    states: list[Load]
    gradient: list[Load]
    arithmetic: Load
    writes: list[Load]

    @property
    def reads(self) -> list[Load]:
        return [*self.states, *self.gradient]


class Clock:
    """Clock of a plan: `issue` and `compute` take each task and each compute, in issue order.

    Args:
        layout, placement, budget: of the plan.
        hardware: rates of one rank.
        staging_chunks: most chunks of updates in staging between disk and CPU at once.
        gradient_room_bytes: most bytes of gradients that wait for updates after their backward.
        record: receives the activities of links and compute.
        holders: which ranks share which flats; None: all ranks share all flats.
        extras: by flat, work of updates in addition to a pass over bytes.
    """

    def __init__(
        self,
        layout: ModelLayout,
        placement: Placement,
        budget: Budget,
        hardware: Hardware,
        *,
        staging_chunks: float = math.inf,
        gradient_room_bytes: float = math.inf,
        record: list[Activity] | None = None,
        holders: ModelSharding | None = None,
        extras: Mapping[int, UpdateExtra] = NO_EXTRAS,
    ) -> None:
        # Configuration.
        self._gradient_room = gradient_room_bytes
        self._record = record
        self._extras = extras
        self._layout = layout
        self._placement = placement
        self._hardware = hardware
        there = [tier for tier, size in budget.items() if size]
        self._links = {(source, target): links_between(source, target, there) for source in budget for target in budget}
        flats = [layout.flats_of(unit) for unit in range(len(layout.units))]
        self._shard_bytes = [sum(flat.shard_bytes for flat in of) for of in flats]
        self._gradient_bytes = [sum(flat.shard_bytes for flat in of if flat.trainable) for of in flats]
        self._master_bytes = [sum(placement.master_bytes(flat) for flat in of if flat.trainable) for of in flats]
        """By unit, bytes of master states of a rank's shards."""
        world = max((flat.world_size for flat in layout.flats), default=1)
        several_ranks = (world if holders is None else holders.mesh.world_size) > 1
        self._batch_rounds = _BATCH_ROUNDS if several_ranks else 0
        self._step_rounds = 1 + bool(holders is not None and holders.by_unit) if several_ranks else 0
        """Rounds of agreement per step among all ranks, in addition to those for collectives."""
        self._shared_rates = {} if holders is None else hardware.shared_rates(layout.flats, holders)
        # State.
        self._now = Moment()
        self._compute_s = 0.0
        self._rounds = 0
        self._queues = Queues(hardware, record)
        self._arrivals: dict[tuple[int, Kind], _Arrival] = {}
        """By unit and kind of data, when its last transfer, collective or update ends."""
        self._stalls: dict[Operation, float] = {}
        self._updating: dict[int, Sequence[YieldingLoad]] = {}
        """By unit, its update in the step in progress, if a thread of its own does updates."""
        self._updated: dict[int, Sequence[YieldingLoad]] = {}
        """By unit, its update in the last step."""
        self.chunks = Chunks[FlatLayout, TimedJob[FlatLayout], TimedChunk[FlatLayout]](self, staging=staging_chunks)
        """Chunks of updates on the cores that compute."""
        self._owed: dict[int, list[TimedJob[FlatLayout]]] = {}
        """By unit, updates that compute has not waited for yet."""
        self._passing: dict[int, int] = {}
        """By unit, bytes of gradients in RAM whose updates may be pending, where these pass through a pool."""
        self._places = {unit: place for place, unit in enumerate(update_order(layout, placement))}
        """By unit, its position among updates that are due at the same time."""
        self._updates: set[int] = set()
        """Units that have been updated."""

    def issue(self, task: Task) -> None:
        """Starts a task other than a compute, now or when its input is complete."""
        match task.operation:
            case Operation.FETCH:
                home = self._placement.homes[task.unit].parameter
                size = self._shard_bytes[task.unit]
                updated = self._update_of(task.unit)
                self._arrive(task, task.kind, self._loads(home, Tier.DEVICE, size), max(self._now.s, updated.at_s))
                self._blame(task.unit, task.kind, updated)
            case Operation.GATHER:
                loads = self._collectives(task.unit, gradients=False)
                self._agree(1 if loads else 0)
                source = self._arrivals.get((task.unit, Kind.PARAMETER), self._update_of(task.unit))
                self._arrive(task, Kind.FULL, loads, max(self._now.s, source.at_s))
                # If the copy before it is late, compute's wait counts as one for the copy, not for the collective.
                self._blame(task.unit, Kind.FULL, source)
            case Operation.REDUCE:
                loads = self._collectives(task.unit, gradients=True)
                self._agree(1 if loads else 0)
                self._arrive(task, Kind.GRADIENT, loads, self._now.s)
            case Operation.OFFLOAD:
                home = self._placement.homes[task.unit].gradient
                loads = self._loads(Tier.DEVICE, home, self._gradient_bytes[task.unit])
                self._arrive(task, Kind.GRADIENT, loads, self._ready_s(task.unit, Kind.GRADIENT))
            case Operation.UPDATE if self._hardware.shared_cores:
                self._owe(task)
                if not self._placement.keeps_gradients:  # else compute goes on once all updates are issued
                    self._unit_complete()
            case Operation.UPDATE:
                update = self._update_loads(task.unit, self._master_bytes[task.unit], self._gradient_bytes[task.unit])
                for flat in self._layout.flats_of(task.unit):
                    update.arithmetic = with_extra(update.arithmetic, self._extras.get(flat.index), self._hardware)
                ready_s = self._ready_s(task.unit, Kind.GRADIENT)
                loads = [*update.reads, update.arithmetic, *update.writes]
                self._updating[task.unit] = self._queues.carry_in_gaps(task.operation, task.unit, loads, ready_s)
                if self._placement.passing_bytes and not self._placement.homes[task.unit].gradient.computes:
                    self._wait_for_room(task.unit)
            case Operation.RELEASE:
                self._arrivals.pop((task.unit, Kind.FULL), None)
            case Operation.EVICT:
                self._arrivals.pop((task.unit, Kind.PARAMETER), None)
            case Operation.COMPUTE:
                raise ValueError("issue() got a compute, which needs its tick; call compute()")

    def compute(self, tick: Tick, exchanged: Mapping[Link, SendOrder] = MappingProxyType({})) -> None:
        """Waits for the tick's live units, exchanges tokens and activations, then computes.

        Exchanges that are hidden pass while it computes.
        """
        self._queues.settle(self._now.s)
        self._pump()
        for unit in tick.live:
            self._finish(unit)
        nothing = _Arrival(0.0, Operation.COMPUTE)
        late = max((self._arrivals.get((unit, Kind.FULL), nothing) for unit in tick.live), key=lambda at: at.at_s)
        updated = max((self._update_of(unit) for unit in tick.live), key=lambda at: at.at_s)
        self._wait(max(late, updated, key=lambda at: at.at_s))
        hidden_s = self._now.s
        for link, sent in exchanged.items():
            self._agree(sent.rounds)
            load = Load(link, sent.bytes, collectives=sent.collectives)
            end_s = self._queues.carry(Operation.EXCHANGE, tick.unit, [load], self._now.s)
            if sent.hidden:
                hidden_s = max(hidden_s, end_s)
            else:  # compute stands still meanwhile: its input is what arrives
                self._wait(_Arrival(end_s, Operation.EXCHANGE))
        if self._record is not None:
            self._record.append(Activity(None, Operation.COMPUTE, tick.unit, self._now.s, tick.seconds, 0))
        self._compute_s += tick.seconds
        self._now.pass_by(tick.seconds + self._queues.taken_by_transfers_s(self._now.s, tick.seconds))
        self._wait(_Arrival(hidden_s, Operation.EXCHANGE))

    def step(
        self,
        plan: Plan,
        trace: Trace,
        exchanged: Exchanged = MappingProxyType({}),
        *,
        micro_batches: int = 1,
        wait_for_updates: bool = True,
        root_once: bool = False,
    ) -> None:
        """Runs one step; arguments as in `steady`. In the next step, a unit's first use waits for its update."""
        for micro_batch in range(micro_batches):
            first, last = micro_batch == 0, micro_batch == micro_batches - 1
            self._agree(self._batch_rounds + (self._step_rounds if last else 0))
            if self._updates:
                # Read ahead during the forward: master states for the first updates of the backward.
                ahead = (flat for flat in read_ahead(self._layout, self._placement) if flat.unit in self._updates)
                self.chunks.want([WantedChunk(flat, self._cuts(flat)) for flat in ahead])
            for trigger in range(plan.tick_count + 1):
                tasks = plan.at[trigger]
                updates = [task for task in tasks if task.operation is Operation.UPDATE]
                if self._hardware.shared_cores:
                    updates.sort(key=lambda task: self._places[task.unit])
                of_update = iter(updates)
                for task in tasks:
                    if root_once and task.unit == 0 and not (first if task.operation in _BEFORE_USE else last):
                        continue
                    if task.operation is Operation.UPDATE and last:
                        self.issue(next(of_update))
                    elif task.operation not in (Operation.COMPUTE, Operation.UPDATE):
                        self.issue(task)
                if trigger < plan.tick_count:
                    self.compute(trace.ticks[trigger], exchanged.get(trigger, {}))
        self._passing.clear()
        if wait_for_updates:
            self._updated |= self._updating
        self._updating = {}

    def so_far(self) -> Timing:
        """Returns the totals up to the end of the last tick; for links, of everything issued."""
        return Timing(
            self._now.s,
            self._compute_s,
            self._queues.used(),
            tuple(Stall(cause, seconds) for cause, seconds in self._stalls.items()),
            self._rounds,
            self._rounds * self._hardware.round_s,
        )

    def _agree(self, rounds: int) -> None:
        """Passes the time of rounds in which ranks agree on what comes next, and compute stands still."""
        self._rounds += rounds
        self._now.pass_by(rounds * self._hardware.round_s)

    def _wait(self, arrival: _Arrival) -> None:
        if arrival.at_s > self._now.s:
            self._stalls[arrival.cause] = self._stalls.get(arrival.cause, 0.0) + arrival.at_s - self._now.s
            self._now.go_to(arrival.at_s)

    def _owe(self, task: Task) -> None:
        """Queues an update, which the cores that compute do chunk by chunk."""
        ready_s = self._ready_s(task.unit, Kind.GRADIENT)
        staged = _staged(self._placement, task.unit)
        self._updates.add(task.unit)
        for flat in self._layout.flats_of(task.unit):
            if flat.trainable:
                update = TimedJob(flat, self._cuts(flat), self._now, ready_s, streams=staged)
                self._owed.setdefault(task.unit, []).append(update)
                self.chunks.enqueue(update)

    def _cuts(self, flat: FlatLayout) -> ChunkBounds:
        return chunk_bounds_of(flat, chunk_numel(self._layout.page_size))

    def _pump(self) -> None:
        """Does what needs no waiting, as a run does at ticks."""
        while self.chunks.advance():
            pass

    def _unit_complete(self) -> None:
        """Ends a unit's backward, after its update is issued: compute waits if too many gradients wait for updates."""
        self._pump()
        for unit, updates in list(self._owed.items()):
            if all(update.computed for update in updates):
                del self._owed[unit]
        owed = {unit: sum(update.flat.gradient_bytes for update in updates) for unit, updates in self._owed.items()}
        while (first := first_to_wait_for(owed, self._gradient_room)) is not None:
            del owed[first]
            self._finish(first)

    def _wait_for_room(self, unit: int) -> None:
        """Waits for the oldest updates while the gradients of the pending ones, with that of `unit`, exceed their pages."""
        for other in list(self._passing):
            if self._queues.end_s(self._updating[other]) <= self._now.s:
                del self._passing[other]
        self._passing[unit] = self._gradient_bytes[unit]
        while (first := first_to_wait_for(self._passing, self._gradient_room)) is not None:
            del self._passing[first]
            self._wait(_Arrival(self._queues.end_s(self._updating[first]), Operation.UPDATE))

    def _finish(self, unit: int) -> None:
        """Finishes a unit's updates, which compute needs; other chunks advance while it waits for reads and writes."""
        for update in self._owed.pop(unit, ()):
            if not update.computed:
                self.chunks.to_front(update)
            while not update.computed:
                if not self.chunks.advance():
                    awaited = self.chunks.awaited(update)
                    if awaited is None:
                        raise InternalError(
                            f"the update of flat {update.flat.index} is not done and has nothing to wait for"
                        )
                    self._wait(_Arrival(comes_s(awaited), Operation.UPDATE))

    # Actions that `chunks` calls.

    def chunk(self, flat: FlatLayout, start: int, numel: int) -> TimedChunk[FlatLayout]:
        """Makes a chunk of which nothing has been read."""
        return TimedChunk(flat, start, numel, now=self._now)

    def read(self, update: TimedJob[FlatLayout] | None, chunk: TimedChunk[FlatLayout]) -> bool:
        """Starts the reads that a chunk lacks; that of a gradient in another tier once the gradient is complete."""
        loads = self._chunk_loads(chunk)
        missing = loads.states if chunk.begin() else []
        chunk.note_reads(all_reads_begun=update is not None and (not loads.gradient or update.before.done()))
        if chunk.all_reads_begun:
            missing = [*missing, *loads.gradient]
        ends_s = self._queues.carry(Operation.UPDATE, chunk.flat.unit, missing, self._now.s)
        chunk.read_until(max(chunk.ready_s, ends_s))
        return bool(missing)

    def update(self, update: TimedJob[FlatLayout], chunk: TimedChunk[FlatLayout]) -> bool:
        """Does a chunk's arithmetic, for which compute waits; then starts its writes."""
        loads = self._chunk_loads(chunk)
        carry = partial(self._queues.carry, Operation.UPDATE, update.flat.unit)
        begin_s = self._now.s if update.streams else carry(loads.reads, self._now.s)
        end_s = carry([loads.arithmetic], begin_s)
        self._wait(_Arrival(end_s + (self._hardware.chunk_s if update.streams else 0.0), Operation.UPDATE))
        chunk.write_until(carry(loads.writes, self._now.s))
        return update.streams

    def free(self, chunk: TimedChunk[FlatLayout]) -> None:
        """Does nothing: buffers are only counted."""

    def end(self, update: TimedJob[FlatLayout]) -> None:
        """Does nothing: the job's own state says that it is computed."""

    def _chunk_loads(self, chunk: TimedChunk[FlatLayout]) -> _UpdateLoads:
        flat = chunk.flat
        master_bytes = self._placement.master_bytes(flat) * chunk.numel // flat.shard_numel
        loads = self._update_loads(flat.unit, master_bytes, chunk.numel * flat.itemsize)
        if _staged(self._placement, flat.unit):
            loads.arithmetic = replace(loads.arithmetic, bytes_per_s=self._hardware.disk_update_bytes_per_s)
        share = chunk.numel / flat.shard_numel
        loads.arithmetic = with_extra(loads.arithmetic, self._extras.get(flat.index), self._hardware, share)
        return loads

    def _arrive(self, task: Task, kind: Kind, loads: Iterable[Load], ready_s: float) -> None:
        end_s = self._queues.carry(task.operation, task.unit, loads, ready_s)
        arrival = _Arrival(end_s, task.operation)
        before = self._arrivals.get((task.unit, kind), arrival)
        self._arrivals[task.unit, kind] = max(before, arrival, key=lambda at: at.at_s)

    def _update_of(self, unit: int) -> _Arrival:
        queued = self._updated.get(unit)
        return (
            _Arrival(0.0, Operation.GATHER)
            if queued is None
            else _Arrival(self._queues.end_s(queued), Operation.UPDATE)
        )

    def _blame(self, unit: int, kind: Kind, source: _Arrival) -> None:
        """Attributes the wait for a copy or gather to `source`, if that was late."""
        if source.at_s > self._now.s:
            self._arrivals[unit, kind] = _Arrival(self._arrivals[unit, kind].at_s, source.cause)

    def _ready_s(self, unit: int, kind: Kind) -> float:
        return max(self._now.s, self._arrivals.get((unit, kind), _Arrival(0.0, Operation.COMPUTE)).at_s)

    def _loads(self, source: Tier, target: Tier, size: int) -> list[Load]:
        return [Load(link, size) for link in self._links[source, target]]

    def _update_loads(self, unit: int, master_bytes: int, gradient_bytes: int) -> _UpdateLoads:
        """Loads of an update: reads of master states and gradients, arithmetic, writes of master states and parameters."""
        homes = self._placement.homes[unit]
        place = homes.master.updated_in(self._placement.staging_tier)
        assert place.update_link is not None  # `updated_in` promises it
        return _UpdateLoads(
            self._loads(homes.master, place, master_bytes),
            self._loads(homes.gradient, place, gradient_bytes),
            Load(place.update_link, 2 * master_bytes + 2 * gradient_bytes),
            [
                *self._loads(place, homes.master, master_bytes),
                *self._loads(place, homes.parameter, gradient_bytes),  # Trainable parameters: as many bytes.
            ],
        )

    def _collectives(self, unit: int, *, gradients: bool) -> list[Load]:
        """Loads of the collectives of a unit's flats, or of those with gradients, among the ranks that share each flat."""
        flats = [flat for flat in self._layout.flats_of(unit) if flat.shared and (flat.trainable or not gradients)]
        sizes = {flat.index: flat.shard_bytes * (flat.world_size - 1) for flat in flats}
        return [Load(Link.COLLECTIVE, size, self._shared_rates.get(index), 1) for index, size in sizes.items()]


def _staged(placement: Placement, unit: int) -> bool:
    """Whether a unit's updates stream through staging."""
    return not placement.homes[unit].master.updates
