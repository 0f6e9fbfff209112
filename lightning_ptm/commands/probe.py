"""`lightning-ptm probe --disk /my/disk > mine.yaml`: measures this machine and writes the hardware file that `plan` takes.

Measures what is free now, by what a run would use: torch's matrix multiplication, copies of tensors, and the disk tier's own
file (O_DIRECT, threads). Owns a file in the folder of `--disk`, which has no name and goes with the process, and buffers.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_ptm.commands.hardware import DTYPES
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory import check_folders
from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.runtime.machine import this_machine

_BLOCKS = (1 << 20, 4 << 20, 16 << 20)
_DEPTHS = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        matrix: rows and columns on a CPU; on a device four times as many.
        copy_bytes: of each copy in memory.
        disk_bytes: of each trial of a disk.
        seconds: of each measurement in memory.
    """

    matrix: int
    copy_bytes: int
    disk_bytes: int
    seconds: float


FULL = Effort(matrix=2048, copy_bytes=256 << 20, disk_bytes=256 << 20, seconds=0.5)
QUICK = Effort(matrix=512, copy_bytes=32 << 20, disk_bytes=16 << 20, seconds=0.02)


@dataclass(frozen=True, slots=True)
class DiskTrial:
    """Rates of one path with transfers of one size, so many at once."""

    path: Path
    block_bytes: int
    depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float


def probe(disk: str | list[str] | None = None, quick: bool = False) -> None:
    """Measure this machine and print a hardware file for `lightning-ptm plan --hardware`.

    Run it while nothing else does. Networks are not measured: add inter_node_bytes_per_s by hand to plan for several nodes.

    Args:
        disk: folder for the disk tier, or a list of several; without one the machine counts as one without a disk.
        quick: smaller trials: a second instead of some, and less exact.
    """
    paths = [disk] if isinstance(disk, str) else disk or []
    print(measure(tuple(map(Path, paths)), QUICK if quick else FULL))


def measure(paths: Sequence[Path], effort: Effort) -> str:
    """The text of a hardware file for this machine.

    Raises:
        ConfigError: a path is no folder, or has too little room.
        PageIOError: a transfer failed.
    """
    check_folders(paths)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
    machine = this_machine(device, paths, ranks)
    needed = max(effort.disk_bytes, max(_BLOCKS) * max(_DEPTHS))
    if paths and machine.free_disk_bytes < 2 * needed * len(paths):
        raise ConfigError(
            f"the disk of {paths[0]} has {format_bytes(machine.free_disk_bytes)} free, and probing takes "
            f"{format_bytes(needed)} a path; make room, or leave --disk out"
        )
    trials = [trial for path in paths for trial in disk_trials(path, effort)]
    read = _together(trials, "read_bytes_per_s")
    write = _together(trials, "write_bytes_per_s")
    ram = copy_rate(torch.device("cpu"), torch.device("cpu"), effort)
    cuda = device.type == "cuda"
    here = copy_rate(device, device, effort) if cuda else None
    to_device = copy_rate(torch.device("cpu"), device, effort) if cuda else None
    to_host = copy_rate(device, torch.device("cpu"), effort) if cuda else None
    peers = copy_rate(torch.device("cuda:0"), torch.device("cuda:1"), effort) if ranks > 1 else None
    rows = [
        "# Measured by `lightning-ptm probe`; sizes in bytes, rates per second. What ranks share is given for a node.",
        f"device: {device.type}",
        f"ranks_per_node: {ranks}            # devices that torch sees",
        f"device_memory: {machine.free_device_bytes}  # free now",
        f"host_memory: {machine.free_host_bytes}  # free now, within this process's limits",
        f"disk_memory: {machine.free_disk_bytes}  # free now",
        f"cpu_cores: {machine.cores}",
        f"compute_flops_per_s:         # square matrices of {_side(device, effort)} rows, on {_name(device)}",
        *(f"  {dtype}: {matrix_rate(device, dtype, effort):.4g}" for dtype in DTYPES),
        "compute_efficiency: 1        # the rates are measured; layers that are no matrix multiplications make it less",
        _rate("device_memory_bytes_per_s", here and 2 * here, "a copy on the device: read and written", "no device"),
        _rate("host_memory_bytes_per_s", 2 * ram, f"a copy by {torch.get_num_threads()} threads: read and written", ""),
        _rate("host_to_device_bytes_per_s", to_device, "from page-locked memory", "no device"),
        _rate("device_to_host_bytes_per_s", to_host, "to page-locked memory", "no device"),
        _rate("disk_read_bytes_per_s", read, "the best of the trials below", "no --disk"),
        _rate("disk_write_bytes_per_s", write, "the best of the trials below", "no --disk"),
        _rate(
            "intra_node_bytes_per_s", peers, "a copy between two devices, which collectives do not exceed", "one rank"
        ),
        _rate("inter_node_bytes_per_s", None, "", "not measured"),
    ]
    for trial in trials:
        rows.append(
            f"# {trial.path}: {format_bytes(trial.block_bytes)}, {trial.depth} at once: "
            f"read {trial.read_bytes_per_s / 1e9:.3g}, write {trial.write_bytes_per_s / 1e9:.3g} GB/s"
        )
    return "\n".join(rows)


