"""Disks for tests: one whose calls fail as scripted, one that moves only when a hand lets it."""

from __future__ import annotations

import collections
import errno
import threading
from collections.abc import Sequence

from lightning_ptm.memory.disk import FileOps

SHORT = -1
"""Script entry: the call moves half of what was asked."""


class ScriptedFiles(FileOps):
    """Real files, except that the next calls do as their scripts say: an errno to raise, or SHORT, or a byte count."""

    def __init__(self) -> None:
        self.reads: collections.deque[int] = collections.deque()
        self.writes: collections.deque[int] = collections.deque()
        self.open_errno = 0
        self.fallocate_errno = 0
        self.death: BaseException | None = None
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open(self, path: str, flags: int, mode: int) -> int:
        if self.open_errno:
            raise OSError(self.open_errno, "scripted")
        self.opened.append(super().open(path, flags, mode))
        return self.opened[-1]

    def close(self, fd: int) -> None:
        self.closed.append(fd)
        super().close(fd)

    def fallocate(self, fd: int, size_bytes: int, start: int = 0) -> None:
        if self.fallocate_errno:
            raise OSError(self.fallocate_errno, "scripted")
        super().fallocate(fd, size_bytes, start)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.death is not None:
            raise self.death
        return super().preadv(fd, self._cut(self.reads, buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, self._cut(self.writes, buffers), offset)

    def _cut(self, script: collections.deque[int], buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        if not script:
            return buffers
        step = script.popleft()
        if 0 < step < 4096:
            raise OSError(step, errno.errorcode[step])
        return [buffers[0][: len(buffers[0]) // 2 - 512 if step == SHORT else step]]


class CountedFiles(FileOps):
    """Real files; `moved` has the bytes of each call."""

    def __init__(self) -> None:
        self.moved: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.moved.append(super().preadv(fd, buffers, offset))
        return self.moved[-1]

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.moved.append(super().pwritev(fd, buffers, offset))
        return self.moved[-1]


class HandDrivenFiles(FileOps):
    """Real files whose transfers each wait for `let_go`; `started` counts those that have reached the disk."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)

    def let_go(self, transfers: int = 1) -> None:
        self._gate.release(transfers)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().pwritev(fd, buffers, offset)

    def _pass(self) -> None:
        self.started.release()
        self._gate.acquire()
