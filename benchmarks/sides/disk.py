"""The disk alone: as many bytes read as written, in one block size, past the page cache, as fast as it takes them.

The least time of any step that moves these bytes. Blocks are read in order and written back in the same order, as an update
does. Reads and writes alternate by one block or by several, or run at once in threads of their own: by trials when the
side is built, the pattern and the number of threads are chosen that are fastest on this disk.

Options: `folder`; `block_bytes`; `step_bytes` (read and written in one step, together); `file_bytes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self

from benchmarks.race import Baton

HUGE_PAGE_BYTES = 2 * 2**20
DEPTHS = (1, 2, 4, 8)
BURSTS = (1, 4, 16)
PROBES = 3
PROBE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Pattern:
    """`depth` transfers in flight: `burst` reads, then `burst` writes, and so on; apart (burst 0): half of them each."""

    depth: int
    burst: int


PATTERNS = [Pattern(depth, burst) for depth in DEPTHS for burst in BURSTS] + [
    Pattern(depth, 0) for depth in DEPTHS if depth > 1
]


def aligned_block(block_bytes: int) -> memoryview:
    """Random bytes in huge pages, where there are: the kernel then passes fewer pieces to the disk."""
    whole = mmap.mmap(-1, block_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        whole.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % HUGE_PAGE_BYTES
    block = memoryview(whole)[start : start + block_bytes]
    block[:] = os.urandom(block_bytes)
    return block


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
        self._memory = [aligned_block(block_bytes) for _ in range(max(DEPTHS))]
        self._pool = ThreadPoolExecutor(max(DEPTHS))
        self._next = {os.preadv: itertools.count(), os.pwritev: itertools.count()}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def fill(self) -> None:
        """Writes every block, so that later reads find data and later writes find space."""
        self._run([(iter([os.pwritev] * self.blocks), 4)])

    def mixed(self, count: int, pattern: Pattern) -> None:
        """Transfers `count` blocks, half of them read and half written."""
        if pattern.burst == 0:
            half = [(iter([call] * (count // 2)), pattern.depth // 2) for call in (os.preadv, os.pwritev)]
            self._run(half)
            return
        turns = itertools.cycle([os.preadv] * pattern.burst + [os.pwritev] * pattern.burst)
        self._run([(itertools.islice(turns, count), pattern.depth)])

    def _run(self, queues: list[tuple[Iterator[Any], int]]) -> None:
        """Carries out queues of calls, each with a number of threads."""

        def work(memory: memoryview, calls: Iterator[Any]) -> None:
            while True:
                with self._lock:
                    call = next(calls, None)
                    if call is None:
                        return
                    block = next(self._next[call]) % self.blocks
                done = call(self._fd, [memory], block * self.block_bytes)
                if done != self.block_bytes:
                    raise OSError(f"{done} of {self.block_bytes} bytes transferred at block {block}")

        memory = iter(self._memory)
        started = [self._pool.submit(work, next(memory), calls) for calls, threads in queues for _ in range(threads)]
        for future in started:
            future.result()


def best_pattern(file: DirectFile) -> Pattern:
    """Returns the pattern at which the disk is fastest, by the best of a few short trials of each."""
    count = max(2 * max(DEPTHS), PROBE_BYTES // file.block_bytes)
    count -= count % (2 * max(BURSTS))
    best: dict[Pattern, float] = {}
    for _ in range(PROBES):
        for pattern in PATTERNS:
            started = time.perf_counter()
            file.mixed(count, pattern)
            seconds = time.perf_counter() - started
            best[pattern] = min(seconds, best.get(pattern, seconds))
    return min(best, key=best.__getitem__)


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    block_bytes, step_bytes = options["block_bytes"], options["step_bytes"]
    with DirectFile(options["folder"], file_bytes=options["file_bytes"], block_bytes=block_bytes) as file:
        file.fill()
        pattern = best_pattern(file)
        baton.ready()
        while steps := baton.wait():
            for _ in range(steps):
                file.mixed(max(2, step_bytes // block_bytes), pattern)
            baton.report(0.0, asdict(pattern))
