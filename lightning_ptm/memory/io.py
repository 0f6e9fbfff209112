"""The I/O threads of the disk tier. Each disk path is a lane with its own queue and threads.

A lane serves jobs first come, first served, and lanes run in parallel. Two jobs of one lane may run at the same time,
so a caller that needs an order waits between them.

I1: every submitted job reports the end of its piece to its transfer exactly once: done, failed, or cancelled by
    close().
I2: an OSError goes to the job's transfer and the thread continues. Any other exception ends the queue: everything
    queued fails with the thread's traceback, and so does everything submitted later. Nothing waits for a dead thread.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lightning_ptm.errors import AngelPTMError, InternalError, UsageError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.numa import keep_to
from lightning_ptm.memory.region import Staging
from lightning_ptm.memory.transfer import Transfer


class IoJob(Protocol):
    """One blocking transfer of at most a page."""

    def run(self, staging: Staging) -> None: ...


@dataclass(frozen=True, slots=True)
class _Task:
    job: IoJob
    transfer: Transfer


class IoQueue:
    """The I/O threads of the disk tier.

    Args:
        lanes: number of disk paths.
        threads_per_lane: jobs of a lane that run at once; two keep a disk busy while a third is being prepared.
        page_size: bytes of each thread's staging buffer.
        backend: the device that copies through the staging buffers; made the threads' current device.
        pin: page-lock the staging buffers.
    """

    def __init__(
        self, lanes: int, *, threads_per_lane: int = 2, page_size: int, backend: Backend, pin: bool = False
    ) -> None:
        self._page_size = page_size
        self._backend = backend
        self._pin = pin

        # State: `_refusal` is why nothing more is accepted; written once, under the lock.
        self._lock = threading.Lock()
        self._refusal: AngelPTMError | None = None
        self._queues: list[queue.SimpleQueue[_Task | None]] = [queue.SimpleQueue() for _ in range(lanes)]
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"ptm-io-{lane}-{index}", daemon=True)
            for lane in range(lanes)
            for index in range(threads_per_lane)
        ]
        self._lane_of_thread = [lane for lane in range(lanes) for _ in range(threads_per_lane)]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: int, job: IoJob, transfer: Transfer) -> None:
        """Queues a job. Its end, also a refusal (queue closed or dead), is one `piece_finished` of `transfer`."""
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._queues[lane].put(_Task(job, transfer))
        if refusal is not None:
            transfer.piece_finished(refusal)

    def close(self) -> None:
        """Lets running jobs end, fails queued ones with UsageError, joins the threads. Idempotent."""
        self._refuse(UsageError("the page allocator was closed while this transfer was queued; wait before closing"))
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
            task.transfer.piece_finished(reason)

    def _serve(self, lane: int) -> None:
        staging = Staging(self._page_size, partial(self._backend.host_region, pin=self._pin))
        task: _Task | None = None
        try:
            keep_to(self._backend.numa_cores())
            self._backend.make_current()  # else page-locking would create a context on the machine's first device
            while (task := self._queues[lane].get()) is not None:
                try:
                    task.job.run(staging)
                    error: BaseException | None = None
                except OSError as failure:
                    error = failure
                task.transfer.piece_finished(error)
                task = None  # an idle thread must not keep pages alive
        except BaseException as death:
            reason = InternalError(
                f"I/O thread {threading.current_thread().name} died: {death!r}; nothing on disk is safe"
            )
            reason.__cause__ = death
            if task is not None:
                task.transfer.piece_finished(reason)
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
