"""The I/O threads of the disk tier, and their jobs: one blocking transfer of at most a page each.

Each disk path is a lane with its own queue and threads. A job is direct or goes through the thread's staging buffer.

A lane serves jobs first come, first served, and lanes run in parallel. Two jobs of one lane may run at the same time,
so a caller that needs an order waits between them.

I1: the end of every submitted job is reported exactly once: done, failed, or cancelled by close().
I2: an OSError is reported with the job and the thread continues. Any other exception ends the queue: everything
    queued fails with the thread's traceback, and so does everything submitted later. Nothing waits for a dead thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Protocol

import torch

from lightning_ptm.errors import AngelPTMError, InternalError, UsageError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.core_limits import use_cores
from lightning_ptm.memory.device_work import DeviceEvent
from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.numa import keep_to
from lightning_ptm.memory.paged_tensor import Extent, round_up
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.memory.streams import CopyStream, Pair
from lightning_ptm.terms import BLOCK_BYTES


class Staging:
    """Page-sized staging buffer of one I/O thread, for bytes that cannot go directly between disk and their address.

    Created at first use.

    Args:
        page_size: bytes of a page; the buffer has one block more, for the old bytes of a block that is partly
            rewritten.
        make: returns a region of so many bytes (page-locked if a device copies from and to it).
    """

    def __init__(self, page_size: int, make: Callable[[int], HostRegion]) -> None:
        self._page_size = page_size
        self._make = make
        self._region: HostRegion | None = None

    @property
    def region(self) -> HostRegion:
        if self._region is None:
            self._region = self._make(self._page_size + BLOCK_BYTES)
        return self._region

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None


class IoJob(Protocol):
    """One blocking transfer of at most a page."""

    def run(self, staging: Staging) -> None: ...


@dataclass(frozen=True, slots=True)
class Straight:
    """Direct transfer from disk to RAM (`reading`) or from RAM to disk, of whole blocks."""

    disk: DiskRegion
    start_bytes: int
    views: Sequence[memoryview]
    reading: bool

    def run(self, staging: Staging) -> None:
        self.disk.transfer(self.reading, self.start_bytes, self.views)


@dataclass(frozen=True, slots=True)
class ReadBounced:
    """Read through staging: from disk to RAM at any address and of any length, or to a CUDA device."""

    disk: DiskRegion
    place: Extent
    targets: Sequence[torch.Tensor]
    copies: CopyStream
    after: Sequence[DeviceEvent]

    def run(self, staging: Staging) -> None:
        region = staging.region
        size = self.place.stop_bytes - self.place.start_bytes
        self.disk.read(self.place.start_bytes, [region.memory[: round_up(size)]])
        # The I/O thread waits, because its next job overwrites the staging buffer.
        self.copies.launch(_pair_up(self.targets, region.tensor, to_staging=False), self.after).synchronize()


@dataclass(frozen=True, slots=True)
class WriteBounced:
    """Write through staging: from RAM at any address and of any length, or from a CUDA device, to disk.

    With `keep_tail`, the bytes after the place in its last block belong to elements that keep their values.
    """

    disk: DiskRegion
    place: Extent
    sources: Sequence[torch.Tensor]
    copies: CopyStream
    after: Sequence[DeviceEvent]
    keep_tail: bool

    def run(self, staging: Staging) -> None:
        region = staging.region
        blocks = region.memory[: round_up(self.place.stop_bytes - self.place.start_bytes)]
        if self.keep_tail:
            _read_last_block(self.disk, self.place, blocks)
        self.copies.launch(_pair_up(self.sources, region.tensor, to_staging=True), self.after).synchronize()
        self.disk.write(self.place.start_bytes, [blocks])


@dataclass(frozen=True, slots=True)
class DiskToDisk:
    """Copy from one place on disk to another, through staging; `keep_tail` as in WriteBounced."""

    disk: DiskRegion
    source: Extent
    target: Extent
    keep_tail: bool

    def run(self, staging: Staging) -> None:
        region = staging.region
        size = self.target.stop_bytes - self.target.start_bytes
        blocks = region.memory[: round_up(size)]
        self.disk.read(self.source.start_bytes, [blocks])
        if self.keep_tail and size % BLOCK_BYTES:
            # The staging's extra block holds the target's old last block, whose tail is kept.
            spare = region.memory[len(region.memory) - BLOCK_BYTES :]
            _read_last_block(self.disk, self.target, spare)
            kept_from = size % BLOCK_BYTES
            blocks[size:] = spare[kept_from:]
        self.disk.write(self.target.start_bytes, [blocks])


def _read_last_block(disk: DiskRegion, place: Extent, blocks: memoryview) -> None:
    """Reads the block in which `place` ends, if it ends inside one, into the last block of `blocks`."""
    size = place.stop_bytes - place.start_bytes
    if size % BLOCK_BYTES:
        disk.read(place.start_bytes + round_up(size) - BLOCK_BYTES, [blocks[len(blocks) - BLOCK_BYTES :]])


def _pair_up(parts: Sequence[torch.Tensor], staged: torch.Tensor, *, to_staging: bool) -> list[Pair]:
    pairs, start = [], 0
    for part in parts:
        place = staged[start : start + part.numel()]
        pairs.append(Pair(place, part) if to_staging else Pair(part, place))
        start += part.numel()
    return pairs


Ended = Callable[[BaseException | None], None]
"""Callback at the end of a job, called by an I/O thread with the job's error or None."""


