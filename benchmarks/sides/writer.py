"""The disk alone, writing: a step writes a new file of a given size, durably, over the one before.

Room is reserved first, then blocks are written in order past the page cache, by as many threads as are fastest, found by
trials when the side is built. Options: `folder`; `block_bytes`; `file_bytes`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.race import Baton
from benchmarks.sides.disk import aligned_block

THREADS = (1, 2, 4, 8)
TRIES = 2


def write(path: Path, blocks: list[memoryview], file_bytes: int, threads: int) -> None:
    """A file of `file_bytes` (rounded to blocks) at `path`, complete and durable when this returns."""
    block_bytes = len(blocks[0])
    count = -(-file_bytes // block_bytes)
    beside = path.with_suffix(".new")
    descriptor = os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, count * block_bytes)
        numbers = itertools.count()
        lock = threading.Lock()

        def work(block: memoryview) -> None:
            while True:
                with lock:
                    number = next(numbers)
                if number >= count:
                    return
                if os.pwritev(descriptor, [block], number * block_bytes) != block_bytes:
                    raise OSError(f"block {number} of {beside} was not written whole")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, blocks[:threads]))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(beside, path)


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    path, file_bytes = Path(options["folder"]) / "alone", options["file_bytes"]
    blocks = [aligned_block(options["block_bytes"]) for _ in range(max(THREADS))]
    best: dict[int, float] = {}
    for _ in range(TRIES):
        for threads in THREADS:
            started = time.perf_counter()
            write(path, blocks, file_bytes, threads)
            best[threads] = min(best.get(threads, float("inf")), time.perf_counter() - started)
    threads = min(best, key=best.__getitem__)
    baton.ready()
    while steps := baton.wait():
        for _ in range(steps):
            write(path, blocks, file_bytes, threads)
        baton.report(0.0, {"threads": float(threads), "saved_bytes": float(file_bytes)})
