"""What went over each link (source tier, target tier), and for how long: the achieved bandwidth is bytes / busy_s."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter

from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.transfer import Timer
from lightning_ptm.terms import Tier


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Totals of one link since the run began.

    `busy_s` is the time in which at least one transfer was in flight, so overlapping transfers count once. Copies on a
    CUDA stream, which follow each other, are counted when they have ended, with the time that each took.
    """

    bytes: int
    transfers: int
    busy_s: float

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth while busy; 0.0 before the first transfer."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0


class LinkMeter:
    """Counts one link. Its owner, the Allocator, holds a lock and tells the time, in seconds."""

    def __init__(self) -> None:
        self._bytes = 0
        self._transfers = 0
        self._busy_s = 0.0
        self._in_flight = 0
        self._since_s = 0.0

    def begin(self, size_bytes: int, now_s: float) -> None:
        self._bytes += size_bytes
        self._transfers += 1
        if self._in_flight == 0:
            self._since_s = now_s
        self._in_flight += 1

    def end(self, now_s: float) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._busy_s += now_s - self._since_s

    def add(self, size_bytes: int, seconds_s: float) -> None:
        """Count a transfer that measured itself and has ended, and was not begun here: one on a CUDA stream. (Between its
        launch and its end lies the wait for the copies before it, which is no time of its own.)"""
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
    """Counts, and tells of, copies of one direction on one stream, which nobody else reports: each when it is seen to have
    ended, at the next `launched` or `stats`. Waits for nothing; any thread may call. I1: it keeps no copied byte alive.

    Args:
        track: of its events.
        events: told of every copy.
    """

    def __init__(self, track: str, events: Events) -> None:
        self._track = track
        self._events = events
        self._lock = threading.Lock()

        # State, under the lock.
        self._meter = LinkMeter()
        self._under_way: deque[_Launched] = deque()
        """In the order of launching, which is that of their ends."""

    def launched(self, name: str, size_bytes: int, began_s: float, timer: Timer) -> None:
        """A copy is on its way.

        Args:
            name: of its event.
            began_s: before its launch, on the clock of `perf_counter`.
        """
        with self._lock:
            self._under_way.append(_Launched(timer, name, size_bytes, began_s))
            self._look()

    def stats(self) -> LinkStats:
        """Totals of the copies that have ended."""
        with self._lock:
            self._look()
            return self._meter.stats(perf_counter())

    def _look(self) -> None:
        while self._under_way and self._under_way[0].timer.done():
            ended = self._under_way.popleft()
            seconds_s = ended.timer.seconds()
            self._meter.add(ended.bytes, seconds_s)
            if self._events.active:
                end_s = ended.began_s + seconds_s
                event = Event(EventKind.COPY, self._track, ended.name, ended.began_s, end_s, bytes=ended.bytes)
                self._events.emit(event)