@dataclass(frozen=True, slots=True)
class _Task:
    job: IoJob
    ended: Ended


class IoQueue:
    """The I/O threads of the disk tier.

    Args:
        lanes: number of disk paths.
        lane_of: returns the disk path of a page on disk.
        threads_per_lane: jobs of a lane that run at once; two keep a disk busy while a third is being prepared.
        page_size: bytes of each thread's staging buffer.
        backend: the device that copies through the staging buffers; made the threads' current device.
        pin: page-lock the staging buffers.
        make_staging: returns the RAM of a thread's staging buffer, called in that thread; None: newly mapped.
    """

    def __init__(
        self,
        lanes: int,
        lane_of: Callable[[int], int],
        *,
        threads_per_lane: int = 2,
        page_size: int,
        backend: Backend,
        pin: bool = False,
        make_staging: Callable[[int], HostRegion] | None = None,
    ) -> None:
        self._lane_of = lane_of
        self._page_size = page_size
        self._backend = backend
        self._make_staging = make_staging or partial(backend.host_region, pin=pin)

        # State: `_refusal` is why nothing more is accepted; written once, under the lock.
        self._lock = threading.Lock()
        self._refusal: AngelPTMError | None = None
        self._queues: list[queue.SimpleQueue[_Task | None]] = [queue.SimpleQueue() for _ in range(lanes)]
        self._lane_of_thread = [lane for lane in range(lanes) for _ in range(threads_per_lane)]
        self._core_s = [0.0] * len(self._lane_of_thread)
        """By thread, its time on a core so far; written by that thread alone."""
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(lane, number),
                name=f"ptm-io-{lane}-{number % threads_per_lane}",
                daemon=True,
            )
            for number, lane in enumerate(self._lane_of_thread)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no room for another thread, or Ctrl-C
            self._threads = [each for each in self._threads if each.ident is not None]
            self.close()
            raise

    def submit(self, jobs: Sequence[tuple[int, IoJob]], ended: Ended) -> None:
        """Queues jobs, each with the page on disk in which it begins. The end of each, also a refusal (queue closed or dead),
        is one call of `ended`."""
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                for page, job in jobs:
                    self._queues[self._lane_of(page)].put(_Task(job, ended))
        if refusal is not None:
            for _ in jobs:
                ended(refusal)

    @property
    def core_s(self) -> float:
        """Seconds that the threads have run on cores so far."""
        return sum(self._core_s)

    def close(self) -> None:
        """Lets running jobs end, fails queued ones with UsageError, joins the threads. Idempotent."""
        self._refuse(
            UsageError(
                "the run was closed while this transfer was queued, so it was not done; wait for it before the end"
            )
        )
        with self._lock:
            for lane in self._lane_of_thread:
                self._queues[lane].put(None)
            self._lane_of_thread = []
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _refuse(self, reason: AngelPTMError) -> None:
        """Fails everything queued, and accepts nothing more."""
        with self._lock:
            self._refusal = self._refusal or reason
            queued = [task for lane_queue in self._queues for task in _drain(lane_queue)]
        for task in queued:
            task.ended(reason)

    def _serve(self, lane: int, number: int) -> None:
        staging = Staging(self._page_size, self._make_staging)
        task: _Task | None = None
        try:
            keep_to(self._backend.numa_cores())
            # Copies to and from staging take one core. On several, each thread would have an OpenMP team beside compute, and
            # both copies and kernels would wait for parts whose core another team has.
            use_cores(1)
            self._backend.make_current()  # else page-locking would create a context on the machine's first device
            while (task := self._queues[lane].get()) is not None:
                try:
                    task.job.run(staging)
                    error: BaseException | None = None
                except OSError as failure:
                    error = failure
                self._core_s[number] = thread_time()
                task.ended(error)
                task = None  # an idle thread must not keep pages alive
        except BaseException as death:
            reason = InternalError(
                f"I/O thread {threading.current_thread().name} died: {death!r}; nothing on disk is safe"
            )
            reason.__cause__ = death
            if task is not None:
                task.ended(reason)
            self._refuse(reason)
        finally:
            staging.close()


def _drain(lane_queue: queue.SimpleQueue[_Task | None]) -> list[_Task]:
    """Takes all tasks out of a queue; each None, which ends a thread, stays in."""
    tasks: list[_Task] = []
    ends = 0
    while True:
        try:
            task = lane_queue.get_nowait()
        except queue.Empty:
            break
        if task is None:
            ends += 1
        else:
            tasks.append(task)
    for _ in range(ends):
        lane_queue.put(None)
    return tasks
