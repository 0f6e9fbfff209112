"""Scheduler of the update pipeline: where a flat's shard is cut into chunks, and which is read, computed or dropped next.

Implements section 7 and the updating part of Algorithm 2 of the paper. Owns the order: the job queue, the chunks of
each job, the chunks that are read ahead, and how many chunks hold buffers. Holds no bytes and no transfers: its
`ChunkActions` carry out each decision at once. Those of a run move bytes (update/pipeline.py), those of a virtual run
count seconds (clock.py, shared_cores.py). One thread at a time uses it. It never waits.

I1: chunks of a flat are updated by one job after another, in the order of submission.
I2: a chunk is read only after its last write has landed, and after an abandoned read of it has ended: otherwise its
    next write could overlap that read.
I3: at most `staging` chunks hold buffers. A chunk that cannot be computed yet gives its buffers up to one that could
    be.
I4: while a job is unfinished, `advance` can make progress, or `awaited` names a read, a write or a gradient that is
    outstanding. So a chunk that lacks some of its job's states reads them as soon as they are readable, even where an
    earlier job of the queue has no room: the chunk keeps its buffers until it is computed.
    tests/planning/test_chunk_states.py visits every state.
"""

from __future__ import annotations

import abc
import bisect
import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from lightning_ptm.planning.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """The chunk boundaries of one flat's shard, in elements.

    Attributes:
        starts: first element of each chunk, in order.
        numel: elements of the shard, which is the end of the last chunk.
    """

    starts: Sequence[int]
    numel: int

    def length(self, place: int) -> int:
        """Returns the elements of the chunk at index `place` of `starts`."""
        return (self.starts[place + 1] if place + 1 < len(self.starts) else self.numel) - self.starts[place]

    def length_from(self, start: int) -> int:
        """Returns the elements of the chunk that begins at element `start`."""
        return self.length(bisect.bisect_left(self.starts, start))


def even_chunk_bounds(numel: int, chunk_numel: int) -> ChunkBounds:
    """Returns chunks of equal length; the last may be shorter."""
    return ChunkBounds(range(0, numel, chunk_numel), numel)


def chunk_bounds_of(flat: FlatLayout, chunk_numel: int) -> ChunkBounds:
    """Returns the chunk boundaries of a flat.

    Where an update needs whole parameters, a chunk is as many parameters as fit into `chunk_numel` elements, at least
    one. A rank that owns no parameter of the flat has one chunk of padding.
    """
    if not flat.updated_whole:
        return even_chunk_bounds(flat.shard_numel, chunk_numel)
    starts: list[int] = []
    begins = [slot.start for _, slot in flat.whole_slots()] or [0]
    for start, end in itertools.pairwise([*begins, flat.shard_numel]):
        if end > start and (not starts or end - starts[-1] > chunk_numel):
            starts.append(start)
    return ChunkBounds(tuple(starts), flat.shard_numel)


F = TypeVar("F")


class Outstanding(Protocol):
    """Transfers or reductions in progress."""

    def done(self) -> bool:
        """Whether all have ended."""


@dataclass(slots=True, eq=False)
class Chunk(abc.ABC, Generic[F]):
    """A range of a flat's shard in the pipeline, in elements.

    Attributes:
        all_reads_begun: whether the reads of everything that its job needs have begun.
    """

    flat: F
    start: int
    numel: int
    all_reads_begun: bool = False

    def note_reads(self, *, all_reads_begun: bool) -> None:
        """Records that reads have begun. `all_reads_begun`: of everything that the job needs."""
        self.all_reads_begun = all_reads_begun

    @property
    @abc.abstractmethod
    def reads(self) -> Outstanding:
        """The reads that have begun."""

    @property
    @abc.abstractmethod
    def writes(self) -> Outstanding:
        """The writes that have begun."""


C = TypeVar("C", bound=Chunk)