def matrix_rate(device: torch.device, dtype: str, effort: Effort) -> float:
    """Operations per second of a large matrix multiplication."""
    side = _side(device, effort)
    left = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)
    out = torch.empty_like(left)
    return 2 * side**3 / _fastest(lambda: torch.mm(left, left, out=out), device, effort.seconds)


def copy_rate(source: torch.device, target: torch.device, effort: Effort) -> float:
    """Bytes per second of a large copy; a CPU side is page-locked where the other is a device."""
    pinned = source.type != target.type

    def made(device: torch.device) -> Tensor:
        pin = pinned and device.type == "cpu"
        return torch.zeros(effort.copy_bytes, dtype=torch.uint8, device=device, pin_memory=pin)

    read, written = made(source), made(target)
    timed = source if source.type == "cuda" else target
    return effort.copy_bytes / _fastest(lambda: written.copy_(read, non_blocking=True), timed, effort.seconds)


def disk_trials(path: Path, effort: Effort) -> list[DiskTrial]:
    """Reads and writes of one path, for several sizes of transfers and numbers of them at once; writes come first."""
    found = []
    with ThreadPoolExecutor(max(_DEPTHS)) as pool:
        for block in _BLOCKS:
            frames = max(max(_DEPTHS), effort.disk_bytes // block)
            region = HostRegion(max(_DEPTHS) * block)
            disk: DiskRegion | None = None
            try:
                disk = DiskRegion([path], page_size=block, total_frames=frames)
                _transfer(disk, region, pool, frames, max(_DEPTHS), write=True)  # blocks that exist are written faster
                for depth in _DEPTHS:
                    write = _transfer(disk, region, pool, frames, depth, write=True)
                    read = _transfer(disk, region, pool, frames, depth, write=False)
                    found.append(DiskTrial(path, block, depth, frames * block / read, frames * block / write))
            finally:
                if disk is not None:
                    disk.close()
                region.close()
    return found


def _transfer(
    disk: DiskRegion, region: HostRegion, pool: ThreadPoolExecutor, frames: int, depth: int, *, write: bool
) -> float:
    """Seconds for one transfer of each frame, `depth` at once."""

    def work(thread: int) -> None:
        buffer = region.memory[thread * disk.page_size : (thread + 1) * disk.page_size]
        for frame in range(thread, frames, depth):
            if write:
                disk.write(frame, 0, [buffer])
            else:
                disk.read(frame, 0, [buffer])

    started = time.perf_counter()
    for future in [pool.submit(work, thread) for thread in range(depth)]:
        future.result()
    return time.perf_counter() - started


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of as many calls as take `seconds`, three at least, after one that warms up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    best, began = float("inf"), time.perf_counter()
    for count in itertools.count(1):
        started = time.perf_counter()
        work()
        wait()
        now = time.perf_counter()
        best = min(best, now - started)
        if count >= 3 and now - began > seconds:
            return best
    raise AssertionError


def _together(trials: Sequence[DiskTrial], field: str) -> float | None:
    """Pages are striped, so the slowest path bounds each."""
    best: dict[Path, float] = {}
    for trial in trials:
        best[trial.path] = max(best.get(trial.path, 0.0), getattr(trial, field))
    return min(best.values()) * len(best) if best else None


def _side(device: torch.device, effort: Effort) -> int:
    return effort.matrix * (4 if device.type == "cuda" else 1)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def _rate(name: str, value: float | None, how: str, why_not: str) -> str:
    return f"{name}: null  # {why_not}" if value is None else f"{name}: {value:.4g}  # {how}"
