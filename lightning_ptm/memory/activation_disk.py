"""Store of saved activations on disk: pages, which a forward that needs more adds, and threads that copy to and from them.

Owns its files and I/O threads, apart from those of model states: a queue of its own keeps fetches of states from waiting
behind activations. Bytes go through the staging buffer of an I/O thread, since a storage of PyTorch has any address and the
disk takes whole blocks; so RAM is bounded by the number of threads.

I1: a page is handed out again only after the last copy from or to it has ended.
I2: every byte is reserved before it is written. What the largest batch so far has needed stays reserved, so that a full disk
    is an error of a forward that needs more than any before it.
I3: an error of a transfer is stored with the pages, and raised when they are read (`check`). Nothing waits for a copy that
    has failed.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from torch import Tensor

from lightning_ptm.errors import CapacityError, UsageError, format_bytes
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.disk import DiskRegion, FileOps
from lightning_ptm.memory.io import IoJob, IoQueue, ReadBounced, WriteBounced
from lightning_ptm.memory.paged_tensor import Extent
from lightning_ptm.memory.region import BorrowedRegion
from lightning_ptm.memory.streams import copy_streams
from lightning_ptm.memory.transfer import LinkMeter, LinkStats
from lightning_ptm.terms import BLOCK_BYTES

ACTIVATION_PAGE_BYTES = 1 << 20
"""Bytes of a page of activations: a storage leaves part of its last page unused."""
_PAGES_AT_ONCE = 4
"""Adjacent pages of one transfer, with one path: each transfer takes the interpreter from compute, for about 0.1 ms."""
_THREADS = 2
"""I/O threads of a path: one transfer is prepared while the other runs."""
TO_DISK, FROM_DISK = "activations_to_disk", "activations_from_disk"
"""Names of the two directions in events and statistics."""


@dataclass(slots=True, eq=False)
class DiskPages:
    """The pages of one storage, in order. Only the last one may be filled in part."""

    frames: tuple[int, ...]
    failure: BaseException | None = None
    """The first error of their transfers; written by an I/O thread before the copy has ended."""


class DiskCopy:
    """A copy in pieces, each ended by an I/O thread.

    Args:
        pieces: at least one.
        ended: called once, with the first error, before waiters wake.
    """

    def __init__(self, pieces: int, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended
        # State, under the lock.
        self._lock = threading.Lock()
        self._left = pieces
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def piece_ended(self, error: BaseException | None) -> None:
        """Counts a piece as ended."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            last = self._left == 0
        if last:
            self._ended(self._error)
            self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def synchronize(self) -> None:
        self._finished.wait()

    def order(self) -> None:
        self._finished.wait()  # I/O threads wait for their copies from and to the device


