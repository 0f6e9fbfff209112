"""Links as queues: bytes that each carries, when it is free again, and core time that transfers take from compute.

Loads of fetches and of gradients go through a link in order. Loads that yield, those of updates in a thread of its own, are
chunks of which a run has a few in flight only, so a link carries them in the gaps: a later fetch does not wait for a whole
update. When such a load ends depends on the loads that follow it, so its end is computed when it is asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

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


@dataclass(slots=True, eq=False)
class YieldingLoad:
    """A load that waits for all others of its link, and continues after each of them.

    Attributes:
        lane: of the link that carries it.
        ready_s: when it may begin.
        left_s: seconds of it that the link has not carried yet.
        end_s: when it has ended, or the time until which the link has carried it.
    """

    load: Load
    operation: Operation
    unit: int
    lane: _Lane
    ready_s: float
    seconds: float
    left_s: float
    end_s: float


@dataclass(slots=True)
class _Lane:
    """Loads that one link carries from `settled_s` on.

    Attributes:
        settled_s: the time until which yielding loads have been carried.
        taken: begins and ends of other loads, in order.
        yielding: yielding loads, in order.
        ends: ends of the first yielding loads, in their order, as far as they have been asked for.
    """

    settled_s: float = 0.0
    taken: deque[tuple[float, float]] = field(default_factory=deque)
    yielding: deque[YieldingLoad] = field(default_factory=deque)
    ends: dict[YieldingLoad, float] = field(default_factory=dict)

    def take(self, begin_s: float, end_s: float) -> None:
        """Adds a load that does not yield: those that yield and end after its begin end later."""
        if end_s > begin_s:
            self.taken.append((begin_s, end_s))
            while self.ends and next(reversed(self.ends.values())) > begin_s:
                self.ends.popitem()

    def pieces(
        self, until_s: float = math.inf, from_s: float = 0.0, skipped: int = 0
    ) -> Iterator[tuple[YieldingLoad, float, float, float]]:
        """Yields the pieces of yielding loads up to a time: the load, begin, end, and the seconds left after it.

        Args:
            until_s: up to which they are yielded.
            from_s: when the first `skipped` loads, which are not yielded, have ended.
            skipped: how many loads.
        """
        now_s, taken = max(self.settled_s, from_s), iter(self.taken)
        begin_s, end_s = next(taken, _NEVER)
        for each in islice(self.yielding, skipped, None):
            left_s, now_s = each.left_s, max(now_s, each.ready_s)
            while left_s:
                while begin_s <= now_s:
                    now_s = max(now_s, end_s)
                    begin_s, end_s = next(taken, _NEVER)
                if now_s >= until_s:
                    return
                stop_s = min(now_s + left_s, begin_s, until_s)
                left_s = 0.0 if stop_s >= now_s + left_s else left_s - (stop_s - now_s)
                yield each, now_s, stop_s, left_s
                now_s = stop_s

    def end_s(self, load: YieldingLoad) -> float:
        """Returns when a yielding load ends if no other load follows."""
        if load not in self.ends:
            # Each load's end is computed once while no other load delays it: plans of experts have thousands of updates.
            from_s = next(reversed(self.ends.values()), 0.0)
            for each, _, stop_s, left_s in self.pieces(from_s=from_s, skipped=len(self.ends)):
                if not left_s:
                    self.ends[each] = stop_s
                    if each is load:
                        break
        return self.ends[load]


_NEVER = (math.inf, math.inf)


class Queues:
    """The links of one rank, each of which carries one load at a time.

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
        self._lanes: dict[Link | None, _Lane] = {link: _Lane() for link in (*Link, None)}
        """By link; None: reads and writes of a disk that is slower with both."""

    def used(self) -> tuple[LinkUse, ...]:
        """Returns the use of each link so far."""
        return tuple(LinkUse(link, self._bytes[link], self._busy_s[link], self._collectives[link]) for link in Link)

    def carry(self, operation: Operation, unit: int, loads: Iterable[Load], ready_s: float) -> float:
        """Queues loads on their links, from `ready_s` on; returns the time at which the last one ends."""
        end_s = ready_s
        for load in loads:
            start_s = max(ready_s, self._free_s[load.link])
            seconds = self._seconds(load)
            both = self._hardware.disk_both_bytes_per_s
            if both is not None and load.link in (Link.DISK_READ, Link.DISK_WRITE):
                begin_s = max(self._disk_free_s, ready_s)
                self._disk_free_s = begin_s + load.bytes / both
                self._lanes[None].take(begin_s, self._disk_free_s)
                seconds = max(seconds, self._disk_free_s - start_s)
            self._free_s[load.link] = start_s + seconds
            self._lanes[load.link].take(start_s, start_s + seconds)
            self._count(load, seconds)
            if self._record is not None and load.bytes:
                self._record.append(Activity(load.link, operation, unit, start_s, seconds, load.bytes))
            end_s = max(end_s, start_s + seconds)
        return end_s

    def carry_in_gaps(
        self, operation: Operation, unit: int, loads: Iterable[Load], ready_s: float
    ) -> Sequence[YieldingLoad]:
        """Queues loads that yield to all others, from `ready_s` on; `end_s` says when they end."""
        queued = []
        for load in loads:
            seconds = self._seconds(load)
            self._count(load, seconds)
            parts = [(self._lanes[load.link], seconds)]
            both = self._hardware.disk_both_bytes_per_s
            if both is not None and load.link in (Link.DISK_READ, Link.DISK_WRITE):
                parts.append((self._lanes[None], load.bytes / both))
            for lane, lasts_s in parts:
                found = YieldingLoad(load, operation, unit, lane, ready_s, lasts_s, lasts_s, ready_s)
                if lasts_s:
                    lane.yielding.append(found)
                queued.append(found)
        return queued

    def end_s(self, queued: Sequence[YieldingLoad]) -> float:
        """Returns when the last of the loads ends, as far as loads that have been queued so far delay it."""
        ends = [each.end_s if not each.left_s else each.lane.end_s(each) for each in queued]
        return max(ends, default=0.0)

    def settle(self, now_s: float) -> None:
        """Carries yielding loads up to a time, before which no further load begins."""
        for link, lane in self._lanes.items():
            if lane.yielding:
                for each, begin_s, stop_s, left_s in list(lane.pieces(now_s)):
                    each.left_s, each.end_s = left_s, stop_s
                    if self._record is not None and link is not None and each.load.bytes:
                        share = round(each.load.bytes * (stop_s - begin_s) / each.seconds)
                        piece = Activity(link, each.operation, each.unit, begin_s, stop_s - begin_s, share)
                        self._record.append(piece)
                while lane.yielding and not lane.yielding[0].left_s:
                    lane.ends.pop(lane.yielding.popleft(), None)
            lane.settled_s = max(lane.settled_s, now_s)
            while lane.taken and lane.taken[0][1] <= lane.settled_s:
                lane.taken.popleft()

    def _seconds(self, load: Load) -> float:
        seconds = load.bytes / (load.bytes_per_s or self._hardware.bytes_per_s(load.link))
        return seconds + load.more_s + load.collectives * self._hardware.collective_s.get(load.link, 0.0)

    def _count(self, load: Load, seconds: float) -> None:
        self._busy_s[load.link] += seconds
        self._bytes[load.link] += load.bytes
        self._collectives[load.link] += load.collectives

    def taken_by_transfers_s(self, now_s: float, seconds: float) -> float:
        """Seconds by which `seconds` of compute from now on get longer because disk transfers and collectives take core time.

        Threads that read and write the disk occupy a core. Ranks that compute in lockstep wait for the rank whose core is
        occupied; the ranks' transfers are taken to be independent. Collectives take the time of all ranks at once.
        """
        if not self._hardware.shared_cores:
            return 0.0
        return self._taken_by_disk_s(now_s, seconds) + self._taken_by_collectives_s(now_s, seconds)

    def _taken_by_collectives_s(self, now_s: float, seconds: float) -> float:
        per_core = self._hardware.collective_bytes_per_core_s
        if per_core is None:
            return 0.0
        busy_s = min(max(self._free_s[Link.COLLECTIVE] - now_s, 0.0), seconds)
        return busy_s * min(1.0, self._hardware.bytes_per_s(Link.COLLECTIVE) / per_core)

    def _taken_by_disk_s(self, now_s: float, seconds: float) -> float:
        per_core = self._hardware.disk_bytes_per_core_s
        if per_core is None:
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
