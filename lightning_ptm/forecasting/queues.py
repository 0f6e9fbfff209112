"""Links as queues: bytes that each carries, when it is free again, and core time that transfers take from compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ptm.forecasting.rates import Activity, Hardware, LinkUse
from lightning_ptm.terms import Link, Operation


@dataclass(frozen=True, slots=True)
class Load:
    """Work for a link: bytes to transfer, or bytes that the arithmetic of an update reads and writes."""

    link: Link
    bytes: int
    bytes_per_s: float | None = None
    """Rate of the load; None: the link's."""
    collectives: int = 0
    """Number of collectives, for a link between ranks."""
    more_s: float = 0.0
    """Seconds in addition to those for the bytes."""


class Queues:
    """The links of one rank, each of which carries one load at a time, in order.

    Args:
        hardware: rates of the links.
        record: receives the activities of the links; None: they are not recorded.
    """

    def __init__(self, hardware: Hardware, record: list[Activity] | None) -> None:
        # Configuration.
        self._hardware = hardware
        self._record = record
        # State.
        self._free_s = dict.fromkeys(Link, 0.0)
        self._busy_s = dict.fromkeys(Link, 0.0)
        self._bytes = dict.fromkeys(Link, 0)
        self._collectives = dict.fromkeys(Link, 0)
        self._disk_free_s = 0.0

    def used(self) -> tuple[LinkUse, ...]:
        """Returns the use of each link so far."""
        return tuple(LinkUse(link, self._bytes[link], self._busy_s[link], self._collectives[link]) for link in Link)

    def carry(self, operation: Operation, unit: int, loads: Iterable[Load], ready_s: float) -> float:
        """Queues loads on their links, from `ready_s` on; returns the time at which the last one ends."""
        end_s = ready_s
        for load in loads:
            start_s = max(ready_s, self._free_s[load.link])
            seconds = load.bytes / (load.bytes_per_s or self._hardware.bytes_per_s(load.link))
            seconds += load.more_s + load.collectives * self._hardware.collective_s.get(load.link, 0.0)
            both = self._hardware.disk_both_bytes_per_s
            if both is not None and load.link in (Link.DISK_READ, Link.DISK_WRITE):
                self._disk_free_s = max(self._disk_free_s, ready_s) + load.bytes / both
                seconds = max(seconds, self._disk_free_s - start_s)
            self._free_s[load.link] = start_s + seconds
            self._busy_s[load.link] += seconds
            self._bytes[load.link] += load.bytes
            self._collectives[load.link] += load.collectives
            if self._record is not None and load.bytes:
                self._record.append(Activity(load.link, operation, unit, start_s, seconds, load.bytes))
            end_s = max(end_s, start_s + seconds)
        return end_s

    def taken_by_transfers_s(self, now_s: float, seconds: float) -> float:
        """Seconds by which `seconds` of compute from now on get longer because disk transfers take core time.

        Threads that read and write the disk occupy a core. Ranks that compute in lockstep wait for the rank whose core is
        occupied; the ranks' transfers are taken to be independent.
        """
        per_core = self._hardware.disk_bytes_per_core_s
        if not self._hardware.shared_cores or per_core is None:
            return 0.0
        size = 0.0
        for link in (Link.DISK_READ, Link.DISK_WRITE):
            busy_s = min(max(self._free_s[link] - now_s, 0.0), seconds)
            size += busy_s * self._hardware.bytes_per_s(link)
        both = self._hardware.disk_both_bytes_per_s
        if both is not None:
            size = min(size, both * min(max(self._disk_free_s - now_s, 0.0), seconds))
        return _longer_s(seconds, size / per_core, self._hardware.lockstep_ranks)


def _longer_s(seconds: float, taken_s: float, ranks: int) -> float:
    """Seconds by which compute gets longer if each of the ranks loses `taken_s` of it at independent times.

    Of a time `t`, `t (1 - taken_s / t) ** ranks` is left for compute; the equation is solved by bisection.
    """
    least_s, most_s = taken_s, ranks * taken_s
    for _ in range(_HALVINGS if ranks > 1 else 0):
        longer_s = (least_s + most_s) / 2
        whole_s = seconds + longer_s
        enough = whole_s * (1 - taken_s / whole_s) ** ranks >= seconds
        least_s, most_s = (least_s, longer_s) if enough else (longer_s, most_s)
    return most_s


_HALVINGS = 30