class DiskStore:
    """Pages on disk for saved storages. `give` is safe in any thread, the other methods are the compute thread's.

    Args:
        paths: folders on the disks, at least one; pages are striped over them.
        backend: the device of the storages.
        staging: RAM of `staging_bytes` (uint8, on a block); None: there are no files, threads and no such RAM before the
            first storage comes.
        limit_bytes: bytes on disk that the pages may take.
        file_ops: the file calls, for tests of failing disks.
        events: gets an event for every copy, on the tracks TO_DISK and FROM_DISK.

    Raises:
        ConfigError: a path cannot be used; with `staging`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        backend: Backend,
        staging: Tensor | None,
        *,
        limit_bytes: int,
        file_ops: FileOps | None = None,
        events: Events | None = None,
    ) -> None:
        # Configuration.
        self._limit_bytes = limit_bytes
        self._paths = tuple(paths)
        self._backend = backend
        self._file_ops = file_ops
        self._streams = copy_streams(backend)
        self._events = events or Events()
        # State.
        self._opened = None if staging is None else self._open(staging)
        self._free: list[int] = []
        """Free pages, as a heap: the lowest are taken first, so that those of a storage are adjacent in each step."""
        self._returned: deque[int] = deque()
        """Pages given back, not yet in `_free`. Any thread that collects garbage appends to it."""
        self._closed = False
        self._lock = threading.Lock()
        self._meters = {TO_DISK: LinkMeter(), FROM_DISK: LinkMeter()}  # under the lock

    def _open(self, staging: Tensor | None) -> tuple[DiskRegion, IoQueue]:
        """Creates the files and the I/O threads."""
        lanes = len(self._paths)
        disk = DiskRegion(self._paths, page_size=ACTIVATION_PAGE_BYTES, total_frames=0, file_ops=self._file_ops)
        slots = deque(() if staging is None else staging.split(staging.numel() // (lanes * _THREADS)))
        try:
            queue = IoQueue(
                lanes,
                disk.lane,
                threads_per_lane=_THREADS,
                page_size=_pages_at_once(lanes) * ACTIVATION_PAGE_BYTES,
                backend=self._backend,
                pin=True,
                make_staging=None if staging is None else lambda size: BorrowedRegion(slots.popleft()[:size]),
            )
        except BaseException:
            disk.close()
            raise
        return disk, queue

    @property
    def _disk(self) -> DiskRegion:
        """The files; there are some once a storage has come."""
        if self._opened is None:
            self._opened = self._open(None)
        return self._opened[0]

    @property
    def _io(self) -> IoQueue:
        assert self._opened is not None  # a copy has pages
        return self._opened[1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages, in use or free: what is reserved on disk."""
        return 0 if self._opened is None else self._disk.total_frames * ACTIVATION_PAGE_BYTES

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.total_bytes - (len(self._free) + len(self._returned)) * ACTIVATION_PAGE_BYTES

    def take(self, size_bytes: int) -> DiskPages:
        """Returns pages for `size_bytes`, whose disk space is reserved.

        Raises:
            CapacityError: more than `limit_bytes` would be needed.
            PageIOError: the disk is full.
        """
        while self._returned:
            heapq.heappush(self._free, self._returned.popleft())
        count = -(-size_bytes // ACTIVATION_PAGE_BYTES)
        lacking = count - len(self._free)
        if lacking > 0:
            self._grow(lacking)
        return DiskPages(tuple(heapq.heappop(self._free) for _ in range(count)))

    def give(self, buffer: DiskPages) -> None:
        self._returned.extend(buffer.frames)

    def room_bytes(self) -> int:
        return self._limit_bytes

    def write(self, source: Tensor, buffer: DiskPages, name: str) -> DiskCopy:
        copies = self._streams.to_host
        after = (copies.mark(),)

        def job(place: Extent, piece: Tensor) -> IoJob:
            return WriteBounced(self._disk, place, (piece,), copies, after, keep_tail=False)

        return self._launch(source, buffer, job, TO_DISK, name)

    def read(self, buffer: DiskPages, target: Tensor, name: str) -> DiskCopy:
        """Starts to read as `Store.read`.

        Raises:
            UsageError: the run has ended.
        """
        if self._closed:
            raise UsageError(
                "a backward pass needs activations that a run had written to disk (offload_activations='disk'), and the run "
                "has ended, so its files are gone; run backward passes before the Trainer returns"
            )
        copies = self._streams.to_device
        after = (copies.mark(),)
        return self._launch(
            target,
            buffer,
            lambda place, piece: ReadBounced(self._disk, place, (piece,), copies, after),
            FROM_DISK,
            name,
        )

    def check(self, buffer: DiskPages) -> None:
        if buffer.failure is not None:
            raise buffer.failure

    def links(self) -> dict[str, LinkStats]:
        with self._lock:
            now_s = perf_counter()
            return {name: meter.stats(now_s) for name, meter in self._meters.items()}

    def core_s_per_byte(self) -> float:
        moved_bytes = sum(link.bytes for link in self.links().values())
        return self._io.core_s / moved_bytes if moved_bytes else 0.0

    def disk_written_bytes(self) -> tuple[int, ...]:
        return () if self._opened is None else self._disk.written_bytes()

    def close(self) -> None:
        """Waits for running transfers, fails queued ones, and frees the disk space. Idempotent."""
        self._closed = True
        if self._opened is not None:
            self._io.close()
            self._disk.close()

    def _grow(self, frames: int) -> None:
        needed_bytes = (self._disk.total_frames + frames) * ACTIVATION_PAGE_BYTES
        if needed_bytes > self._limit_bytes:
            raise CapacityError(
                f"activations of this forward take {format_bytes(needed_bytes)} on disk (offload_activations='disk'), and "
                f"pages of model states leave {format_bytes(self._limit_bytes)} to them, so the forward cannot go on; raise "
                "disk_memory, free space on disk_path, use recompute='all', or a smaller batch"
            )
        before = self._disk.total_frames
        self._disk.grow(before + frames)
        self._free.extend(range(before, before + frames))  # above all that are there: still a heap

    def _launch(
        self, whole: Tensor, buffer: DiskPages, job: Callable[[Extent, Tensor], IoJob], track: str, name: str
    ) -> DiskCopy:
        size_bytes, began_s = whole.numel(), perf_counter()
        runs = self._runs(buffer.frames)
        copy = DiskCopy(len(runs), partial(self._ended, buffer, track, name, size_bytes, began_s))
        with self._lock:
            LinkMeter.begin([((self._meters[track],), size_bytes)], began_s)
        jobs, done_bytes = [], 0
        for run in runs:
            start = run.start * ACTIVATION_PAGE_BYTES
            piece = whole[done_bytes : done_bytes + len(run) * ACTIVATION_PAGE_BYTES]
            done_bytes += piece.numel()
            jobs.append((run.start, job(Extent(start, start + piece.numel()), piece)))
        assert done_bytes == size_bytes
        self._io.submit(jobs, copy.piece_ended)
        return copy

    def _runs(self, frames: Sequence[int]) -> list[range]:
        """Returns the pages of each transfer: adjacent ones, at most `_at_once`."""
        runs: list[range] = []
        at_once = _pages_at_once(len(self._paths))
        for frame in frames:
            if runs and frame == runs[-1].stop and len(runs[-1]) < at_once:
                runs[-1] = range(runs[-1].start, frame + 1)
            else:
                runs.append(range(frame, frame + 1))
        return runs

    def _ended(
        self,
        buffer: DiskPages,
        track: str,
        name: str,
        size_bytes: int,
        began_s: float,
        error: BaseException | None,
    ) -> None:
        end_s = perf_counter()
        buffer.failure = buffer.failure or error
        with self._lock:
            LinkMeter.end([(self._meters[track],)], end_s)
        if self._events.active:
            self._events.emit(Event(EventKind.COPY, track, name, began_s, end_s, bytes=size_bytes))


def _pages_at_once(paths: int) -> int:
    # Pages that are striped over several paths are adjacent in no file.
    return _PAGES_AT_ONCE if paths == 1 else 1


def staging_bytes(paths: int) -> int:
    """Returns the bytes of RAM that a DiskStore's threads need for `paths` paths: of a transfer and a block each."""
    return paths * _THREADS * (_pages_at_once(paths) * ACTIVATION_PAGE_BYTES + BLOCK_BYTES)
