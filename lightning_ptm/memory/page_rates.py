"""Bandwidth of each link by page size, and the smallest page that saturates all links (the paper's sections 4.1 and 6).

Owns, while it measures, a file without a name in each folder, and a buffer. Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import torch

from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.region import HostRegion

SATURATED = 0.9
"""Share of its best bandwidth at which a link counts as saturated."""
_SIZES = (256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
_TRIAL_BYTES = 32 << 20
_TRIAL_S = 0.06
_ROUNDS = 2
_DEPTH = 4
"""Concurrent transfers of a disk, about as many as in a run."""


def smallest_saturating(rates: Mapping[str, Mapping[int, float]]) -> int | None:
    """Returns the smallest page size that saturates every link; None without links.

    If no size saturates all links, returns the size at which the link with the lowest share of its best bandwidth has the
    highest share, the smallest of equal ones.

    Args:
        rates: by link, bytes per second by page size in bytes; the same sizes for all links.
    """
    if not rates:
        return None
    best = {link: max(by_size.values()) for link, by_size in rates.items()}
    sizes = sorted(next(iter(rates.values())))
    shares = {size: min(by_size[size] / best[link] for link, by_size in rates.items()) for size in sizes}
    return next((size for size in sizes if shares[size] >= SATURATED), None) or max(sizes, key=shares.__getitem__)


def measured_rates(paths: Sequence[Path], backend: Backend) -> dict[str, dict[int, float]]:
    """Measures the bandwidth of each link by page size, for `smallest_saturating`.

    Takes a second, and 32 MiB of each path.

    Raises:
        ConfigError: a path cannot be used.
        PageIOError: a path has no room, or a transfer failed.
    """
    found: dict[str, dict[int, float]] = {}
    for path in paths:
        for size in _SIZES:
            for name, rate in _disk_rates(path, size).items():
                found.setdefault(f"{name} {path}", {})[size] = rate
    for size in _SIZES:
        for name, rate in copy_rates(backend, size).items():
            found.setdefault(name, {})[size] = rate
    return found


def _disk_rates(path: Path, size: int) -> dict[str, float]:
    frames = max(_DEPTH, _TRIAL_BYTES // size)
    with ThreadPoolExecutor(_DEPTH) as pool, ExitStack() as ends:
        region = HostRegion(_DEPTH * size)
        ends.callback(region.close)
        disk = DiskRegion([path], page_size=size, total_frames=frames)
        ends.callback(disk.close)
        transfer(disk, region, pool, frames, _DEPTH, write=True)  # the first write of a block is slower
        best = {"write": 0.0, "read": 0.0}
        for name in ("write", "read") * _ROUNDS:
            seconds = transfer(disk, region, pool, frames, _DEPTH, write=name == "write", limit_s=_TRIAL_S)
            best[name] = max(best[name], size / seconds)
        return best


def transfer(
    disk: DiskRegion,
    region: HostRegion,
    pool: ThreadPoolExecutor,
    frames: int,
    depth: int,
    *,
    write: bool | None,
    limit_s: float = float("inf"),
    core_s: list[float] | None = None,
) -> float:
    """Returns the seconds per transfer of a frame, with `depth` transfers at once.

    Args:
        disk: the region.
        region: buffers, one frame for each concurrent transfer.
        pool: threads, at least `depth`.
        frames: number of frames to transfer, in order, until `limit_s` is over.
        depth: concurrent transfers.
        write: True writes, False reads; None: every other thread writes.
        limit_s: seconds after which no transfer starts.
        core_s: list to which each thread's CPU time is appended.
    """
    started = perf_counter()

    def work(thread: int) -> int:
        done = 0
        began_s = time.thread_time()
        buffer = region.memory[thread * disk.page_size : (thread + 1) * disk.page_size]
        for frame in range(thread, frames, depth):
            if write or (write is None and thread % 2):
                disk.write(frame * disk.page_size, [buffer])
            else:
                disk.read(frame * disk.page_size, [buffer])
            done += 1
            if perf_counter() - started > limit_s:
                break
        if core_s is not None:
            core_s.append(time.thread_time() - began_s)
        return done

    count = sum(future.result() for future in [pool.submit(work, thread) for thread in range(depth)])
    return (perf_counter() - started) / count


def copy_rates(backend: Backend, size: int) -> dict[str, float]:
    """Measures copies of one size between page-locked memory and a device, in bytes per second; {} on a CPU."""
    if not backend.has_own_memory:
        return {}
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(size, dtype=torch.uint8, device=backend.device)
    found = {}
    for name, source, target in (("host to device", host, there), ("device to host", there, host)):
        best = 0.0
        for _ in range(_ROUNDS + 1):  # the first warms up
            backend.synchronize()
            started, count = perf_counter(), 0
            while count < 16 or (perf_counter() - started < _TRIAL_S / 2 and count * size < _TRIAL_BYTES):
                target.copy_(source, non_blocking=True)
                count += 1
            backend.synchronize()
            best = max(best, count * size / (perf_counter() - started))
        found[name] = best
    return found
