"""Update pipeline: reads, arithmetic and writes of chunks, in the order that planning/chunks.py decides.

Section 7 of the paper, and the updating part of Algorithm 2. Owns the staging buffers, the transfers of chunks and the
counters of the updater, and advances the scalars of flats. Used by one thread at a time; it starts no thread and takes no
lock (updater.py does). `advance` never waits; `advance_or_wait` waits if it cannot advance.
I1: scalars advance when a job's last chunk is computed.
I2: a staging buffer that was taken is given back once, when no transfer touches it.
I3: a handle is done only when the job's compute parameters are readable in their tier; writes of master states to their home
    may still be in flight.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.memory.transfer import Copy, Pending
from lightning_ptm.planning.chunks import Chunks, WantedChunk, chunk_bounds_of
from lightning_ptm.terms import Tier
from lightning_ptm.update.arithmetic import Arithmetic
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.state_encoding import VALUES_DTYPE, Encoder
from lightning_ptm.update.update_job import (
    GRADIENT,
    PARAMETER,
    SCRATCH,
    TARGET,
    ColumnPart,
    JobChunk,
    JobColumn,
    JobHandle,
    JobUnderWay,
    arithmetic_tier,
    state_columns,
)

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor


class Wait(enum.Enum):
    """Causes for which an update waits."""

    READ = "read"
    WRITE = "write"
    GRADIENT = "gradient"
    SAVE = "save"


@dataclasses.dataclass(slots=True)
class UpdateStats:
    """Totals since the updater was made. Written by the thread that does the arithmetic; any thread may read them."""

    bytes_read: int = 0
    bytes_written: int = 0
    chunks: int = 0
    arithmetic_s: float = 0.0
    read_stall_s: float = 0.0
    write_stall_s: float = 0.0
    gradient_stall_s: float = 0.0
    save_stall_s: float = 0.0

    def add_read(self, size: int) -> None:
        """Counts bytes of master states read."""
        self.bytes_read += size

    def add_written(self, size: int) -> None:
        """Counts bytes of master states written."""
        self.bytes_written += size

    def add_chunk(self, arithmetic_s: float) -> None:
        """Counts a chunk that was computed."""
        self.arithmetic_s += arithmetic_s
        self.chunks += 1

    def add_stall(self, cause: Wait, seconds: float) -> None:
        """Counts time waited."""
        name = f"{cause.value}_stall_s"
        setattr(self, name, getattr(self, name) + seconds)


class StagingPool:
    """Pool of buffers by tier, dtype and size. It grows on demand; `reserve` makes it grow in advance.

    Args:
        allocator: allocates the buffers.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

        self._free: dict[tuple[Tier, torch.dtype], list[PagedTensor]] = {}
        """Free buffers, smallest first."""
        self._owned: dict[tuple[Tier, torch.dtype], list[PagedTensor]] = {}

    def reserve(self, tier: Tier, dtype: torch.dtype, numel: int, count: int) -> None:
        """Allocates until the pool owns at least `count` buffers of `numel` elements.

        Raises:
            CapacityError: the tier has too few pages.
        """
        owned = [buffer.numel for buffer in self._owned.get((tier, dtype), ())].count(numel)
        for _ in range(owned, count):
            self.give_back(self._allocate(tier, dtype, numel))

    def take(self, tier: Tier, dtype: torch.dtype, numel: int) -> PagedTensor:
        """Takes a buffer of `numel` elements or more, with undefined contents.

        Raises:
            CapacityError: none is free and the tier has too few pages for another.
        """
        free = self._free.get((tier, dtype), [])
        for place, buffer in enumerate(free):
            if buffer.numel >= numel:
                return free.pop(place)
        return self._allocate(tier, dtype, numel)

    def give_back(self, buffer: PagedTensor) -> None:
        """Returns a buffer that no transfer touches to the pool."""
        # Among buffers of equal size the last used comes first: it may be in the cache.
        bisect.insort_left(self._free.setdefault((buffer.tier, buffer.dtype), []), buffer, key=attrgetter("numel"))

    def close(self) -> None:
        """Releases every buffer. Idempotent."""
        owned, self._owned, self._free = self._owned, {}, {}
        for buffers in owned.values():
            for buffer in buffers:
                self._allocator.release(buffer)

    def _allocate(self, tier: Tier, dtype: torch.dtype, numel: int) -> PagedTensor:
        buffer = self._allocator.allocate(f"update staging {dtype}", numel, dtype, tier, shared_tail=True)
        self._owned.setdefault((tier, dtype), []).append(buffer)
        if not buffer.is_contiguous:
            self._allocator.merge(buffer)
        return buffer


