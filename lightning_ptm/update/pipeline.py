"""The pipeline: which chunk is read, computed or written next, and doing it (section 7; Algorithm 2's updating part).

Owns the jobs in hand, their chunks and the staging buffers. Belongs to one thread at a time; it makes none and locks
nothing (updater.py does). `advance` never waits; `advance_or_wait` does, for what keeps it from advancing.
I1: chunks of a flat are updated by one job after the other, in the order of submission; scalars advance when a job's last
    chunk is computed.
I2: a chunk is read only after its last write has landed.
I3: at most `staging` chunks hold buffers. One that cannot be computed yet gives its buffers up to one that could be.
I4: a handle is done only when the job's compute parameters are readable where they live; master states may still be on
    their way home.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.terms import Tier
from lightning_ptm.update.arithmetic import Arithmetic
from lightning_ptm.update.job import (
    GRADIENT,
    PARAMETER,
    TARGET,
    Chunk,
    Column,
    JobHandle,
    Pending,
    Progress,
    arithmetic_tier,
    state_columns,
)
from lightning_ptm.update.staging import StagingPool
from lightning_ptm.update.states import FlatStates
from lightning_ptm.update.stats import Stall, UpdateStats

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged import PagedTensor


BeforeWrite = Callable[["PagedTensor", int, torch.Tensor], None]
"""(paged tensor, first element, elements as they are now) -> None, when they have been copied or are of no interest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocker:
    """What the next progress waits for."""

    pending: Pending
    cause: Stall


@dataclasses.dataclass(slots=True, eq=False)
class _Wanted:
    """A flat to be read ahead: where its next chunk starts."""

    states: FlatStates
    next_start: int = 0


