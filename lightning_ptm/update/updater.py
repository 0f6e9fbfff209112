"""The updater: takes update jobs and returns handles; works in the caller's thread or in its own (section 7 of the paper).

Owns the worker thread, if there is one, and the error that ended the work. Everything else belongs to the pipeline.
I1: the pipeline is used by one thread at a time: the caller's, or, between `run_in_thread` and `stop`, the worker.
    Callers, of which there may be several, then only put commands into a queue, in the order of their calls.
I2: after an error nothing is updated any more; every later call raises that error, with the traceback of its origin.
I3: the thread that does the work advances, waits for a transfer or a gradient, or raises. The worker waits for commands only
    if no job is left, so a caller that waits for a job cannot wait for ever.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from lightning_ptm.errors import ConfigError, InternalError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.interrupts import interrupted_later
from lightning_ptm.memory.backend import CurrentStream
from lightning_ptm.memory.core_limits import use_cores
from lightning_ptm.memory.device_work import Stream
from lightning_ptm.memory.numa import keep_to
from lightning_ptm.terms import ALIGN_NUMEL, BLOCK_BYTES, Tier
from lightning_ptm.terms import chunk_numel as default_chunk_numel
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.pipeline import BeforeWrite, Blocker, Pipeline, UpdateStats, Wait
from lightning_ptm.update.update_job import JobHandle, JobUnderWay, UpdateJob

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator

BLOCK_NUMEL = 1 << 20
"""Elements per optimizer call. Measured on AdamW with 32 MB of last-level cache: what a call touches (20 bytes per
element) stays there; smaller blocks cost more in dispatch (about 30 us a call) than they save in memory traffic."""

_GRADIENT_WATCH_S = 0.001
"""Interval at which a worker without other work checks for a gradient."""


class Updater:
    """Runs update jobs page by page.

    Args:
        allocator: copies the bytes. Flats whose master states are in its device tier are updated on that device.
        chunk_numel: elements that are read, updated and written together, unless they are one parameter that is updated
            whole; a multiple of 4096. Default: one page of float32.
        block_numel: elements per optimizer call; a multiple of 64.
        device_block_numel: elements per optimizer call on a device that is not the CPU, a multiple of 64. Gradients that are
            cast for it take so many elements of the device. Default: those of a chunk.
        staging: most chunks that have staging buffers at once. Each takes chunk_numel elements of every paged tensor that
            is not in the tier of the arithmetic.
        staging_tier: tier in which flats with master states on disk are updated: HOST, or DEVICE on a machine without one.
        stream: stream of the arithmetic and of its copies, with no other work on it. It waits for work queued before
            `run_in_thread`, and each job for work queued before its submission; `finish` and `drain` make the current stream
            wait for it. None: the current stream of the thread that pumps.
        events: receives an event for the arithmetic of each chunk.

    Raises:
        ConfigError: a size that cannot work.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        chunk_numel: int | None = None,
        block_numel: int = BLOCK_NUMEL,
        device_block_numel: int | None = None,
        staging: int = 4,
        staging_tier: Tier = Tier.DEVICE,
        stream: Stream | None = None,
        events: Events | None = None,
    ) -> None:
        if chunk_numel is None:
            chunk_numel = default_chunk_numel(allocator.page_size)
        if chunk_numel < 1 or chunk_numel % BLOCK_BYTES or block_numel < 1 or block_numel % ALIGN_NUMEL or staging < 1:
            raise ConfigError(
                f"an updater with chunks of {chunk_numel} elements, blocks of {block_numel} and {staging} staging chunks "
                f"cannot work: chunks are multiples of {BLOCK_BYTES}, blocks of {ALIGN_NUMEL}, staging is at least 1"
            )
        self._stream = stream or CurrentStream()
        self._backend = allocator.backend
        self._pipeline = Pipeline(
            allocator,
            chunk_numel=chunk_numel,
            block_numel=block_numel,
            device_block_numel=device_block_numel or chunk_numel,
            staging=staging,
            staging_tier=staging_tier,
            events=events,
        )

        self.failed = False
        """Whether an error has ended the work (I2), which calls raise until `close`."""
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Commands from callers to the worker."""
        self._unsent: list[Callable[[], None]] = []
        """Commands that the worker has not got yet, in order."""
        self._sending = threading.RLock()
        """Held while commands are passed on: another caller's later commands come after them."""
        self._stopping = threading.Event()
        """Set by `stop`."""

    @property
    def stats(self) -> UpdateStats:
        """Counters since the start."""
        return self._pipeline.stats

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk."""
        return self._pipeline.chunk_numel

    def take_staging(self, tier: Tier, dtype: torch.dtype, count: int, numel: int | None = None) -> None:
        """Reserves `count` staging buffers, so that no later job fails for lack of pages. Call before `run_in_thread`.

        Flats of the same dtypes and tiers share the buffers.

        Args:
            numel: elements of each buffer; None: `chunk_numel`.

        Raises:
            CapacityError: the tier is too small.
        """
        self._pipeline.pool.reserve(tier, dtype, self.chunk_numel if numel is None else numel, count)

    def submit(self, job: UpdateJob, *, at_once: bool = True) -> JobHandle:
        """Queues a job after those submitted before.

        Its arithmetic runs once its gradient is complete (`job.after`); master states are read ahead meanwhile.

        Args:
            at_once: wake the updater's thread now, else at the next call of another method (`pump`, say). It then computes
                in Python, as the caller does, and only one of them can at a time.
        """
        self._check()
        flat = job.states.flat
        handle = JobHandle(f"update of flat {flat.unit}/{flat.index}", job.on_done)
        progress = JobUnderWay(
            job,
            handle,
            chunk_numel=self.chunk_numel,
            staging_tier=self._pipeline.staging_tier,
            own_memory=self._backend.has_own_memory,
        )
        progress.submit(self._backend.mark())
        self._unsent.append(lambda: self._pipeline.policy.enqueue(progress))
        if at_once or self._thread is None:
            self._send()
        return handle

    def prefetch(self, order: Iterable[FlatStates]) -> None:
        """Reads these flats' master states ahead, in this order, as far as staging buffers allow. Jobs must follow."""
        self._check()
        flats = list(order)
        self._command(lambda: self._pipeline.want(flats))

    def watch(self, before_write: BeforeWrite | None) -> None:
        """Sets a callback, called in the working thread before any stretch of a paged tensor changes; None removes it.

        Call after `drain`.
        """

        self._command(lambda: self._pipeline.watch(before_write))

    @property
    def in_thread(self) -> bool:
        """Whether the updater's own thread does the work."""
        return self._thread is not None

    def promote(self, handle: JobHandle) -> None:
        """Moves a queued job before all others; no effect on a job that is computed."""
        self._check()
        self._command(lambda: self._pipeline.to_front(handle))

    def pump(self, limit: int | None = None) -> bool:
        """Does what needs no waiting: arithmetic of chunks that are read, reads and writes. Raises the thread's error.

        Args:
            limit: most advances (each of one chunk at most).

        Returns:
            Whether anything was done; False if a thread does the work.
        """
        self._check()
        if self._unsent:
            self._send()
        if self._thread is not None or self._pipeline.idle:  # a cheap exit: called at every tick, mostly without work
            return False
        moved = False
        with self._working():
            while (limit is None or limit > 0) and self._pipeline.advance():
                moved = True
                limit = None if limit is None else limit - 1
        return moved

    def finish(self, handle: JobHandle) -> None:
        """Blocks until a job is done and its compute parameters are readable; the job is served before all others.

        Where a device does the arithmetic, the current stream waits for it; the host need not.

        Raises:
            PageIOError: a read or write failed. The updater cannot be used any more (I2).
        """
        self._check()
        if self._unsent:
            self._send()
        if self._thread is not None:
            if not handle.done():
                self.promote(handle)
            self._await(handle.done, handle.block)
        elif not handle.done():
            with self._working():
                self._pipeline.to_front(handle)
                while not handle.done():
                    self._go_on(handle, self._pipeline.wait)
        if handle.end is not None:
            handle.end.order()

    def drain(self) -> None:
        """Blocks until every job is done and every write has ended; drops chunks that were read ahead.

        Afterwards the pages are up to date, and other code may read, move or write them. Raises as `finish` does.
        """
        self._check()
        self._command(self._pipeline.policy.drop_read_ahead)
        if self._thread is not None:
            idle = threading.Event()
            self._command(lambda: self._when_idle(idle))
            self._await(idle.is_set, idle.wait)
        else:
            with self._working():
                while self._pipeline.busy:
                    self._go_on(None, self._pipeline.wait)
        self._stream.join()
        self._backend.mark().synchronize()  # the next reader of the pages may be in another thread, on another stream

    def busy(self) -> bool:
        """Whether any job is unfinished or any write in flight. Not meaningful while a thread does the work."""
        return self._pipeline.busy

    def run_in_thread(self, cores: int | None = None) -> None:
        """Starts a thread that does the work until `stop`.

        Args:
            cores: CPU cores that its arithmetic may use; None: as many as compute.

        Raises:
            UsageError: the thread runs already.
        """
        self._check()
        if self._thread is not None:
            raise UsageError("the updater already runs in a thread; stop it before starting another")
        self._stopping.clear()
        self._stream.follow()
        thread = threading.Thread(target=self._work, args=(cores,), name="lightning_ptm update", daemon=True)
        thread.start()
        self._thread = thread  # only once it has started: `stop` joins it

    def stop(self) -> None:
        """Ends the thread; unfinished jobs stay queued. Does not raise the thread's error: the next call does. Idempotent."""
        self._send()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        self._commands.put(_nothing)
        thread.join()
        while not self._commands.empty():
            self._commands.get()()

    def close(self) -> None:
        """Stops the thread, waits for transfers in flight, whether or not they fail, and releases staging. Idempotent."""
        self.stop()
        if not self._closed:
            self._closed = True
            self._pipeline.close()
        # Where a hook of a backward has raised it, its traceback holds the loss, whose graph holds pages and this run through
        # C++, where the garbage collector does not look: the device's memory would stay taken.
        self._failure = None

    # Called by callers.

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise UsageError(
                "this run has ended, or its pages were laid out again (parameters were unfrozen, added or moved to other "
                "groups of an optimizer) since the forward that this backward or step belongs to; compute the forward "
                "again, and then its backward, or start a new fit"
            )

    def _command(self, command: Callable[[], None]) -> None:
        self._unsent.append(command)
        self._send()

    def _send(self) -> None:
        """Passes commands to the worker, or carries them out where there is none."""
        with self._sending:
            commands, self._unsent = self._unsent, []
            for command in commands:
                if self._thread is not None:
                    self._commands.put(command)
                else:
                    command()

    def _await(self, done: Callable[[], bool], block: Callable[[float], bool]) -> None:
        """Waits for the worker; raises if its thread has died."""
        while not done():
            block(0.1)
            thread = self._thread
            if not done() and (thread is None or not thread.is_alive()):
                self._check()
                raise InternalError("the update thread ended with work left and without an error")
        self._check()

    # Called in the thread that does the work.

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Context of all work: Ctrl-C takes effect only at its end, and inference mode is off.

        So an interrupt never leaves a chunk half updated or a transfer unknown to the code that waits for it. And tensors
        made by an update that an evaluation waits for, in inference mode, can be changed later.
        """
        with interrupted_later(), torch.inference_mode(False):
            try:
                with self._stream.entered():
                    yield
            except Exception as error:
                self.failed, self._failure = True, error
                raise
            except BaseException as error:
                # E.g. a second Ctrl-C. A chunk may be half updated; later calls raise a UsageError, as cleanup code that
                # catches errors must not get a second KeyboardInterrupt.
                self.failed = True
                self._failure = UsageError(
                    f"the update was interrupted by {type(error).__name__}: some master states are updated and others are "
                    "not, so the run cannot continue; resume from the last checkpoint"
                )
                self._failure.__cause__ = error
                raise

    def _go_on(self, handle: JobHandle | None, wait: Callable[[Blocker], None]) -> None:
        if not self._pipeline.advance_or_wait(handle, wait):
            what = handle.name if handle is not None else "the updater"
            raise InternalError(f"{what} can neither advance nor has a transfer or gradient to wait for")

    def _work(self, cores: int | None) -> None:
        near = self._backend.numa_cores()
        keep_to(near)
        if near is not None:
            use_cores(min(cores or len(near), torch.get_num_threads(), len(near)))
        elif cores is not None:
            use_cores(cores)
        self._backend.make_current()  # before a stream is entered: its exit restores the device that was current
        with (
            contextlib.suppress(BaseException),
            self._working(),
        ):  # I2: the error is in _failure; the next call raises it
            while not self._stopping.is_set():
                while not self._commands.empty():
                    self._commands.get()()
                if self._pipeline.busy:
                    self._go_on(None, self._wait_or_command)
                elif not self._pipeline.advance_or_wait(None, self._wait_or_command):
                    self._commands.get()()

    def _wait_or_command(self, blocker: Blocker) -> None:
        if blocker.cause is Wait.GRADIENT:
            # Polled, not waited for: a gradient that never comes must not keep `stop` from ending this thread.
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=_GRADIENT_WATCH_S)()
        else:
            self._pipeline.wait(blocker)

    def _when_idle(self, idle: threading.Event) -> None:
        """Finishes all jobs, in the worker, then sets `idle`."""

        def wait(blocker: Blocker) -> None:
            if blocker.cause is Wait.GRADIENT:
                self._stopping.wait(_GRADIENT_WATCH_S)
            else:
                self._pipeline.wait(blocker)

        while self._pipeline.busy and not self._stopping.is_set():
            self._go_on(None, wait)
        idle.set()


def _nothing() -> None:
    """Command without effect, which wakes the worker."""
