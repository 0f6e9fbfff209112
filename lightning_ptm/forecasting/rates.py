"""Rates of one rank's links, and what they come to in a step: seconds of compute, links and waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.sharding import Axis, ModelSharding
from lightning_ptm.terms import Link, Operation


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's share of a machine: bytes per second of each link.

    The collective rate is of bytes received (gather) or sent (reduce) by one rank. The update rates are of all bytes
    that an update reads and writes: master states twice, gradients and compute parameters once.

    Args:
        disk_both_bytes_per_s: of reads and writes of the disk that go on together; None: neither slows the other.
        shared_cores: the arithmetic of updates runs on the cores that compute (a CPU).
        exchange_bytes_per_s: of tokens that one rank sends to others' experts; None: nobody divides experts.
        tensor_exchange_bytes_per_s: of activations that one rank of a tensor group sends; None: there is none.
        shared_bytes_per_s: by the axes along which alone ranks differ, of the collectives of those that share a flat; others
            are as of all ranks.
        disk_update_bytes_per_s: of that arithmetic, where its reads and writes of the disk go on beside it; None: the same.
        collective_s: of each link between ranks, what a collective takes beside its bytes; of others, nothing.
        round_s: a round in which ranks agree on what they do next: compute waits for it.
        chunk_s: what those cores do for each chunk that is staged, beside that arithmetic.
        disk_bytes_per_core_s: that one of those cores reads and writes a second: compute, which is in lockstep, gets longer
            by the time of its transfers; None: they take none.
        lockstep_ranks: that exchange activations many times in a step, so that each waits for all of them.
        states_numel_per_s: by word of `optimizer_state_dtype`, elements of states that the arithmetic decodes and
        encodes again; None,
            or no such word: that takes no time.
        update_flops_per_s: by dtype, of matrix products in updates on the CPU; device_flops_per_s: on a device with
            arithmetic of its own; None: they take no time.
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
    lockstep_ranks: int = 1
    collective_s: Mapping[Link, float] = field(default_factory=dict)
    round_s: float = 0.0
    states_numel_per_s: Mapping[str, float] | None = None
    update_flops_per_s: Mapping[str, float] | None = None
    device_flops_per_s: Mapping[str, float] | None = None

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
            Link.TENSOR_EXCHANGE: self.tensor_exchange_bytes_per_s or self.collective_bytes_per_s,
        }[link]

    def shared_rates(self, flats: Iterable[FlatLayout], holders: ModelSharding) -> dict[int, float | None]:
        """By flat, bytes per second of its collectives; None: as of all ranks."""
        return {flat.index: self.shared_bytes_per_s.get(holders.of_flat(flat).axes) for flat in flats}


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one link carried, for how long it was busy, and of a link between ranks, in how many collectives."""

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
    """Seconds of the whole plan, of its compute alone, of each link and of each cause of waiting; and rounds of agreement,
    with what they take."""

    seconds: float
    compute_s: float
    links: tuple[LinkUse, ...]
    stalls: tuple[Stall, ...]
    rounds: int = 0
    rounds_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing that was busy for a time: compute (`link` is None) or a link."""

    link: Link | None
    operation: Operation
    unit: int
    start_s: float
    seconds: float
    bytes: int
