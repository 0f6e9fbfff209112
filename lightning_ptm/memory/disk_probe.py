"""Measures how many transfers of one disk path should run concurrently, when the disk tier is large enough to matter.

Runs once, on pages without contents. Knows the disk's files; owns its buffers and threads while it runs.
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
"""Threads per path without a measurement: one transfer is prepared while the other runs."""
_DEPTHS = (4, 8)
"""Numbers of threads to try. Two come close to four on an idle machine; during an update: 4.5 against 5.3 GB/s."""
_LEAST_BYTES = 1 << 30
"""Tiers below this are not measured: their transfers are short at any depth."""
_TRIAL_BYTES = 96 << 20
_ROUNDS = 2
_WORTH = 1.05
"""Factor by which more threads must be faster to be chosen: each takes staging memory and CPU time."""


def threads_per_path(disk: DiskRegion) -> int:
    """Returns the number of threads per path at which a mix of half reads and half writes of pages is fastest.

    Takes some tenths of a second. Returns DEFAULT_THREADS without a measurement if the tier has less than a gigabyte,
    or if the pages are so large that a measurement would take long.

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
            trial.run(max(depths), writes_only=True)  # blocks never written would read as zeros without disk access
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
    """Timed transfers of the pages 0 to `frames` - 1 by a pool of threads."""

    def __init__(self, disk: DiskRegion, region: HostRegion, pool: ThreadPoolExecutor, frames: int) -> None:
        self._disk = disk
        self._region = region
        self._pool = pool
        self._frames = frames
        self._lock = threading.Lock()

    def run(self, depth: int, *, writes_only: bool = False) -> float:
        """Returns the seconds for one transfer of each page, alternately reads and writes, `depth` at once per path."""
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
                self._disk.write(frame * page_size, [buffer])
            else:
                self._disk.read(frame * page_size, [buffer])
