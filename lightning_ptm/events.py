"""What happened when: the one place to which the runtime tells its stretches of time, for whoever listens.

Owns the list of listeners of one run. Knows the standard library only.

I1: with no listener nothing is measured and nothing is made: whoever would tell looks at `heard` first.
I2: events are told at their end, in the thread in which they ended; two threads may tell at once.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class EventKind(enum.Enum):
    """What a stretch of time was spent on."""

    TICK = "tick"
    """One forward or backward of a unit, up to the next tick or the end of the pass; on CUDA, while it was launched."""
    COPY = "copy"
    """A transfer between tiers, or of activations. On a CUDA stream: from its launch, for as long as the copy itself took."""
    COLLECTIVE = "collective"
    """From the start of an all-gather or a reduction until somebody who waited had its result."""
    UPDATE = "update"
    """Optimizer arithmetic on one chunk; on CUDA, while it was launched."""
    STALL = "stall"
    """Compute waited."""


@dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time of this rank.

    Attributes:
        kind: what it was spent on.
        track: where: for a tick "train" or "forward" (the kind of iteration), for a copy "disk_to_host" and so on,
            of activations "activations_to_host" and "activations_to_device", for a stall its cause ("fetch", "update"), for
            an update the tier that computes it, for a collective "ranks".
        name: of the unit, tensor or collective.
        begin_s, end_s: on the clock of `time.perf_counter`.
        index: a tick's number within its iteration, from 0.
        bytes: that a copy moved, or of the full flat of a collective.
        tier_bytes: of a tick: bytes of pages in use in each tier (`AngelPTMStrategy.tier_names`), the larger of its begin
            and its end.
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
"""Called in any thread, also in those that move pages: it must be quick, take no lock of the runtime, and not raise."""


class Events:
    """Where the runtime of one run tells, and others listen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

        # State: written under the lock, replaced as a whole, so that `tell` needs none.
        self._listeners: tuple[Listener, ...] = ()

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def tell(self, event: Event) -> None:
        """Something has ended."""
        for listener in self._listeners:
            listener(event)

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Inside, `listener` is called with each event that ends."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._lock:
                left = list(self._listeners)
                left.remove(listener)
                self._listeners = tuple(left)
