"""Chunks and jobs of a forecast, for planning/chunks.py: their reads, writes and arithmetic end at computed times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from lightning_ptm.planning.chunks import Chunk, ChunkBounds, Job, even_chunk_bounds

F = TypeVar("F")


@dataclass(slots=True)
class Moment:
    """The current time of a forecast, in seconds; shared by all chunks and jobs that compare with it."""

    s: float = 0.0

    def go_to(self, s: float) -> None:
        """Sets the time."""
        self.s = s

    def pass_by(self, seconds: float) -> None:
        """Advances the time."""
        self.s += seconds


@dataclass(frozen=True, slots=True)
class Due:
    """Something that ends at a known time."""

    now: Moment
    s: float

    def done(self) -> bool:
        """Whether it has ended."""
        return self.s <= self.now.s


@dataclass(slots=True, eq=False)
class TimedChunk(Chunk[F]):
    """A chunk whose reads and writes end at known times.

    Attributes:
        now: the current time.
        begun: whether its first reads have started.
        ready_s: when the reads that have started end.
        written_s: when its writes end.
    """

    now: Moment = field(default_factory=Moment)
    begun: bool = False
    ready_s: float = 0.0
    written_s: float = 0.0

    def begin(self) -> bool:
        """Starts its reads; returns whether none had started before."""
        first, self.begun = not self.begun, True
        return first

    def read_until(self, ready_s: float) -> None:
        """Sets the time at which the started reads end."""
        self.ready_s = ready_s

    def write_until(self, written_s: float) -> None:
        """Sets the time at which its writes end."""
        self.written_s = written_s

    @property
    def reads(self) -> Due:
        return Due(self.now, self.ready_s)

    @property
    def writes(self) -> Due:
        return Due(self.now, self.written_s)


class TimedJob(Job[F, TimedChunk[F]]):
    """A job on a whole flat whose gradient is complete at a known time.

    Args:
        flat: the flat.
        cuts: bounds of its chunks, if it streams.
        now: the current time.
        ready_s: when the gradient is complete.
        streams: whether chunks stream through staging; otherwise the job is a single chunk.
    """

    before: Due

    def __init__(self, flat: F, cuts: ChunkBounds, now: Moment, ready_s: float, *, streams: bool) -> None:
        if not streams:
            cuts = even_chunk_bounds(cuts.numel, cuts.numel)
        super().__init__(flat, cuts, cuts.starts, Due(now, ready_s), streams=streams)


def comes_s(awaited: TimedChunk[F] | TimedJob[F]) -> float:
    """Returns the time at which an awaited chunk or gradient is complete."""
    if isinstance(awaited, TimedJob):
        return awaited.before.s
    return awaited.written_s if awaited.reads.done() else awaited.ready_s
