"""Traffic counters of links (source tier, target tier): bytes, transfers, busy time; bandwidth is bytes / busy_s."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.device_work import Timer
from lightning_ptm.terms import Tier


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Totals of one link since the run began.

    `busy_s` is the time in which at least one transfer was in flight, so overlapping transfers count once. Copies on a
    CUDA stream run one after another; each is counted when it has ended, with its own duration.
    """

    bytes: int
    transfers: int
    busy_s: float

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth while busy; 0.0 before the first transfer."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0


class LinkMeter:
    """Counter of one link, or of several links together. Its owner holds a lock and passes the time, in seconds."""

    __slots__ = ("_busy_s", "_bytes", "_in_flight", "_since_s", "_transfers")

    def __init__(self) -> None:
        self._bytes = 0
        self._transfers = 0
        self._busy_s = 0.0
        self._in_flight = 0
        self._since_s = 0.0

    @staticmethod
    def begin(meters: Sequence[LinkMeter], size_bytes: int, now_s: float) -> None:
        """Counts a transfer that begins in each of the meters."""
        for meter in meters:
            meter._bytes += size_bytes
            meter._transfers += 1
            if meter._in_flight == 0:
                meter._since_s = now_s
            meter._in_flight += 1

    @staticmethod
    def end(meters: Sequence[LinkMeter], now_s: float) -> None:
        """Counts the end of a transfer that has begun in each of the meters."""
        for meter in meters:
            meter._in_flight -= 1
            if meter._in_flight == 0:
                meter._busy_s += now_s - meter._since_s

    def add(self, size_bytes: int, seconds_s: float) -> None:
        """Counts a transfer that has ended and measured its own duration, without `begin`: a copy on a CUDA stream.

        The time from its launch to its end includes the wait for earlier copies, so it is no measure of its duration.
        """
        self._bytes += size_bytes
        self._transfers += 1
        self._busy_s += seconds_s

    def stats(self, now_s: float) -> LinkStats:
        running_s = now_s - self._since_s if self._in_flight else 0.0
        return LinkStats(self._bytes, self._transfers, self._busy_s + running_s)


Link = tuple[Tier, Tier]
"""(source tier, target tier)."""


@dataclass(frozen=True, slots=True)
class _Launched:
    timer: Timer
    name: str
    bytes: int
    began_s: float


class StreamLink:
    """Counter of the copies in one direction on one stream that the Copier does not report; each also becomes an event.

    A copy is counted when a later `launched` or `stats` finds that it has ended. Never blocks; any thread may call.
    I1: it keeps no copied byte alive.

    Args:
        track: track of its events.
        events: gets an event for every copy.
    """

    def __init__(self, track: str, events: Events) -> None:
        self._track = track
        self._events = events
        self._lock = threading.Lock()

        # State, under the lock.
        self._meter = LinkMeter()
        self._in_flight: deque[_Launched] = deque()
        """Copies in flight, in the order of launch, which is also the order of their ends."""

    def launched(self, name: str, size_bytes: int, began_s: float, timer: Timer) -> None:
        """Registers a copy that has just been launched.

        Args:
            name: name of its event.
            size_bytes: bytes copied.
            began_s: time before its launch, on the clock of `perf_counter`.
            timer: its end and duration.
        """
        with self._lock:
            self._in_flight.append(_Launched(timer, name, size_bytes, began_s))
            self._count_ended()

    def stats(self) -> LinkStats:
        """Returns the totals of the copies that have ended."""
        with self._lock:
            self._count_ended()
            return self._meter.stats(perf_counter())

    def _count_ended(self) -> None:
        while self._in_flight and self._in_flight[0].timer.done():
            ended = self._in_flight.popleft()
            seconds_s = ended.timer.seconds()
            self._meter.add(ended.bytes, seconds_s)
            if self._events.active:
                end_s = ended.began_s + seconds_s
                event = Event(EventKind.COPY, self._track, ended.name, ended.began_s, end_s, bytes=ended.bytes)
                self._events.emit(event)
