"""How long a plan would take on a machine that need not be here: links as queues, compute as traced.

Owns the clock of a simulation, of one iteration (simulate.py) or of steps that follow each other (`steady`). Knows
tasks and bytes, not whether they are right: simulate.py checks that. Each link does one thing at a time, in issue order;
pages stream, so a task that crosses several links takes as long as the slowest of them. A wait for free pages is not
modelled: the plan takes pages only where they are free by its triggers. Where updates share the cores with compute, their
arithmetic is done between ticks, chunk by chunk, as reads have come, or when compute waits for it; of chunks on their way
from and to the disk there are no more than staging holds, and the first of the next backward pass are read ahead.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lightning_ptm.planning.homes import Budget, Placement
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.terms import Kind, Operation, Tier, chunk_numel


class Link(enum.Enum):
    """What can be busy besides compute: copies by direction, the collectives, and the update by place."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    COLLECTIVE = "collective"
    UPDATE_HOST = "update_host"
    UPDATE_DEVICE = "update_device"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's share of a machine: bytes per second of each link.

    The collective rate is of bytes received (gather) or sent (reduce) by one rank. The update rates are of all bytes
    that an update reads and writes: master states twice, gradients and compute parameters once.

    Args:
        disk_both_bytes_per_s: of reads and writes of the disk that go on together; None: neither slows the other.
        shared_cores: the arithmetic of updates runs on the cores that compute (a CPU).
        exchange_bytes_per_s: of tokens that one rank sends to others' experts; None: nobody divides experts.
        holders_bytes_per_s: of collectives of ranks that hold the same experts; None: as of all ranks.
        disk_update_bytes_per_s: of that arithmetic, where its reads and writes of the disk go on beside it; None: the same.
        chunk_s: what those cores do for each chunk that is staged, beside that arithmetic.
        disk_bytes_per_core_s: that one of those cores reads and writes a second: compute, which is in lockstep, gets longer
            by the time of its transfers; None: they take none.
    """

    name: str
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    collective_bytes_per_s: float
    update_host_bytes_per_s: float
    update_device_bytes_per_s: float
    disk_both_bytes_per_s: float | None = None
    shared_cores: bool = False
    exchange_bytes_per_s: float | None = None
    holders_bytes_per_s: float | None = None
    disk_update_bytes_per_s: float | None = None
    chunk_s: float = 0.0
    disk_bytes_per_core_s: float | None = None

    def bytes_per_s(self, link: Link) -> float:
        """The rate of one link."""
        return {
            Link.HOST_TO_DEVICE: self.host_to_device_bytes_per_s,
            Link.DEVICE_TO_HOST: self.device_to_host_bytes_per_s,
            Link.DISK_READ: self.disk_read_bytes_per_s,
            Link.DISK_WRITE: self.disk_write_bytes_per_s,
            Link.COLLECTIVE: self.collective_bytes_per_s,
            Link.UPDATE_HOST: self.update_host_bytes_per_s,
            Link.UPDATE_DEVICE: self.update_device_bytes_per_s,
            Link.EXCHANGE: self.exchange_bytes_per_s or self.collective_bytes_per_s,
        }[link]


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one link carried, and for how long it was busy."""

    link: Link
    bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds that compute waited for one kind of task; for UPDATE also what remains after the last tick."""

    cause: Operation
    seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the whole plan, of its compute alone, of each link and of each cause of waiting."""

    seconds: float
    compute_s: float
    links: tuple[LinkUse, ...]
    stalls: tuple[Stall, ...]


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing that was busy for a time: compute (`link` is None) or a link."""

    link: Link | None
    operation: Operation
    unit: int
    start_s: float
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    cause: Operation


@dataclass(frozen=True, slots=True)
class _Load:
    link: Link
    bytes: int
    bytes_per_s: float | None = None
    """Where it is not the link's."""


@dataclass(frozen=True, slots=True)
class _Owed:
    """A chunk's arithmetic that the cores have yet to do: what it reads first, when that is there, and what it then writes.

    A chunk that is staged passes through buffers, which it holds from its reads' start to its writes' end.
    """

    task: Task
    reads: tuple[_Load, ...]
    ready_s: float
    arithmetic: _Load
    writes: tuple[_Load, ...]
    staged: bool


