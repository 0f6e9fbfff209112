"""How long a plan would take on a machine that need not be here: links as queues, compute as traced.

Owns the clock of a simulation. Knows tasks and bytes, not whether they are right: simulate.py checks that. Each link
does one thing at a time, in issue order; pages stream, so a task that crosses several links takes as long as the
slowest of them. A wait for free pages is not modelled: the plan takes pages only where they are free by its triggers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ptm.planning.homes import Budget, Placement
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.plan import Task
from lightning_ptm.planning.trace import Tick
from lightning_ptm.terms import Kind, Operation, Tier


class Link(enum.Enum):
    """What can be busy besides compute: copies by direction, the collectives, and the update by place."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    COLLECTIVE = "collective"
    UPDATE_HOST = "update_host"
    UPDATE_DEVICE = "update_device"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's share of a machine: bytes per second of each link.

    The collective rate is of bytes received (gather) or sent (reduce) by one rank. The update rates are of all bytes
    that an update reads and writes: master states twice, gradients and compute parameters once.
    """

    name: str
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    collective_bytes_per_s: float
    update_host_bytes_per_s: float
    update_device_bytes_per_s: float

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
class _Arrival:
    at_s: float
    cause: Operation


@dataclass(frozen=True, slots=True)
class _Load:
    link: Link
    bytes: int


class Clock:
    """Runs beside a replay: told of each task and each compute in issue order."""

    def __init__(self, layout: ModelLayout, placement: Placement, budget: Budget, hardware: Hardware) -> None:
        # Configuration.
        self._layout = layout
        self._placement = placement
        self._hardware = hardware
        self._has_host = budget.host_bytes > 0
        # State.
        self._now_s = 0.0
        self._compute_s = 0.0
        self._free_s = dict.fromkeys(Link, 0.0)
        self._busy_s = dict.fromkeys(Link, 0.0)
        self._bytes = dict.fromkeys(Link, 0)
        self._arrivals: dict[tuple[int, Kind], _Arrival] = {}
        self._stalls: dict[Operation, float] = {}
        self._last = _Arrival(0.0, Operation.COMPUTE)

    def issue(self, task: Task) -> None:
        """Start a task that is not a compute now, or when what it reads is there."""
        match task.operation:
            case Operation.FETCH:
                home = self._placement.homes[task.unit].parameter
                size = min((task.last_page - task.first_page) * self._layout.page_size, self._shard_bytes(task.unit))
                self._arrive(task, task.kind, self._loads(home, Tier.DEVICE, size), self._now_s)
            case Operation.GATHER:
                source = self._arrivals.get((task.unit, Kind.PARAMETER), _Arrival(0.0, Operation.GATHER))
                loads = [_Load(Link.COLLECTIVE, self._others_bytes(self._shard_bytes(task.unit)))]
                self._arrive(task, Kind.FULL, loads, max(self._now_s, source.at_s))
                if source.at_s > self._now_s:  # What compute then waits for is the copy, not the collective.
                    late = self._arrivals[task.unit, Kind.FULL]
                    self._arrivals[task.unit, Kind.FULL] = _Arrival(late.at_s, source.cause)
            case Operation.REDUCE:
                loads = [_Load(Link.COLLECTIVE, self._others_bytes(self._gradient_bytes(task.unit)))]
                self._arrive(task, Kind.GRADIENT, loads, self._now_s)
            case Operation.OFFLOAD:
                home = self._placement.homes[task.unit].gradient
                loads = self._loads(Tier.DEVICE, home, self._gradient_bytes(task.unit))
                self._arrive(task, Kind.GRADIENT, loads, self._ready_s(task.unit, Kind.GRADIENT))
            case Operation.UPDATE:
                self._arrive(task, Kind.MASTER, self._update_loads(task.unit), self._ready_s(task.unit, Kind.GRADIENT))
            case Operation.RELEASE:
                self._arrivals.pop((task.unit, Kind.FULL), None)
            case Operation.EVICT:
                self._arrivals.pop((task.unit, Kind.PARAMETER), None)
            case Operation.COMPUTE:
                raise ValueError("a compute is told by its tick: use compute()")

    def compute(self, tick: Tick) -> None:
        """Wait for the tick's live units, then compute."""
        nothing = _Arrival(0.0, Operation.COMPUTE)
        late = max((self._arrivals.get((unit, Kind.FULL), nothing) for unit in tick.live), key=lambda at: at.at_s)
        self._wait(late)
        self._now_s += tick.seconds
        self._compute_s += tick.seconds

    def finish(self) -> Timing:
        """Wait for everything that is still under way."""
        self._wait(self._last)
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

    def _arrive(self, task: Task, kind: Kind, loads: Iterable[_Load], ready_s: float) -> None:
        end_s = ready_s
        for load in loads:
            start_s = max(ready_s, self._free_s[load.link])
            seconds = load.bytes / self._hardware.bytes_per_s(load.link)
            self._free_s[load.link] = start_s + seconds
            self._busy_s[load.link] += seconds
            self._bytes[load.link] += load.bytes
            end_s = max(end_s, start_s + seconds)
        arrival = _Arrival(end_s, task.operation)
        before = self._arrivals.get((task.unit, kind), arrival)
        self._arrivals[task.unit, kind] = max(before, arrival, key=lambda at: at.at_s)
        self._last = max(self._last, arrival, key=lambda at: at.at_s)

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

    def _update_loads(self, unit: int) -> list[_Load]:
        """Read and write the master states where they live, bring the gradients, send the parameters home."""
        homes = self._placement.homes[unit]
        trainable = [flat for flat in self._layout.flats_of(unit) if flat.trainable]
        master_bytes = sum(
            flat.shard_numel * self._placement.master_bytes_per_element[flat.index] for flat in trainable
        )
        gradient_bytes = self._gradient_bytes(unit)
        place = Tier.HOST if self._has_host and homes.master is not Tier.DEVICE else Tier.DEVICE
        link = Link.UPDATE_HOST if place is Tier.HOST else Link.UPDATE_DEVICE
        return [
            *self._loads(homes.master, place, master_bytes),
            *self._loads(homes.gradient, place, gradient_bytes),
            _Load(link, 2 * master_bytes + 2 * gradient_bytes),
            *self._loads(place, homes.master, master_bytes),
            *self._loads(place, homes.parameter, gradient_bytes),  # Trainable parameters: as many bytes.
        ]

    def _shard_bytes(self, unit: int) -> int:
        return sum(flat.shard_bytes for flat in self._layout.flats_of(unit))

    def _gradient_bytes(self, unit: int) -> int:
        return sum(flat.shard_bytes for flat in self._layout.flats_of(unit) if flat.trainable)

    def _others_bytes(self, shard_bytes: int) -> int:
        return shard_bytes * (self._layout.world_size - 1)
