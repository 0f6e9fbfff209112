"""Timed events of the runtime, and their listeners.

Owns the listeners of one run. Knows the standard library only.

I1: without a listener no time is measured and no event is created: a caller of `emit` checks `active` first.
I2: an event is emitted when it ends, on the thread on which it ended; two threads may emit at once.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class EventKind(enum.Enum):
    """Kinds of events: what an event's time was spent on."""

    TICK = "tick"
    """One forward or backward of a unit, until the next tick or the end of the pass; on CUDA, the time to launch it."""
    COPY = "copy"
    """A transfer between tiers, or of activations.

    On a CUDA stream: from the launch, for the duration of the copy itself.
    """
    COLLECTIVE = "collective"
    """An all-gather or a reduction, from its start until a waiting thread had the result."""
    UPDATE = "update"
    """Optimizer arithmetic on one chunk; on CUDA, the time to launch it."""
    STALL = "stall"
    """A wait of the compute thread."""


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of time on this rank.

    Attributes:
        kind: what the time was spent on.
        track: a tick's kind of iteration ("train" or "forward"); a copy's direction ("disk_to_host" and so on; for
            activations "activations_to_host" and "activations_to_device", or "activations_to_disk" and
            "activations_from_disk"); a stall's cause ("fetch", "update"); the
            tier that computes an update; "ranks" for a collective.
        name: name of the unit, tensor or collective.
        begin_s, end_s: times on the clock of `time.perf_counter`.
        index: a tick's number within its iteration, from 0.
        bytes: bytes that a copy moved, or bytes of the full flat of a collective.
        tier_bytes: of a tick: bytes of pages in use in each tier (`AngelPTMStrategy.tier_names`), the larger of its
            begin and its end.
    """

    kind: EventKind
    track: str
    name: str
    begin_s: float
    end_s: float
    index: int = 0
    bytes: int = 0
    tier_bytes: tuple[int, ...] = ()


Listener = Callable[[Event], None]
"""Callback for each event, on any thread, including those that move pages.

It must be quick, take no lock of the runtime, and not raise.
"""


class Events:
    """The publisher of one run's events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

        # State: written under the lock and replaced as a whole, so that `emit` needs no lock.
        self._listeners: tuple[Listener, ...] = ()
        self.active = False
        """Whether any listener is subscribed."""

    def emit(self, event: Event) -> None:
        """Passes an event that has ended to all listeners."""
        for listener in self._listeners:
            listener(event)

    @contextmanager
    def subscribed(self, listener: Listener) -> Iterator[None]:
        """Context in which `listener` receives each event that ends."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
            self.active = True
        try:
            yield
        finally:
            with self._lock:
                left = list(self._listeners)
                left.remove(listener)
                self._listeners = tuple(left)
                self.active = bool(left)