BeforeWrite = Callable[["PagedTensor", int, torch.Tensor], None]
"""Callback before a stretch of a paged tensor changes: (paged tensor, first element of the stretch, counted in decoded
elements, the stored elements before the change). The callback returns when it has copied what it needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocker:
    """Something unfinished (transfers or a gradient) that the pipeline has to wait for, and the cause for statistics."""

    pending: Pending
    cause: Wait


class Pipeline:
    """Reads, updates and writes the chunks of jobs; what to do next is decided by `policy`.

    Args:
        allocator: copies the bytes, and allocates staging buffers.
        chunk_numel: elements of a chunk.
        block_numel: most elements per optimizer call.
        device_block_numel: the same on a device that is not the CPU.
        staging: most chunks that have staging buffers at once.
        staging_tier: tier in which flats with master states on disk are updated.
        events: receives an event for the arithmetic of each chunk.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        chunk_numel: int,
        block_numel: int,
        device_block_numel: int,
        staging: int,
        staging_tier: Tier,
        events: Events | None = None,
    ) -> None:
        self._events = events or Events()
        self.staging_tier = staging_tier
        self._allocator = allocator
        self._backend = allocator.backend

        self.before_write: BeforeWrite | None = None
        """Callback before every change of a stretch of master states."""
        self.stats = UpdateStats()
        self.pool = StagingPool(allocator)
        self.chunk_numel = chunk_numel
        self._arithmetic = Arithmetic(min(block_numel, chunk_numel), device_block_numel)
        self._encoder = Encoder()
        self.policy: Chunks[FlatStates, JobUnderWay, JobChunk] = Chunks(self, staging=staging)
        """Queue of jobs and decisions about them; also drops chunks that were read ahead."""
        self._landing: list[JobUnderWay] = []
        """Computed jobs whose compute parameters are not readable yet."""

    # Commands: they change what comes next and start nothing.

    def watch(self, before_write: BeforeWrite | None) -> None:
        """Sets a callback before writes; see `Updater.watch`."""
        self.before_write = before_write

    def want(self, order: Sequence[FlatStates]) -> None:
        """Sets the flats whose master states are read ahead, in order; replaces the earlier list."""
        cuts = [(states, chunk_bounds_of(states.flat, self.chunk_numel)) for states in order if self._staged(states)]
        self.policy.want([WantedChunk(states, each) for states, each in cuts])

    def to_front(self, handle: JobHandle) -> None:
        """Moves a job to the front of the queue."""
        progress = self._find(handle)
        if progress is not None:
            self.policy.to_front(progress)

    @property
    def busy(self) -> bool:
        """Whether any job is unfinished or any of the pipeline's transfers is in flight."""
        return bool(self._landing) or self.policy.busy

    @property
    def idle(self) -> bool:
        """Whether `advance` has nothing to do until the next command."""
        return not self._landing and self.policy.idle

    # Progress.

    def advance(self) -> bool:
        """Does what needs no waiting, at most one chunk's arithmetic; returns whether anything changed."""
        landed = False
        for progress in [*self._landing]:
            if progress.landing.done():
                progress.landing.wait()
                self._landing.remove(progress)
                progress.handle.mark_done()
                landed = True
        return self.policy.advance() or landed

    def advance_or_wait(self, handle: JobHandle | None, wait: Callable[[Blocker], None]) -> bool:
        """Advances; if that is impossible, calls `wait` with what blocks the job of `handle` (None: the first job).

        Returns:
            False if there is no work.
        """
        if self.advance():
            return True
        found = self._blocker(handle)
        if found is None:
            # A transfer may have ended between `advance` and `_blocker`. This second `advance` sees it, so False is true.
            return self.advance()
        wait(found)
        return True

    def _blocker(self, handle: JobHandle | None) -> Blocker | None:
        """The unfinished transfers or gradient that block a job (None: the first job); None if there is none."""
        lead = self._find(handle) if handle is not None else None
        for progress in self._landing:
            if progress.handle is handle and not progress.landing.done():
                return Blocker(progress.landing, Wait.WRITE)
        found = self.policy.awaited(lead)
        if found is None:
            return None
        # If all have ended since the policy looked, waiting for them returns at once, and there is something to do.
        if isinstance(found, JobUnderWay):
            return Blocker(found.before.next(), Wait.GRADIENT)
        return Blocker(found.writes, Wait.WRITE) if found.writes.all else Blocker(found.reads, Wait.READ)

    def wait(self, blocker: Blocker) -> None:
        """Waits, counts the time, and raises the transfer's error."""
        started = perf_counter()
        try:
            blocker.pending.wait()
        finally:
            self.stats.add_stall(blocker.cause, perf_counter() - started)

    def close(self) -> None:
        """Waits for transfers in flight, whether or not they fail, and releases the buffers."""
        for chunk in self.policy.clear():
            for transfer in (*chunk.reads.all, *chunk.writes.all):
                with contextlib.suppress(Exception):  # reported before, or of no interest any more
                    transfer.wait()
        self._landing.clear()
        self.pool.close()

    # Actions that the policy calls.

    def chunk(self, states: FlatStates, start: int, numel: int) -> JobChunk:
        """Makes a chunk of which nothing has been read."""
        return JobChunk(states, start, numel)

    def read(self, progress: JobUnderWay | None, chunk: JobChunk) -> bool:
        """Starts reads of the columns that the chunk lacks and that are readable; returns whether there are any."""
        if progress is None:
            tier, parts = self._tier(chunk.flat), self._parts(chunk, self._staged(chunk.flat))
        else:
            tier, parts = progress.tier, self._parts(chunk, progress.staged)
        gradient = progress is not None and progress.before.done()
        started = chunk.flat.started(chunk.start, chunk.numel)
        begun, all_begun, read_bytes, copies = False, progress is not None, 0, list[Copy]()
        for part in parts:
            column, numel = part.column, part.numel
            if column.role in chunk.buffers:
                continue
            if column.role == GRADIENT and not gradient:
                all_begun = False
                continue
            begun = True
            size = max(numel, self.chunk_numel)
            buffer = chunk.buffers[column.role] = self.pool.take(tier, column.home.dtype, size)
            if column.reads and (started or column.role not in chunk.flat.slots):
                copies.append(Copy(column.home, buffer, part.start, 0, numel, whole_blocks=True))
                read_bytes += numel * column.home.dtype.itemsize
        if copies:
            if progress is not None and progress.submitted is not None:
                progress.submitted.order()  # copies from a device start after the work queued at submission
            chunk.reads.add(self._allocator.copy_all(copies))
        self.stats.add_read(read_bytes)
        # A chunk read ahead may have more than the job needs: a job without any gradient only copies the master parameter.
        chunk.note_reads(all_reads_begun=all_begun)
        return begun

    def free(self, chunk: JobChunk) -> None:
        """Gives a chunk's buffers back; raises the error of its writes, if any."""
        chunk.writes.wait()
        for buffer in chunk.buffers.values():
            self.pool.give_back(buffer)
        chunk.buffers.clear()

    def _tier(self, states: FlatStates) -> Tier:
        return arithmetic_tier(states, None, self.staging_tier)

    def _staged(self, states: FlatStates) -> list[JobColumn]:
        """Columns of the master states that pass through staging buffers; known before the job is."""
        tier = self._tier(states) if states.home() is not None else None
        return [column for column in state_columns(states) if column.home.tier is not tier]

    @torch.no_grad()
    def update(self, progress: JobUnderWay, chunk: JobChunk) -> bool:
        """Updates a chunk and starts its writes; returns whether there are any."""
        if progress.submitted is not None:
            progress.submitted.order()
        for factor in progress.job.transform.tensors():
            if not in_ram(factor):
                self._backend.record_use(factor)  # made on the stream of compute
        progress.before.wait()
        chunk.reads.wait()
        started = perf_counter()
        windows = self._windows(progress, chunk)
        if self.before_write is not None:
            for part in self._parts(chunk, progress.columns):
                if part.column.writes:
                    self._announce(part, chunk, windows[part.column.role])
            waited, started = started, perf_counter()
            self.stats.add_stall(Wait.SAVE, started - waited)
        whole_target = TARGET in chunk.buffers or progress.job.fresh_target
        with self._scratch(progress, chunk) as scratch, self._decoded(progress, chunk, windows | scratch) as windows:
            self._arithmetic.update(progress, chunk.start, chunk.numel, windows, whole_target=whole_target)
        ended = perf_counter()
        self.stats.add_chunk(ended - started)
        if self._events.active:
            flat = chunk.flat.flat
            name = f"flat {flat.index} [{chunk.start}:{chunk.start + chunk.numel}]"
            self._events.emit(Event(EventKind.UPDATE, progress.tier.name.lower(), name, started, ended))
        truth = TARGET if progress.job.states.master is not None else PARAMETER
        written_bytes, states, parameters = 0, list[Copy](), list[Copy]()
        for part in self._parts(chunk, progress.staged):
            column = part.column
            if column.writes:
                copy = Copy(chunk.buffers[column.role], column.home, 0, part.start, part.numel)
                (parameters if column.role == truth else states).append(copy)
                written_bytes += part.numel * column.home.dtype.itemsize
        for copies in (states, parameters):  # apart: the job ends when its parameters have landed (I3)
            if copies:
                transfers = self._allocator.copy_all(copies)
                chunk.writes.add(transfers)
                if copies is parameters:
                    progress.landing.add(transfers)
        self.stats.add_written(written_bytes)
        return bool(chunk.writes.all)

    def _announce(self, part: ColumnPart, chunk: JobChunk, window: torch.Tensor) -> None:
        """Calls `before_write` for a column's elements of a chunk, `chunk_numel` at a time where the chunk is a whole shard;
        a chunk of whole parameters, or of states in another form, stays one."""
        assert self.before_write is not None
        home, first = part.column.home, part.column.first(chunk.start)
        if part.numel <= self.chunk_numel or chunk.flat.traits.whole or part.column.layout is not None:
            self.before_write(home, first, window)
            return
        for offset, values in zip(itertools.count(0, self.chunk_numel), window.split(self.chunk_numel), strict=False):
            self.before_write(home, first + offset, values)

    @staticmethod
    def _parts(chunk: JobChunk, columns: list[JobColumn]) -> list[ColumnPart]:
        """A chunk's elements of each column. It may have none of a state with shapes of its own."""
        parts = []
        for column in columns:
            start, numel = chunk.start, chunk.numel
            if column.layout is not None:
                start, numel = column.layout.stretch(start, numel)
            if numel:
                parts.append(ColumnPart(column, start, numel))
        return parts

    def _windows(self, progress: JobUnderWay, chunk: JobChunk) -> dict[str, torch.Tensor]:
        """The chunk's elements of each column, by role, 1-D, in the pages or staging buffers that the arithmetic uses."""
        windows = {}
        for part in self._parts(chunk, progress.columns):
            buffer = chunk.buffers.get(part.column.role)
            whole, start = (part.column.home, part.start) if buffer is None else (buffer, 0)
            windows[part.column.role] = whole.tensor().narrow(0, start, part.numel)
        return windows

    @contextlib.contextmanager
    def _scratch(self, progress: JobUnderWay, chunk: JobChunk) -> Iterator[dict[str, torch.Tensor]]:
        """A buffer for the gradient of a parameter that is updated whole; empty where updates are element-wise."""
        if not chunk.flat.traits.whole:
            yield {}
            return
        parameter = next(column.home for column in progress.columns if column.role == PARAMETER)
        buffer = self.pool.take(progress.tier, parameter.dtype, max(chunk.numel, self.chunk_numel))
        try:
            yield {SCRATCH: buffer.tensor()}
        finally:
            self.pool.give_back(buffer)

    @contextlib.contextmanager
    def _decoded(
        self, progress: JobUnderWay, chunk: JobChunk, windows: dict[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The windows with encoded slots decoded; the new values are encoded into the pages at the end."""
        states, number = chunk.flat, progress.job.hyper.number
        started = bool(states.encodings) and states.started(chunk.start, chunk.numel)
        buffers: dict[str, PagedTensor] = {}
        values: dict[str, torch.Tensor] = {}
        try:
            for name, encoding in states.encodings.items():
                if name not in windows:
                    continue
                size = max(chunk.numel, self.chunk_numel)
                buffers[name] = self.pool.take(progress.tier, VALUES_DTYPE, size)
                values[name] = buffers[name].tensor().narrow(0, 0, chunk.numel)
                if started:
                    self._encoder.decode(encoding, windows[name], values[name])
                else:
                    values[name].zero_()  # gaps between parameters are encoded, too
            yield windows | values
            for name, value in values.items():
                encoding = states.encodings[name]
                self._encoder.encode_step(encoding, value, windows[name], states, name, chunk.start, number)
        finally:
            for buffer in buffers.values():
                self.pool.give_back(buffer)

    def end(self, progress: JobUnderWay) -> None:
        """Ends a job whose chunks are all computed."""
        like = torch.empty(
            0,
            dtype=next(column.home.dtype for column in progress.columns if column.role == PARAMETER),
            device=self._backend.device if progress.tier is Tier.DEVICE else "cpu",
        )
        progress.job.states.record_use_of_restored(self._backend)
        progress.advance_scalars(like)
        progress.forget_gradient(self._backend)
        progress.handle.computed(self._backend.mark())
        if progress.landing.all:
            self._landing.append(progress)
        else:
            progress.handle.mark_done()

    def _find(self, handle: JobHandle) -> JobUnderWay | None:
        return next((progress for progress in self.policy.queue if progress.handle is handle), None)