class Pipeline:
    """See the file's contract.

    Args:
        allocator: moves the bytes.
        chunk_numel: elements that travel together.
        block_numel: elements per optimizer call.
        staging: chunks that may hold buffers at once.
        staging_tier: where flats with master states on disk are updated.
        events: told of the arithmetic on each chunk.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        chunk_numel: int,
        block_numel: int,
        staging: int,
        staging_tier: Tier,
        events: Events | None = None,
    ) -> None:
        self._events = events or Events()
        self.chunk_numel = chunk_numel
        self.staging = staging
        self.staging_tier = staging_tier
        self._allocator = allocator
        self._backend = allocator.backend

        self.before_write: BeforeWrite | None = None
        """Told of every stretch of master states that is about to change."""
        self.stats = UpdateStats()
        self.pool = StagingPool(allocator, chunk_numel)
        self._arithmetic = Arithmetic(min(block_numel, chunk_numel))
        self._queue: list[Progress] = []
        """Jobs with arithmetic left, in the order of service."""
        self._landing: list[Progress] = []
        """Computed jobs whose compute parameters are not readable yet."""
        self._wanted: list[_Wanted] = []
        self._ahead: list[Chunk] = []
        """Chunks that were read ahead and that no job has claimed."""
        self._writing: list[Chunk] = []
        self._abandoned: list[Chunk] = []
        """Chunks that nobody wants any more, until their reads end."""

    # Commands: they decide what comes next and start nothing.

    def enqueue(self, progress: Progress) -> None:
        """Take a job; chunks that were read ahead for it become its own."""
        states = progress.job.states
        for other in reversed(self._queue):
            if other.job.states is states:
                progress.predecessor = other
                break
        self._queue.append(progress)
        self._wanted = [wanted for wanted in self._wanted if wanted.states is not states]
        for chunk in [chunk for chunk in self._ahead if chunk.states is states]:
            self._ahead.remove(chunk)
            if chunk.start in progress.waiting:
                progress.waiting.remove(chunk.start)
                progress.active.append(chunk)
            else:
                self._abandoned.append(chunk)

    def want(self, order: Sequence[FlatStates]) -> None:
        """Read these flats ahead, in this order; replaces the order given before."""
        known = {id(chunk.states) for chunk in self._ahead}
        self._wanted = [_Wanted(states) for states in order if id(states) not in known]

    def to_front(self, handle: JobHandle) -> None:
        """Serve a job, and those that must precede it (I1), before all others."""
        progress: Progress | None = self._find(handle)
        while progress is not None:
            self._queue.remove(progress)
            self._queue.insert(0, progress)
            progress = None if progress.may_start() else progress.predecessor

    def forget_ahead(self) -> None:
        """Drop what was read ahead: the pages may be about to change."""
        self._wanted.clear()
        self._abandoned.extend(self._ahead)
        self._ahead.clear()

    @property
    def busy(self) -> bool:
        """Whether any job is unfinished or any transfer of ours in flight."""
        return bool(self._queue or self._landing or self._writing or self._abandoned)

    # Progress.

    def advance(self) -> bool:
        """Retire, issue reads, compute one chunk and issue its writes; never waits.

        Returns:
            Whether anything changed.
        """
        moved = self._retire()
        moved = self._issue() or moved
        for progress in self._queue:
            chunk = self._next_ready(progress)
            if chunk is not None:
                self._compute(progress, chunk)
                return True
            if progress.computed and progress.may_start():
                self._complete(progress)
                return True
        return moved

    def advance_or_wait(self, handle: JobHandle | None, wait: Callable[[Blocker], None]) -> bool:
        """Advance; where nothing can, have `wait` called with what is in the way of a job (None: the first).

        Returns:
            False when nothing is in hand.
        """
        if self.advance():
            return True
        found = self._blocker(handle)
        if found is None:
            # Transfers end whenever they like, also between the two looks. What had ended by the second look this
            # `advance` sees, so that its False is true.
            return self.advance()
        wait(found)
        return True

    def _blocker(self, handle: JobHandle | None) -> Blocker | None:
        """What is not done yet and in the way of a job (None: the first).

        A job whose gradient is missing is the last thing to wait for, because others can go on meanwhile.
        """
        lead = self._find(handle) if handle is not None else None
        order = sorted(self._queue, key=lambda progress: progress is not lead)
        for progress in (landing for landing in self._landing if landing.handle is handle):
            for transfer in progress.landing:
                if not transfer.done():
                    return Blocker(transfer, Stall.WRITE)
        for progress in order:
            if progress.may_start() and progress.has_gradient():
                found = _unread(progress.active)
                if found is not None:
                    return found
        for chunk in self._writing:
            for transfer in chunk.writes.values():
                if not transfer.done():
                    return Blocker(transfer, Stall.WRITE)
        # Only room is missing: the reads of those who can give it have to end first.
        found = _unread([*self._abandoned, *self._ahead, *(chunk for progress in order for chunk in progress.active)])
        if found is not None:
            return found
        for progress in order:
            for pending in progress.job.after:
                if not pending.done():
                    return Blocker(pending, Stall.GRADIENT)
        return None

    def wait(self, blocker: Blocker) -> None:
        """Wait, count the time, raise the transfer's error."""
        started = perf_counter()
        try:
            blocker.pending.wait()
        finally:
            self.stats.add_stall(blocker.cause, perf_counter() - started)

    def close(self) -> None:
        """Wait for transfers in flight, whatever their outcome, and release the buffers."""
        active = [chunk for progress in self._queue for chunk in progress.active]
        for chunk in (*self._ahead, *self._writing, *self._abandoned, *active):
            for transfer in (*chunk.reads.values(), *chunk.writes.values()):
                with contextlib.suppress(Exception):  # reported before, or of no interest any more
                    transfer.wait()
        for chunks in (self._ahead, self._writing, self._abandoned):
            chunks.clear()
        self._queue.clear()
        self._landing.clear()
        self._wanted.clear()
        self.pool.close()

    # Reads and writes.

    def _retire(self) -> bool:
        moved = False
        for chunk in [chunk for chunk in self._writing if chunk.written()]:
            for transfer in chunk.writes.values():
                transfer.wait()
            self._writing.remove(chunk)
            self._give_back(chunk)
            moved = True
        for chunk in [chunk for chunk in self._abandoned if chunk.readable()]:
            self._abandoned.remove(chunk)
            self._give_back(chunk)
            moved = True
        for progress in [progress for progress in self._landing if all(t.done() for t in progress.landing)]:
            for transfer in progress.landing:
                transfer.wait()
            self._landing.remove(progress)
            progress.handle.mark_done()
            moved = True
        return moved

    def _issue(self) -> bool:
        moved = False
        for progress in self._queue:
            if not progress.staged or not progress.may_start():
                continue
            for chunk in progress.active:
                moved = self._fill(progress, chunk) or moved
            while progress.waiting and not self._is_writing(progress.job.states, progress.waiting[-1]):
                if self._held() >= self.staging and not self._make_room(progress):
                    return moved
                chunk = self._chunk(progress.job.states, progress.waiting.pop())
                progress.active.append(chunk)
                self._fill(progress, chunk)
                moved = True
        return self._issue_ahead() or moved

    def _issue_ahead(self) -> bool:
        moved = False
        for wanted in list(self._wanted):
            states = wanted.states
            tier = arithmetic_tier(states, None, self.staging_tier) if states.home() is not None else None
            staged = [column for column in state_columns(states) if column.home.tier is not tier]
            if not staged:
                self._wanted.remove(wanted)
                continue
            if any(progress.job.states is states for progress in self._queue):
                return moved  # its last job must be computed first (I1), and order is the point of reading ahead
            while wanted.next_start < states.flat.shard_numel:
                if self._held() >= self.staging or self._is_writing(states, wanted.next_start):
                    return moved
                chunk = self._chunk(states, wanted.next_start)
                assert tier is not None
                self._read(tier, chunk, staged)
                self._ahead.append(chunk)
                wanted.next_start += self.chunk_numel
                moved = True
            self._wanted.remove(wanted)
        return moved

    def _fill(self, progress: Progress, chunk: Chunk) -> bool:
        """Read the columns that the chunk lacks and that can be read by now."""
        missing = [
            column
            for column in progress.staged
            if column.role not in chunk.buffers and (column.role != GRADIENT or progress.has_gradient())
        ]
        self._read(progress.tier, chunk, missing)
        return bool(missing)

    def _read(self, tier: Tier, chunk: Chunk, columns: Sequence[Column]) -> None:
        for column in columns:
            buffer = chunk.buffers[column.role] = self.pool.take(tier, column.home.dtype)
            is_slot = column.role in chunk.states.slots
            if column.reads and (not is_slot or chunk.states.started(chunk.start, chunk.numel)):
                chunk.reads[column.role] = self._allocator.copy(
                    column.home, buffer, source_start=chunk.start, numel=chunk.numel
                )
                self.stats.bytes_read += chunk.numel * column.home.dtype.itemsize

    def _write(self, progress: Progress, chunk: Chunk) -> None:
        truth = TARGET if progress.job.states.master is not None else PARAMETER
        for column in progress.staged:
            if column.writes:
                transfer = chunk.writes[column.role] = self._allocator.copy(
                    chunk.buffers[column.role], column.home, target_start=chunk.start, numel=chunk.numel
                )
                self.stats.bytes_written += chunk.numel * column.home.dtype.itemsize
                if column.role == truth:
                    progress.landing.append(transfer)

    def _is_writing(self, states: FlatStates, start: int) -> bool:
        return any(chunk.states is states and chunk.start == start for chunk in self._writing)

    def _chunk(self, states: FlatStates, start: int) -> Chunk:
        return Chunk(states, start, min(self.chunk_numel, states.flat.shard_numel - start))

    def _held(self) -> int:
        active = sum(len(progress.active) for progress in self._queue if progress.staged)
        return active + len(self._ahead) + len(self._writing) + len(self._abandoned)

    def _make_room(self, asking: Progress) -> bool:
        """Take the buffers of a chunk that waits for a gradient, if `asking` does not wait for its own (I3)."""
        if not asking.has_gradient():
            return False
        for chunk in reversed(self._ahead):
            if chunk.readable():
                self._ahead.remove(chunk)
                self._give_back(chunk)
                return True
        for progress in reversed(self._queue):
            if progress is asking or progress.has_gradient():
                continue
            for chunk in reversed(progress.active):
                if chunk.readable():
                    progress.active.remove(chunk)
                    progress.waiting.append(chunk.start)
                    self._give_back(chunk)
                    return True
        return False

    def _give_back(self, chunk: Chunk) -> None:
        for buffer in chunk.buffers.values():
            self.pool.give_back(buffer)
        chunk.buffers.clear()

    # Arithmetic.

    def _next_ready(self, progress: Progress) -> Chunk | None:
        if not progress.may_start() or not progress.has_gradient():
            return None
        if not progress.staged:
            if not progress.waiting:
                return None
            progress.active.append(self._chunk(progress.job.states, progress.waiting.pop()))
            return progress.active[-1]
        for chunk in progress.active:
            if len(chunk.buffers) == len(progress.staged) and chunk.readable():
                return chunk
        return None

    @torch.no_grad()
    def _compute(self, progress: Progress, chunk: Chunk) -> None:
        if progress.submitted is not None:
            progress.submitted.order()
        for pending in progress.job.after:
            pending.wait()
        for transfer in chunk.reads.values():
            transfer.wait()
        started = perf_counter()
        windows = {
            column.role: chunk.buffers[column.role].tensor().narrow(0, 0, chunk.numel)
            if column.role in chunk.buffers
            else column.home.tensor().narrow(0, chunk.start, chunk.numel)
            for column in progress.columns
        }
        if self.before_write is not None:
            for column in progress.columns:
                if column.writes:
                    self.before_write(column.home, chunk.start, windows[column.role])
            waited, started = started, perf_counter()
            self.stats.add_stall(Stall.SAVE, started - waited)
        whole_target = TARGET in chunk.buffers or progress.job.fresh_target
        self._arithmetic.update(progress, chunk.start, chunk.numel, windows, whole_target=whole_target)
        ended = perf_counter()
        self.stats.arithmetic_s += ended - started
        if self._events.heard:
            flat = chunk.states.flat
            name = f"flat {flat.index} [{chunk.start}:{chunk.start + chunk.numel}]"
            self._events.tell(Event(EventKind.UPDATE, progress.tier.name.lower(), name, started, ended))
        self.stats.chunks += 1
        progress.active.remove(chunk)
        self._write(progress, chunk)
        if chunk.writes:
            self._writing.append(chunk)
        else:
            self._give_back(chunk)
        if progress.computed:
            self._complete(progress)

    def _complete(self, progress: Progress) -> None:
        like = torch.empty(
            0,
            dtype=next(column.home.dtype for column in progress.columns if column.role == PARAMETER),
            device=self._backend.device if progress.tier is Tier.DEVICE else "cpu",
        )
        progress.job.states.advance(progress.scalars_after(like)[-1], progress.present)
        self._queue.remove(progress)
        progress.forget_gradient(self._backend)
        progress.handle.end = self._backend.mark()
        if progress.landing:
            self._landing.append(progress)
        else:
            progress.handle.mark_done()

    def _find(self, handle: JobHandle) -> Progress | None:
        return next((progress for progress in self._queue if progress.handle is handle), None)


def _unread(chunks: Sequence[Chunk]) -> Blocker | None:
    for chunk in chunks:
        for transfer in chunk.reads.values():
            if not transfer.done():
                return Blocker(transfer, Stall.READ)
    return None
