"""The disk alone: reads and writes of one block size at once, past the page cache, as fast as it takes them.

The floor under any step that moves so many bytes. As many threads as the disk likes best, found by trying when the
side is built; half of the bytes are read and half are written, in turns, over one preallocated file.

Options: `folder`; `block_bytes`; `step_bytes` (read and written in one step, together); `file_bytes`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from race import Baton

DEPTHS = (1, 2, 4, 8)
PROBES = 3
PROBE_BYTES = 512 * 2**20


class DirectFile:
    """A preallocated O_DIRECT file with no name, and one aligned block of memory for each thread."""

    def __init__(self, folder: str, *, file_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks = max(2, file_bytes // block_bytes)
        fd, path = tempfile.mkstemp(dir=folder)
        os.close(fd)
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        os.unlink(path)
        os.posix_fallocate(self._fd, 0, self.blocks * block_bytes)
        self._memory = [mmap.mmap(-1, block_bytes) for _ in range(max(DEPTHS))]
        for memory in self._memory:
            memory.write(os.urandom(block_bytes))
        self._pool = ThreadPoolExecutor(max(DEPTHS))
        self._next = itertools.count()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def fill(self) -> None:
        """Write every block, so that later reads find data and later writes find space."""
        self._run(self.blocks, depth=4, kinds=(os.pwritev,))

    def mixed(self, count: int, *, depth: int) -> None:
        """Transfer `count` blocks, every other one read and written, with `depth` transfers in flight."""
        self._run(count, depth=depth, kinds=(os.preadv, os.pwritev))

    def _run(self, count: int, *, depth: int, kinds: tuple[Any, ...]) -> None:
        left = iter(range(count))

        def work(memory: mmap.mmap) -> None:
            while True:
                with self._lock:
                    number = next(left, None)
                    if number is None:
                        return
                    block = next(self._next) % self.blocks
                done = kinds[number % len(kinds)](self._fd, [memory], block * self.block_bytes)
                if done != self.block_bytes:
                    raise OSError(f"{done} of {self.block_bytes} bytes transferred at block {block}")

        for future in [self._pool.submit(work, memory) for memory in self._memory[:depth]]:
            future.result()


def best_depth(file: DirectFile) -> int:
    """The number of transfers in flight at which the disk is fastest, by the best of a few short tries of each."""
    count = max(2 * max(DEPTHS), PROBE_BYTES // file.block_bytes)
    best: dict[int, float] = {}
    for _ in range(PROBES):
        for depth in DEPTHS:
            started = time.perf_counter()
            file.mixed(count, depth=depth)
            seconds = time.perf_counter() - started
            best[depth] = min(seconds, best.get(depth, seconds))
    return min(best, key=best.__getitem__)


def run(options: dict[str, Any], baton: Baton) -> None:
    """Take part in the race until it is over."""
    block_bytes, step_bytes = options["block_bytes"], options["step_bytes"]
    with DirectFile(options["folder"], file_bytes=options["file_bytes"], block_bytes=block_bytes) as file:
        file.fill()
        depth = best_depth(file)
        baton.ready()
        while steps := baton.wait():
            for _ in range(steps):
                file.mixed(max(2, step_bytes // block_bytes), depth=depth)
            baton.report(0.0, {"depth": depth})