class Job(Generic[F, C]):
    """An update of one flat.

    Args:
        flat: the flat, compared by identity.
        cuts: the chunk boundaries of its shard.
        starts: first elements of the chunks to update, in order.
        before: what must end before the gradient is available.
        streams: whether its chunks pass through staging buffers.
        reads_ahead: whether some states can be read before the gradient is available.
        turn: priority. Jobs of earlier turns are served first; within a turn, the order is that of submission.
    """

    def __init__(
        self,
        flat: F,
        cuts: ChunkBounds,
        starts: Sequence[int],
        before: Outstanding,
        *,
        streams: bool,
        reads_ahead: bool = True,
        turn: int = 0,
    ) -> None:
        self.flat = flat
        self.cuts = cuts
        self.before = before
        self.streams = streams
        self.reads_ahead = reads_ahead
        self.turn = turn

        self.waiting = list(reversed(starts))
        """Starts of the chunks that have not begun, in reverse order."""
        self.active: list[C] = []
        """Chunks whose reads were issued, in order of issue."""
        self.incomplete: list[C] = []
        """The active chunks that are not `all_reads_begun`."""
        self.predecessor: Self | None = None
        """The previous job on the same flat, until its arithmetic is complete: the job may not start before. Written by
        `Chunks`. A job without chunks is computed at once, but still waits for its turn among the jobs of its flat."""

    @property
    def computed(self) -> bool:
        return not self.waiting and not self.active


J = TypeVar("J", bound=Job)
F_contra = TypeVar("F_contra", contravariant=True)
J_contra = TypeVar("J_contra", bound=Job, contravariant=True)


class ChunkEvent(enum.Enum):
    """Events of a chunk's life; SUBMITTED and ENDED are events of a job."""

    SUBMITTED = "submitted"
    READ = "read"
    GIVEN_UP = "given up"
    COMPUTED = "computed"
    WRITTEN = "written"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ChunkAct(Generic[F]):
    """A decision of the scheduler, for listeners."""

    event: ChunkEvent
    flat: F
    start: int = 0
    numel: int = 0


@dataclass(slots=True, eq=False)
class WantedChunk(Generic[F]):
    """A flat to read ahead: its chunk boundaries, and the index of its next chunk."""

    flat: F
    cuts: ChunkBounds
    place: int = 0


class ChunkActions(Protocol[F_contra, J_contra, C]):
    """The operations that carry out the scheduler's decisions."""

    def chunk(self, flat: F_contra, start: int, numel: int) -> C:
        """Returns a new chunk, of which nothing has been read."""

    def read(self, job: J_contra | None, chunk: C) -> bool:
        """Begins the missing reads of a chunk as far as possible; returns whether any began.

        Without a job, only states that are known before the job is submitted are read.
        """

    def update(self, job: J_contra, chunk: C) -> bool:
        """Computes a chunk and begins its writes; returns whether there are any."""

    def free(self, chunk: C) -> None:
        """Takes the buffers of a chunk back, whose reads or writes have ended."""

    def end(self, job: J_contra) -> None:
        """Hook, called when a job has no arithmetic left."""


