"""A disk of a chosen speed: the real one, slowed down. Bytes are really moved; the rest of the time is slept.

It shows what a fast disk cannot: updates that take as long as several steps.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence

from lightning_ptm.memory.disk import FileOps


class SlowDisks(FileOps):
    """Each open file is a disk of its own: it reads and writes at a fixed bandwidth, one call after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy: collections.defaultdict[int, threading.Lock] = collections.defaultdict(threading.Lock)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._busy[fd]:
            return self._at_speed(time.perf_counter(), super().preadv(fd, buffers, offset))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._busy[fd]:
            return self._at_speed(time.perf_counter(), super().pwritev(fd, buffers, offset))

    def _at_speed(self, started_s: float, moved_bytes: int) -> int:
        left_s = started_s + moved_bytes / self._bytes_per_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return moved_bytes
