"""Handles of started copies: each is waited on, and its error is raised in the thread that waits.

I1: a handle is finished exactly once; the pages that it held are free for other transfers before a waiter wakes.
I2: the handle's owner (the Allocator) keeps source and target allocated and in place until it is finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_ptm.memory.device_work import Completion


class Transfer:
    """A copy carried out in pieces by I/O threads, or one that was finished at once.

    Args:
        pieces: how many times `piece_finished` will be called; 0 makes a finished handle.
        on_finished: called once with the error or None, in the thread that finishes the last piece, before waiters
            wake (I1).
    """

    def __init__(self, pieces: int = 0, on_finished: Callable[[BaseException | None], None] | None = None) -> None:
        self._on_finished = on_finished

        # State: written by piece_finished under the lock; `_finished` is set last.
        self._pieces_left = pieces
        self._error: BaseException | None = None
        self._lock: threading.Lock | threading.RLock = threading.Lock()
        self._finished = threading.Event()
        if pieces == 0:
            self._finish()

    def done(self) -> bool:
        """Whether the copy is finished or failed; never blocks, never raises."""
        return self._finished.is_set()

    def wait(self, host: bool = True) -> None:
        """Blocks until the copy is finished; raises its error, each time, in this thread.

        Args:
            host: False makes the current stream wait for a copy between RAM and a CUDA device, instead of this thread;
                the bytes may then be used on that stream only. Other copies block in any case.
        Raises:
            PageIOError: a disk transfer failed or was short. The target's bytes are undefined then.
            UsageError: the allocator was closed before the copy began.
            InternalError: the I/O thread died; its traceback is the cause.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def piece_finished(self, error: BaseException | None = None) -> None:
        """Reports the end of one piece (called by I/O threads). The first error wins; the other pieces still run."""
        with self._lock:
            self._pieces_left -= 1
            if error is not None and self._error is None:
                self._error = error
            last = self._pieces_left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            if self._on_finished is not None:
                self._on_finished(self._error)
        except BaseException as error:  # a waiter must never hang, also not because of a bug in the callback
            self._error = error
        finally:
            self._on_finished = None
            self._finished.set()


class StreamTransfer(Transfer):
    """A copy between RAM and a CUDA device, or within one, on a stream: finished when its event is.

    CUDA does not report that an event has completed, so the Allocator queries it (`done`) before it treats a page as in
    use.

    Args:
        completion: the end of all copies of this transfer.
        lock: the Allocator's, re-entrant. The first thread that sees the event complete finishes the handle under it,
            so no thread that holds the lock ever waits for another thread to do so.
        on_finished: as for Transfer; runs in any thread that calls `done` or `wait`, under the lock.
        on_ordered: called once when a stream has been made to wait for the copies: the device's pages may then be used
            on that stream, and by later copies, which wait for it. None: `wait` always blocks.
    """

    def __init__(
        self,
        completion: Completion,
        lock: threading.RLock,
        *,
        on_finished: Callable[[BaseException | None], None],
        on_ordered: Callable[[], None] | None,
    ) -> None:
        super().__init__(1, on_finished)
        self._lock = lock
        self._completion = completion
        self._on_ordered = on_ordered
        self.ordered = False

    def done(self) -> bool:
        if not self._finished.is_set() and self._completion.done():
            self._end()
        return self._finished.is_set()

    def wait(self, host: bool = True) -> None:
        if not host and self._on_ordered is not None:
            self._completion.order()
            with self._lock:
                if not self.ordered and not self._finished.is_set():
                    self.ordered = True
                    self._on_ordered()
            return
        if not self._finished.is_set():
            self._completion.synchronize()
            self._end()
        super().wait()

    def _end(self) -> None:
        with self._lock:
            if not self._finished.is_set():
                self.piece_finished()
