"""Timing of compute: events for ticks and stalls, and the seconds that compute has waited.

Owns the tick in progress, which is emitted as an event when it ends, and the stalled seconds by cause.

I1: page bytes are measured only if the events have a listener.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from time import perf_counter

from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.terms import Mode, Phase

_LEAST_STALL_S = 1e-5
"""Shortest wait that counts as a stall: the check for outstanding work itself takes about this long."""


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenTick:
    """A tick in progress that listeners will receive."""

    track: str
    name: str
    began_s: float
    index: int
    tier_bytes: tuple[int, ...]


class ComputeTiming:
    """Timing of one rank's compute.

    Args:
        used_bytes: returns the bytes of pages in use, by tier.
    """

    def __init__(self, events: Events, used_bytes: Callable[[], tuple[int, ...]]) -> None:
        self._events = events
        self._used_bytes = used_bytes
        # state
        self._open_tick: _OpenTick | None = None
        self.stall_s: dict[str, float] = {"fetch": 0.0, "update": 0.0}
        """Seconds that compute waited, by cause. Others read it."""

    def begin_tick(self, unit: str, phase: Phase, index: int, mode: Mode | None) -> None:
        """Begins a tick of the unit with this name.

        Args:
            mode: kind of the iteration; None: there is no iteration, and nothing is recorded.
        """
        if self._events.active and mode is not None:
            name = f"{unit or 'root'} {phase.value}"
            self._open_tick = _OpenTick(mode.value, name, perf_counter(), index, self._used_bytes())

    def end_tick(self) -> None:
        """Ends the tick in progress: nothing computes until the next tick."""
        opened, self._open_tick = self._open_tick, None
        if opened is not None:
            most = tuple(max(pair) for pair in zip(opened.tier_bytes, self._used_bytes(), strict=True))
            now_s = perf_counter()
            self._events.emit(
                Event(EventKind.TICK, opened.track, opened.name, opened.began_s, now_s, opened.index, tier_bytes=most)
            )

    def drop_tick(self) -> None:
        """Drops the tick in progress, which failed."""
        self._open_tick = None

    def stalled(self, cause: str, unit: str, began_s: float, end_s: float) -> None:
        """Records that compute has waited for the unit with this name."""
        self.stall_s[cause] += end_s - began_s
        if self._events.active and end_s - began_s > _LEAST_STALL_S:
            self._events.emit(Event(EventKind.STALL, cause, unit or "root", began_s, end_s))
