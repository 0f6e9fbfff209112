"""Rates of one rank's links, and the timing of a step: seconds of compute, of links and of waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.terms import Link, Operation


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's share of a machine: bytes per second of each link.

    The collective rate counts bytes received (gather) or sent (reduce) by one rank. The update rates count all bytes that an
    update reads and writes: master states twice, gradients and compute parameters once.

    Args:
        disk_both_bytes_per_s: rate of concurrent reads and writes of the disk; None: neither slows the other.
        shared_cores: whether the arithmetic of updates runs on the cores that compute (a CPU).
        exchange_bytes_per_s: rate at which one rank sends tokens to others' experts; None: no rank divides experts.
        tensor_exchange_bytes_per_s: rate at which one rank of a tensor group sends activations; None: there is no group.
        shared_bytes_per_s: rates of the collectives of ranks that share a flat, by the axes along which these ranks differ;
            axes that are missing have the rate of all ranks.
        disk_update_bytes_per_s: rate of updates' arithmetic on shared cores while their disk reads and writes go on; None:
            the same rate.
        collective_s: by link between ranks, seconds of a collective in addition to those for its bytes; missing: 0.
        round_s: seconds of a round in which ranks agree on what they do next; compute waits for it.
        chunk_s: seconds of shared cores for each staged chunk, in addition to its arithmetic.
        disk_bytes_per_core_s: bytes per second that one shared core can read and write; compute, which runs in lockstep, gets
            longer by the time of its transfers. None: transfers take no core time.
        collective_bytes_per_core_s: bytes per second of collectives of pages for which the time of one shared core is enough;
            compute gets longer by that time while they pass. None: they take no core time.
        lockstep_ranks: number of ranks that exchange activations many times in a step, so that each waits for all.
        states_numel_per_s: by value of `optimizer_state_dtype`, elements of states per second that the arithmetic decodes and
            encodes; None, or without the value: it takes no time.
        update_flops_per_s: by dtype, rate of matrix products in updates on the CPU; None: they take no time.
        device_flops_per_s: the same for updates on a device.
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
    tensor_exchange_bytes_per_s: float | None = None
    shared_bytes_per_s: Mapping[tuple[Axis, ...], float] = field(default_factory=dict)
    disk_update_bytes_per_s: float | None = None
    chunk_s: float = 0.0
    disk_bytes_per_core_s: float | None = None
    collective_bytes_per_core_s: float | None = None
    lockstep_ranks: int = 1
    collective_s: Mapping[Link, float] = field(default_factory=dict)
    round_s: float = 0.0
    states_numel_per_s: Mapping[str, float] | None = None
    update_flops_per_s: Mapping[str, float] | None = None
    device_flops_per_s: Mapping[str, float] | None = None

    def bytes_per_s(self, link: Link) -> float:
        """Returns the rate of a link."""
        return {
            Link.HOST_TO_DEVICE: self.host_to_device_bytes_per_s,
            Link.DEVICE_TO_HOST: self.device_to_host_bytes_per_s,
            Link.DISK_READ: self.disk_read_bytes_per_s,
            Link.DISK_WRITE: self.disk_write_bytes_per_s,
            Link.COLLECTIVE: self.collective_bytes_per_s,
            Link.UPDATE_HOST: self.update_host_bytes_per_s,
            Link.UPDATE_DEVICE: self.update_device_bytes_per_s,
            Link.EXCHANGE: self.exchange_bytes_per_s or self.collective_bytes_per_s,
            Link.TENSOR_EXCHANGE: self.tensor_exchange_bytes_per_s or self.collective_bytes_per_s,
        }[link]

    def shared_rates(self, flats: Iterable[FlatLayout], holders: ModelSharding) -> dict[int, float | None]:
        """Returns by flat the bytes per second of its collectives; None: the rate of all ranks."""
        return {flat.index: self.shared_bytes_per_s.get(holders.of_flat(flat).axes) for flat in flats}


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Use of one link: bytes, busy seconds and, for a link between ranks, number of collectives."""

    link: Link
    bytes: int
    busy_s: float
    collectives: int = 0


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds that compute waited for one kind of task."""

    cause: Operation
    seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of a plan: total seconds, and those of compute, of each link, of each cause of waiting, of agreement rounds."""

    seconds: float
    compute_s: float
    links: tuple[LinkUse, ...]
    stalls: tuple[Stall, ...]
    rounds: int = 0
    rounds_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """A time in which compute (`link` is None) or a link was busy."""

    link: Link | None
    operation: Operation
    unit: int
    start_s: float
    seconds: float
    bytes: int
