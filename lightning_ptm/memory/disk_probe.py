"""How many transfers of one path should run at once: found by trying, when the disk tier is large enough to matter.

Runs once, on pages that hold nothing yet. Knows the disk's files; owns its buffers and threads while it runs.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.region import HostRegion

log = logging.getLogger(__name__)

DEFAULT_THREADS = 2
"""One transfer is prepared while the other runs."""
_DEPTHS = (4, 8)
"""Two that do nothing else come close to four, but beside an update they are too few: 4.5 against 5.3 GB/s."""
_LEAST_BYTES = 1 << 30
"""Smaller tiers are read and written in a moment, whatever the depth."""
_TRIAL_BYTES = 96 << 20
_ROUNDS = 2
_WORTH = 1.05
"""More threads have to be so much faster than fewer: each takes staging and a share of the processor."""


def threads_per_path(disk: DiskRegion) -> int:
    """The number of threads for each path at which reads and writes of pages, half of them each, are fastest.

    Takes some tenths of a second; DEFAULT_THREADS without a trial where the tier has less than a gigabyte or pages are so
    large that a trial would take long.

    Raises:
        PageIOError: a transfer failed.
    """
    page_size, paths = disk.page_size, len(disk.paths)
    frames = min(disk.total_frames, paths * _TRIAL_BYTES // page_size)
    depths = [depth for depth in _DEPTHS if 2 * depth * paths <= frames]
    if disk.total_frames * page_size < _LEAST_BYTES or not depths:
        return DEFAULT_THREADS
    best: dict[int, float] = {}
    region = HostRegion(max(depths) * paths * page_size)
    try:
        with ThreadPoolExecutor(max(depths) * paths) as pool:
            trial = _Trial(disk, region, pool, frames)
            trial.run(max(depths), writes_only=True)  # blocks that were never written read as zeros, for nothing
            for _, depth in itertools.product(range(_ROUNDS), depths):
                seconds = trial.run(depth)
                best[depth] = min(seconds, best.get(depth, seconds))
    finally:
        region.close()
    chosen = min(depths)
    for depth in depths:
        if best[depth] * _WORTH < best[chosen]:
            chosen = depth
    speed = frames * page_size / best[chosen] / 1e9
    log.info("disk tier: %d transfers at once for each path, %.2f GB/s of reads and writes", chosen, speed)
    return chosen


class _Trial:
    """Transfers of pages 0 to `frames` by some threads."""

    def __init__(self, disk: DiskRegion, region: HostRegion, pool: ThreadPoolExecutor, frames: int) -> None:
        self._disk = disk
        self._region = region
        self._pool = pool
        self._frames = frames
        self._lock = threading.Lock()

    def run(self, depth: int, *, writes_only: bool = False) -> float:
        """Seconds for one transfer of each page, every other one a read; `depth` at once for each path."""
        left = iter(range(self._frames))
        started = perf_counter()
        threads = depth * len(self._disk.paths)
        for future in [self._pool.submit(self._work, left, index, writes_only) for index in range(threads)]:
            future.result()
        return perf_counter() - started

    def _work(self, left: Iterator[int], index: int, writes_only: bool) -> None:
        page_size = self._disk.page_size
        buffer = self._region.memory[index * page_size : (index + 1) * page_size]
        while True:
            with self._lock:
                frame = next(left, None)
            if frame is None:
                return
            if writes_only or frame // len(self._disk.paths) % 2:
                self._disk.write(frame, 0, [buffer])
            else:
                self._disk.read(frame, 0, [buffer])
