"""What went over each link (source tier, target tier), and for how long: the achieved bandwidth is bytes / busy_s."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptm.terms import Tier


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Totals of one link since the allocator was made.

    `busy_s` is the time in which at least one transfer was in flight, so overlapping transfers count once.
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

    def end_after(self, seconds_s: float) -> None:
        """End a transfer that measured itself: one on a CUDA stream, where copies follow each other."""
        self._in_flight -= 1
        self._busy_s += seconds_s

    def stats(self, now_s: float) -> LinkStats:
        running_s = now_s - self._since_s if self._in_flight else 0.0
        return LinkStats(self._bytes, self._transfers, self._busy_s + running_s)


Link = tuple[Tier, Tier]
"""(source tier, target tier)."""
