"""Chunks and jobs of a forecast: what is read, written or computed ends at a known time (hands for `planning/chunks.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from lightning_ptm.planning.chunk_bounds import ChunkBounds, even_chunk_bounds
from lightning_ptm.planning.chunks import Chunk, Job

F = TypeVar("F")


@dataclass(slots=True)
class Moment:
    """Of a forecast: when it looks whether something has come, in seconds."""

    s: float = 0.0

    def go_to(self, s: float) -> None:
        """It is then."""
        self.s = s

    def pass_by(self, seconds: float) -> None:
        """It is so much later."""
        self.s += seconds


@dataclass(slots=True, eq=False)
class TimedChunk(Chunk[F]):
    """A chunk whose reads and writes end at known times.

    Attributes:
        now: of whoever looks.
        begun: its first reads have; `ready_s`: when those that have begun end.
    """

    now: Moment = field(default_factory=Moment)
    begun: bool = False
    ready_s: float = 0.0
    written_s: float = 0.0

    def begin(self) -> bool:
        """Its reads begin; returns whether none has begun before."""
        first, self.begun = not self.begun, True
        return first

    def read_until(self, ready_s: float) -> None:
        """The reads that have begun end then."""
        self.ready_s = ready_s

    def write_until(self, written_s: float) -> None:
        """So do its writes."""
        self.written_s = written_s

    def readable(self) -> bool:
        return self.ready_s <= self.now.s

    def written(self) -> bool:
        return self.written_s <= self.now.s


class TimedJob(Job[F, TimedChunk[F]]):
    """A job on all of a flat whose gradient comes at a known time; one that does not stream is computed at once.

    Args:
        cuts: where it is cut where it streams; now: of whoever looks; ready_s: when the gradient is there.
    """

    def __init__(self, flat: F, cuts: ChunkBounds, now: Moment, ready_s: float, *, streams: bool) -> None:
        if not streams:
            cuts = even_chunk_bounds(cuts.numel, cuts.numel)
        super().__init__(flat, cuts, cuts.starts, streams=streams)
        self.ready_s = ready_s
        self._now = now

    def has_gradient(self) -> bool:
        return self.ready_s <= self._now.s


def comes_s(awaited: TimedChunk[F] | TimedJob[F]) -> float:
    """When what is awaited comes."""
    if isinstance(awaited, TimedJob) or not awaited.readable():
        return awaited.ready_s
    return awaited.written_s