class Chunks(Generic[F, J, C]):
    """The scheduler: job queue, read-ahead and staging budget of one optimizer pipeline.

    Args:
        actions: carries out the decisions.
        staging: the number of chunks that may hold buffers at once.
    """

    def __init__(self, actions: ChunkActions[F, J, C], *, staging: float) -> None:
        self._actions = actions
        self.staging = staging

        self.on_decision: Callable[[ChunkAct[F]], None] | None = None
        """Listener for decisions, called in order."""
        self.queue: list[J] = []
        """Jobs with arithmetic left, in the order of service."""
        self._wanted: list[WantedChunk[F]] = []
        self._ahead: list[C] = []
        """Chunks that were read ahead and that no job has claimed."""
        self._writing: list[C] = []
        self._abandoned: list[C] = []
        """Chunks that are no longer needed, until their reads end."""
        self._held = 0
        """Number of chunks that hold buffers."""

    # Commands: they decide what comes next and start nothing.

    def enqueue(self, job: J) -> None:
        """Adds a job; chunks that were read ahead for its flat become the job's own."""
        flat = job.flat
        job.predecessor = next((other for other in reversed(self.queue) if other.flat is flat), None)
        place = len(self.queue)
        while place and self.queue[place - 1].turn > job.turn:
            place -= 1
        self.queue.insert(place, job)
        if self.on_decision is not None:
            self.on_decision(ChunkAct(ChunkEvent.SUBMITTED, flat, numel=job.cuts.numel))
        self._wanted = [wanted for wanted in self._wanted if wanted.flat is not flat]
        for chunk in [chunk for chunk in self._ahead if chunk.flat is flat]:
            self._ahead.remove(chunk)
            if job.streams and chunk.start in job.waiting:
                job.waiting.remove(chunk.start)
                job.active.append(chunk)
                job.incomplete.append(chunk)
            else:
                self._abandoned.append(chunk)

    def want(self, order: Sequence[WantedChunk[F]]) -> None:
        """Sets the flats to read ahead, in order; replaces the order given before."""
        known = {id(chunk.flat) for chunk in self._ahead}
        self._wanted = [wanted for wanted in order if id(wanted.flat) not in known]

    def to_front(self, job: J) -> None:
        """Serves a job, and the jobs that must precede it (I1), before all others."""
        first: J | None = job
        while first is not None:
            self.queue.remove(first)
            self.queue.insert(0, first)
            first = first.predecessor

    def drop_read_ahead(self) -> None:
        """Drops the chunks that were read ahead, because their pages may be about to change."""
        self._wanted.clear()
        self._abandoned.extend(self._ahead)
        self._ahead.clear()

    def clear(self) -> list[C]:
        """Drops all jobs and chunks; returns the chunks that hold buffers, whose transfers may still be in progress."""
        found = [*self._ahead, *self._writing, *self._abandoned, *(chunk for job in self.queue for chunk in job.active)]
        for chunks in (self._ahead, self._writing, self._abandoned, self._wanted, self.queue):
            chunks.clear()
        self._held = 0
        return found

    @property
    def busy(self) -> bool:
        """Whether any job is unfinished or any transfer is in flight, other than reads ahead."""
        return bool(self.queue or self._writing or self._abandoned)

    @property
    def idle(self) -> bool:
        """Whether `advance` changes nothing, whichever transfers end, until the next command."""
        return not (self.queue or self._writing or self._abandoned or self._wanted)

    # Progress.

    def advance(self) -> bool:
        """Takes buffers back, begins reads, computes one chunk and begins its writes.

        Returns:
            Whether anything changed.
        """
        moved = self._retire()
        moved = self._issue() or moved
        for job in self.queue:
            chunk = self._next_ready(job)
            if chunk is not None:
                self._compute(job, chunk)
                return True
            if job.predecessor is None and job.computed:
                self._end(job)
                return True
        return moved

    def awaited(self, lead: J | None) -> C | J | None:
        """Returns what blocks a job (None: the first job of the queue).

        That is a chunk with a read or write in flight, or a job without its gradient. A missing gradient is returned
        last, because other jobs can make progress in the meantime.
        """
        order = self.queue if lead is None else [lead, *[job for job in self.queue if job is not lead]]
        for job in order:
            if job.predecessor is None and job.before.done():
                for chunk in job.active:
                    if not chunk.reads.done():
                        return chunk
        for writing in self._writing:
            if not writing.writes.done():
                return writing
        # Only room is missing: the reads of chunks that can give up their buffers have to end first.
        for chunk in (*self._abandoned, *self._ahead, *(chunk for job in order for chunk in job.active)):
            if not chunk.reads.done():
                return chunk
        return next((job for job in order if not job.before.done()), None)

    def _retire(self) -> bool:
        moved = False
        for chunk in [chunk for chunk in self._writing if chunk.writes.done()] if self._writing else ():
            self._free(self._writing, chunk, ChunkEvent.WRITTEN)
            moved = True
        for chunk in [chunk for chunk in self._abandoned if chunk.reads.done()] if self._abandoned else ():
            self._free(self._abandoned, chunk, ChunkEvent.GIVEN_UP)
            moved = True
        return moved

    def _issue(self) -> bool:
        moved, room = False, True
        for job in self.queue:
            if not job.streams or job.predecessor is not None or not (job.reads_ahead or job.before.done()):
                continue
            # Also after a job that found no room: these chunks hold the buffers that it waits for (I4).
            # They lack what the gradient has to precede, or what nothing read ahead: needed only with the gradient.
            for chunk in [*job.incomplete] if job.incomplete and job.before.done() else ():
                moved = self._actions.read(job, chunk) or chunk.all_reads_begun or moved
                if chunk.all_reads_begun:
                    job.incomplete.remove(chunk)
            while room and job.waiting and not self._is_busy(job.flat, job.waiting[-1]):
                if self._held >= self.staging and not self._make_room(job):
                    room = False
                    break
                start = job.waiting.pop()
                chunk = self._read(job, job.active, job.flat, start, job.cuts.length_from(start))
                if not chunk.all_reads_begun:
                    job.incomplete.append(chunk)
                moved = True
        return self._issue_ahead() or moved if room and self._wanted else moved

    def _issue_ahead(self) -> bool:
        moved = False
        for wanted in list(self._wanted):
            if any(job.flat is wanted.flat for job in self.queue):
                return moved  # its last job must be computed first (I1), and order is the point of reading ahead
            starts = wanted.cuts.starts
            while wanted.place < len(starts):
                if self._held >= self.staging or self._is_busy(wanted.flat, starts[wanted.place]):
                    return moved
                self._read(None, self._ahead, wanted.flat, starts[wanted.place], wanted.cuts.length(wanted.place))
                wanted.place += 1
                moved = True
            self._wanted.remove(wanted)
        return moved

    def _read(self, job: J | None, among: list[C], flat: F, start: int, numel: int) -> C:
        chunk = self._actions.chunk(flat, start, numel)
        among.append(chunk)
        self._held += 1
        self._actions.read(job, chunk)
        self._report(ChunkEvent.READ, chunk)
        return chunk

    def _is_busy(self, flat: F, start: int) -> bool:
        return any(
            chunk.flat is flat and chunk.start == start for chunk in itertools.chain(self._writing, self._abandoned)
        )

    def _make_room(self, asking: J) -> bool:
        """Takes the buffers of a chunk that waits for a gradient, provided that `asking` has its own gradient (I3)."""
        if not asking.before.done():
            return False
        for chunk in reversed(self._ahead):
            if chunk.reads.done():
                self._free(self._ahead, chunk, ChunkEvent.GIVEN_UP)
                return True
        for job in reversed(self.queue):
            if job is asking or job.before.done():
                continue
            for chunk in reversed(job.active):
                if chunk.reads.done():
                    self._free(job.active, chunk, ChunkEvent.GIVEN_UP)
                    if chunk in job.incomplete:
                        job.incomplete.remove(chunk)
                    job.waiting.append(chunk.start)
                    return True
        return False

    def _free(self, among: list[C], chunk: C, event: ChunkEvent) -> None:
        self._actions.free(chunk)  # first: it raises the error of a failed write while other transfers may be in flight
        among.remove(chunk)
        self._held -= 1
        self._report(event, chunk)

    def _next_ready(self, job: J) -> C | None:
        if job.predecessor is not None or not job.before.done():
            return None
        if not job.streams:
            if not job.waiting:
                return None
            start = job.waiting.pop()
            job.active.append(self._actions.chunk(job.flat, start, job.cuts.length_from(start)))
            return job.active[-1]
        for chunk in job.active:
            if chunk.all_reads_begun and chunk.reads.done():
                return chunk
        return None

    def _compute(self, job: J, chunk: C) -> None:
        writes = self._actions.update(job, chunk)
        job.active.remove(chunk)
        self._report(ChunkEvent.COMPUTED, chunk)
        if writes:
            self._writing.append(chunk)
        elif job.streams:
            self._actions.free(chunk)
            self._held -= 1
        if job.computed:
            self._end(job)

    def _end(self, job: J) -> None:
        self.queue.remove(job)
        for other in self.queue:
            if other.predecessor is job:
                other.predecessor = None
        self._actions.end(job)
        if self.on_decision is not None:
            self.on_decision(ChunkAct(ChunkEvent.ENDED, job.flat, numel=job.cuts.numel))

    def _report(self, event: ChunkEvent, chunk: C) -> None:
        if self.on_decision is not None:
            self.on_decision(ChunkAct(event, chunk.flat, chunk.start, chunk.numel))