class Clock:
    """Runs beside a replay: told of each task and each compute in issue order."""

    def __init__(
        self,
        layout: ModelLayout,
        placement: Placement,
        budget: Budget,
        hardware: Hardware,
        *,
        staging_chunks: float = math.inf,
        record: list[Activity] | None = None,
    ) -> None:
        # Configuration.
        self._record = record
        self._layout = layout
        self._placement = placement
        self._hardware = hardware
        self._chunks = staging_chunks
        self._has_host = budget.host_bytes > 0
        flats = [layout.flats_of(unit) for unit in range(len(layout.units))]
        self._shard_bytes = [sum(flat.shard_bytes for flat in of) for of in flats]
        self._gradient_bytes = [sum(flat.shard_bytes for flat in of if flat.trainable) for of in flats]
        """Of a rank's shards, by unit."""
        # State.
        self._now_s = 0.0
        self._compute_s = 0.0
        self._free_s = dict.fromkeys(Link, 0.0)
        self._busy_s = dict.fromkeys(Link, 0.0)
        self._bytes = dict.fromkeys(Link, 0)
        self._arrivals: dict[tuple[int, Kind], _Arrival] = {}
        self._stalls: dict[Operation, float] = {}
        self._last = _Arrival(0.0, Operation.COMPUTE)
        self._updated: dict[int, _Arrival] = {}
        """When the parameters of a unit are those of the last step."""
        self._disk_free_s = 0.0
        self._queued: list[_Owed] = []
        """Not read yet, in the order in which they were issued; `ready_s` is when their gradients are there."""
        self._read: list[_Owed] = []
        """Read, or being read."""
        self._ahead: list[tuple[int, float]] = []
        """Chunks that are read before their update is issued: the unit, and when they are there."""
        self._order: list[Task] = []
        """Updates in the order in which a step issues them; `_expected`: those whose chunks may be read ahead."""
        self._expected: list[Task] = []
        self._landing: list[float] = []
        """When writes of staged chunks end."""
        self._written_s: dict[int, float] = {}
        """When the last writes of a unit's master states have landed."""

    def issue(self, task: Task) -> None:
        """Start a task that is not a compute now, or when what it reads is there."""
        match task.operation:
            case Operation.FETCH:
                home = self._placement.homes[task.unit].parameter
                size = min((task.last_page - task.first_page) * self._layout.page_size, self._shard_bytes[task.unit])
                updated = self._update_of(task.unit)
                self._arrive(task, task.kind, self._loads(home, Tier.DEVICE, size), max(self._now_s, updated.at_s))
                self._blame(task.unit, task.kind, updated)
            case Operation.GATHER:
                source = self._arrivals.get((task.unit, Kind.PARAMETER), self._update_of(task.unit))
                loads = [self._collective(task.unit, self._shard_bytes[task.unit])]
                self._arrive(task, Kind.FULL, loads, max(self._now_s, source.at_s))
                self._blame(
                    task.unit, Kind.FULL, source
                )  # What compute then waits for is the copy, not the collective.
            case Operation.REDUCE:
                loads = [self._collective(task.unit, self._gradient_bytes[task.unit])]
                self._arrive(task, Kind.GRADIENT, loads, self._now_s)
            case Operation.OFFLOAD:
                home = self._placement.homes[task.unit].gradient
                loads = self._loads(Tier.DEVICE, home, self._gradient_bytes[task.unit])
                self._arrive(task, Kind.GRADIENT, loads, self._ready_s(task.unit, Kind.GRADIENT))
            case Operation.UPDATE if self._hardware.shared_cores:
                self._owe(task)
            case Operation.UPDATE:
                reads, arithmetic, writes = self._update_loads(task.unit)
                ready_s = self._ready_s(task.unit, Kind.GRADIENT)
                self._arrive(task, Kind.MASTER, [*reads, arithmetic, *writes], ready_s)
            case Operation.RELEASE:
                self._arrivals.pop((task.unit, Kind.FULL), None)
            case Operation.EVICT:
                self._arrivals.pop((task.unit, Kind.PARAMETER), None)
            case Operation.COMPUTE:
                raise ValueError("a compute is told by its tick: use compute()")

    def compute(self, tick: Tick, exchanged_bytes: int = 0) -> None:
        """Wait for the tick's live units, exchange tokens, then compute."""
        self._pay()
        for unit in tick.live:
            self._pay_for(unit)
        nothing = _Arrival(0.0, Operation.COMPUTE)
        late = max((self._arrivals.get((unit, Kind.FULL), nothing) for unit in tick.live), key=lambda at: at.at_s)
        updated = max((self._update_of(unit) for unit in tick.live), key=lambda at: at.at_s)
        self._wait(max(late, updated, key=lambda at: at.at_s))
        if exchanged_bytes:
            # Nothing computes meanwhile: how many tokens come is not known before.
            self._wait(_Arrival(self._exchange(tick.unit, exchanged_bytes), Operation.EXCHANGE))
        if self._record is not None:
            self._record.append(Activity(None, Operation.COMPUTE, tick.unit, self._now_s, tick.seconds, 0))
        self._compute_s += tick.seconds
        self._now_s += tick.seconds + self._taken_by_transfers_s(tick.seconds)

    def _taken_by_transfers_s(self, seconds: float) -> float:
        """Of the next seconds of compute, by which they get longer: threads that read and write the disk take a core."""
        per_core = self._hardware.disk_bytes_per_core_s
        if not self._hardware.shared_cores or per_core is None:
            return 0.0
        size = 0.0
        for link in (Link.DISK_READ, Link.DISK_WRITE):
            busy_s = min(max(self._free_s[link] - self._now_s, 0.0), seconds)
            size += busy_s * self._hardware.bytes_per_s(link)
        both = self._hardware.disk_both_bytes_per_s
        if both is not None:
            size = min(size, both * min(max(self._disk_free_s - self._now_s, 0.0), seconds))
        return size / per_core

    def finish(self) -> Timing:
        """Wait for everything that is still under way."""
        while owed := (*self._read, *self._queued):
            self._pay_for(owed[0].task.unit)
        self._wait(self._last)
        return self.so_far()

    def end_step(self, *, wait_for_updates: bool) -> None:
        """The next step begins, behind the updates of this one: it waits for a unit's where it needs the unit."""
        for unit, kind in list(self._arrivals):
            if kind is Kind.MASTER:
                arrival = self._arrivals.pop((unit, kind))
                if wait_for_updates:
                    self._updated[unit] = arrival
        if wait_for_updates:
            self._expected = list(self._order)
            self._pay()

    def so_far(self) -> Timing:
        """What has passed up to the end of the last tick; for links, what has been issued."""
        return Timing(
            self._now_s,
            self._compute_s,
            tuple(LinkUse(link, self._bytes[link], self._busy_s[link]) for link in Link),
            tuple(Stall(cause, seconds) for cause, seconds in self._stalls.items()),
        )

    def _wait(self, arrival: _Arrival) -> None:
        if arrival.at_s > self._now_s:
            self._stalls[arrival.cause] = self._stalls.get(arrival.cause, 0.0) + arrival.at_s - self._now_s
            self._now_s = arrival.at_s

    def _owe(self, task: Task) -> None:
        """An update is issued: the cores will do it chunk by chunk."""
        begin_s = max(self._ready_s(task.unit, Kind.GRADIENT), self._now_s)
        if task not in self._order:
            self._order.append(task)
        self._expected = [other for other in self._expected if other.unit != task.unit]
        ahead = [ready_s for unit, ready_s in self._ahead if unit == task.unit]
        self._ahead = [chunk for chunk in self._ahead if chunk[0] != task.unit]
        for chunk in self._cut(task, begin_s):
            if ahead:
                self._read.append(replace(chunk, ready_s=max(begin_s, ahead.pop(0))))
            else:
                self._queued.append(chunk)
        self._fetch()

    def _cut(self, task: Task, ready_s: float) -> list[_Owed]:
        """An update's chunks; one where nothing is staged."""
        reads, arithmetic, writes = self._update_loads(task.unit)
        staged = self._placement.homes[task.unit].master is Tier.DISK
        numels = [flat.shard_numel for flat in self._layout.flats_of(task.unit) if flat.trainable]
        count = max(1, sum(-(-numel // chunk_numel(self._layout.page_size)) for numel in numels)) if staged else 1
        if staged:
            arithmetic = replace(arithmetic, bytes_per_s=self._hardware.disk_update_bytes_per_s)
        return [
            _Owed(
                task,
                tuple(_part(load, index, count) for load in reads),
                ready_s,
                _part(arithmetic, index, count),
                tuple(_part(load, index, count) for load in writes),
                staged,
            )
            for index in range(count)
        ]

    def _room(self) -> bool:
        """Whether another chunk may be staged."""
        self._landing = [end_s for end_s in self._landing if end_s > self._now_s]
        held = sum(chunk.staged for chunk in self._read) + len(self._ahead) + len(self._landing)
        return held < self._chunks

    def _fetch(self) -> None:
        """Read what there is room for: chunks of updates that were issued, then of those that are to come."""
        while self._queued and (not self._queued[0].staged or self._room()):
            chunk = self._queued.pop(0)
            begin_s = max(self._now_s, chunk.ready_s, self._written_s.get(chunk.task.unit, 0.0))
            self._read.append(replace(chunk, ready_s=self._carry(chunk.task, chunk.reads, begin_s)))
        while not self._queued and self._expected and self._room():
            task = self._expected[0]
            chunks = self._cut(task, 0.0)
            done = sum(unit == task.unit for unit, _ in self._ahead)
            if done == len(chunks) or not chunks[0].staged or any(read.task.unit == task.unit for read in self._read):
                self._expected.pop(0)
                continue
            begin_s = max(self._now_s, self._written_s.get(task.unit, 0.0))
            self._ahead.append((task.unit, self._carry(task, chunks[done].reads, begin_s)))

    def _pay(self) -> None:
        """Do the arithmetic of chunks whose reads have come."""
        while True:
            self._fetch()
            ready = next((chunk for chunk in self._read if chunk.ready_s <= self._now_s), None)
            if ready is None:
                return
            self._read.remove(ready)
            self._do(ready)

    def _pay_for(self, unit: int) -> None:
        """Compute needs a unit: wait for its update, and do what comes meanwhile."""
        self._queued.sort(key=lambda chunk: chunk.task.unit != unit)
        while any(chunk.task.unit == unit for chunk in (*self._read, *self._queued)):
            self._pay()
            waits_for = [chunk.ready_s for chunk in self._read] + (self._landing if self._queued else [])
            if waits_for:
                self._wait(_Arrival(min(waits_for), Operation.UPDATE))

    def _do(self, chunk: _Owed) -> None:
        end_s = self._carry(chunk.task, [chunk.arithmetic], self._now_s)
        self._wait(_Arrival(end_s + (self._hardware.chunk_s if chunk.staged else 0.0), Operation.UPDATE))
        written_s = self._carry(chunk.task, chunk.writes, self._now_s)
        self._written_s[chunk.task.unit] = written_s
        if chunk.staged:
            self._landing.append(written_s)

    def _exchange(self, unit: int, size: int) -> float:
        return self._carry(
            Task(Operation.EXCHANGE, unit, Kind.FULL, 0, 0, 0), [_Load(Link.EXCHANGE, size)], self._now_s
        )

    def _carry(self, task: Task, loads: Iterable[_Load], ready_s: float) -> float:
        """Put loads on their links; returns when the last one is there."""
        end_s = ready_s
        for load in loads:
            start_s = max(ready_s, self._free_s[load.link])
            seconds = load.bytes / (load.bytes_per_s or self._hardware.bytes_per_s(load.link))
            both = self._hardware.disk_both_bytes_per_s
            if both is not None and load.link in (Link.DISK_READ, Link.DISK_WRITE):
                self._disk_free_s = max(self._disk_free_s, ready_s) + load.bytes / both
                seconds = max(seconds, self._disk_free_s - start_s)
            self._free_s[load.link] = start_s + seconds
            self._busy_s[load.link] += seconds
            self._bytes[load.link] += load.bytes
            if self._record is not None and load.bytes:
                self._record.append(Activity(load.link, task.operation, task.unit, start_s, seconds, load.bytes))
            end_s = max(end_s, start_s + seconds)
        self._last = max(self._last, _Arrival(end_s, task.operation), key=lambda at: at.at_s)
        return end_s

    def _arrive(self, task: Task, kind: Kind, loads: Iterable[_Load], ready_s: float) -> None:
        end_s = self._carry(task, loads, ready_s)
        arrival = _Arrival(end_s, task.operation)
        before = self._arrivals.get((task.unit, kind), arrival)
        self._arrivals[task.unit, kind] = max(before, arrival, key=lambda at: at.at_s)

    def _update_of(self, unit: int) -> _Arrival:
        return self._updated.get(unit, _Arrival(0.0, Operation.GATHER))

    def _blame(self, unit: int, kind: Kind, source: _Arrival) -> None:
        """A copy that had to wait for `source` is late because of that."""
        if source.at_s > self._now_s:
            self._arrivals[unit, kind] = _Arrival(self._arrivals[unit, kind].at_s, source.cause)

    def _ready_s(self, unit: int, kind: Kind) -> float:
        return max(self._now_s, self._arrivals.get((unit, kind), _Arrival(0.0, Operation.COMPUTE)).at_s)

    def _loads(self, source: Tier, target: Tier, size: int) -> list[_Load]:
        """The links between two tiers. Disk bytes pass through the host where there is one."""
        if source is target:
            return []
        loads: list[_Load] = []
        if source is Tier.DISK:
            loads.append(_Load(Link.DISK_READ, size))
        if target is Tier.DISK:
            loads.append(_Load(Link.DISK_WRITE, size))
        if self._has_host and target is Tier.DEVICE:
            loads.append(_Load(Link.HOST_TO_DEVICE, size))
        if self._has_host and source is Tier.DEVICE:
            loads.append(_Load(Link.DEVICE_TO_HOST, size))
        return loads

    def _update_loads(self, unit: int) -> tuple[list[_Load], _Load, list[_Load]]:
        """Read the master states where they live and bring the gradients; the arithmetic; write, send the parameters home."""
        homes = self._placement.homes[unit]
        trainable = [flat for flat in self._layout.flats_of(unit) if flat.trainable]
        master_bytes = sum(
            flat.shard_numel * self._placement.master_bytes_per_element[flat.index] for flat in trainable
        )
        gradient_bytes = self._gradient_bytes[unit]
        place = Tier.HOST if self._has_host and homes.master is not Tier.DEVICE else Tier.DEVICE
        link = Link.UPDATE_HOST if place is Tier.HOST else Link.UPDATE_DEVICE
        return (
            [*self._loads(homes.master, place, master_bytes), *self._loads(homes.gradient, place, gradient_bytes)],
            _Load(link, 2 * master_bytes + 2 * gradient_bytes),
            [
                *self._loads(place, homes.master, master_bytes),
                *self._loads(place, homes.parameter, gradient_bytes),  # Trainable parameters: as many bytes.
            ],
        )

    def _collective(self, unit: int, shard_bytes: int) -> _Load:
        sharing = max((flat.world_size for flat in self._layout.flats_of(unit)), default=1)
        rate = self._hardware.holders_bytes_per_s if sharing < self._layout.world_size else None
        return _Load(Link.COLLECTIVE, shard_bytes * (sharing - 1), rate)


def _part(load: _Load, index: int, count: int) -> _Load:
    """One of so many parts, equal but for a byte."""
    return replace(load, bytes=load.bytes * (index + 1) // count - load.bytes * index // count)


_STEPS_BEFORE = 3
"""Steps that are replayed before the one that counts: the first waits for no updates, the second for no earlier writes, the
third reads nothing ahead that the second has left."""


def steady(
    layout: ModelLayout,
    placement: Placement,
    plan: Plan,
    trace: Trace,
    budget: Budget,
    hardware: Hardware,
    *,
    staging_chunks: float = math.inf,
    micro_batches: int = 1,
    wait_for_updates: bool = True,
    record: list[Activity] | None = None,
    exchanged_bytes: Mapping[int, int] | None = None,
) -> Timing:
    """The time of one optimizer step among many: a step begins while updates of the one before are still under way.

    Args:
        plan: of one micro-batch, one that `simulate` accepts; trace: with the seconds of its ticks.
        staging_chunks: of updates, which staging between disk and CPU holds at once.
        micro_batches: in one optimizer step; updates belong to the last.
        wait_for_updates: a unit's next use waits for its update; not so in lock-free mode.
        record: takes what happened in the step that counts, its start at 0.
        exchanged_bytes: by tick, tokens that one rank sends to others before it computes.
    """
    activities: list[Activity] | None = None if record is None else []
    clock = Clock(layout, placement, budget, hardware, staging_chunks=staging_chunks, record=activities)
    triggers = [plan.tasks_at(trigger) for trigger in range(plan.tick_count + 1)]
    exchanged = exchanged_bytes or {}
    before = clock.so_far()
    for step in range(_STEPS_BEFORE + 1):
        if step == _STEPS_BEFORE:
            before = clock.so_far()
        for micro_batch in range(micro_batches):
            for trigger, tasks in enumerate(triggers):
                for task in tasks:
                    last = micro_batch == micro_batches - 1
                    if task.operation is not Operation.COMPUTE and (last or task.operation is not Operation.UPDATE):
                        clock.issue(task)
                if trigger < plan.tick_count:
                    clock.compute(trace.ticks[trigger], exchanged.get(trigger, 0))
        clock.end_step(wait_for_updates=wait_for_updates)
    after = clock.so_far()
    if record is not None and activities is not None:
        begin, end = before.seconds, after.seconds
        record += [
            replace(done, start_s=done.start_s - begin)
            for done in activities
            if done.start_s < end and done.start_s + done.seconds > begin
        ]
    stalled = {stall.cause: stall.seconds for stall in before.stalls}
    return Timing(
        after.seconds - before.seconds,
        after.compute_s - before.compute_s,
        tuple(
            LinkUse(new.link, new.bytes - old.bytes, new.busy_s - old.busy_s)
            for new, old in zip(after.links, before.links, strict=True)
        ),
        tuple(Stall(stall.cause, stall.seconds - stalled.get(stall.cause, 0.0)) for stall in after.stalls),
    )
