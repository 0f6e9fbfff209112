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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptm.commands.fixed_costs import fixed_costs
from lightning_ptm.commands.hardware import DTYPES
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory import check_folders
from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.page_rates import SATURATED, copy_rates, smallest_saturating, transfer
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.runtime.machine import this_machine

_BLOCKS = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
_DEPTHS = (1, 4, 8)
_UPDATE_NUMEL = 1 << 20
"""Elements of one optimizer call (update/updater.py: BLOCK_NUMEL)."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        matrix: rows and columns on a CPU; on a device eight times as many.
        copy_bytes: of each copy in memory.
        disk_bytes: of each trial of a disk.
        seconds: of each measurement in memory.
        steps: of each training run for fixed costs.
    """

    matrix: int
    copy_bytes: int
    disk_bytes: int
    seconds: float
    steps: int


FULL = Effort(matrix=1024, copy_bytes=256 << 20, disk_bytes=256 << 20, seconds=0.5, steps=100)
QUICK = Effort(matrix=512, copy_bytes=32 << 20, disk_bytes=16 << 20, seconds=0.02, steps=10)


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
    together = [both_ways(path, trials, effort) for path in paths]
    both = sum(found.bytes_per_s for found in together) if together else None
    per_core = min(found.bytes_per_core_s for found in together) if together else None
    cuda = device.type == "cuda"
    page = smallest_saturating(_by_page(trials, device))
    fixed = fixed_costs(device, effort.steps)
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
        "attention_flops_per_s:       # 64 heads of 256 x 64 with a causal mask, all of it counted",
        *(f"  {dtype}: {attention_rate(device, dtype, effort):.4g}" for dtype in DTYPES),
        "curved_numel_per_s:          # GELU in its tanh form",
        *(f"  {dtype}: {curved_rate(device, dtype, effort):.4g}" for dtype in DTYPES),
        _rate("update_bytes_per_s", update_rate(effort), "fused AdamW on the CPU, 28 bytes of an element", ""),
        _rate("disk_both_bytes_per_s", both, "half of the transfers read, the others write", "no --disk"),
        _rate("disk_bytes_per_core_s", per_core, "the same bytes by the processor's time that they took", "no --disk"),
        f"unit_s: {fixed.unit_s:.4g}  # a forward or backward of a unit of next to no size",
        f"step_s: {fixed.step_s:.4g}  # a step without units",
        "cpu_threads: null  # not those that compute"
        if cuda
        else f"cpu_threads: {torch.get_num_threads()}  # that computed; OMP_NUM_THREADS sets it",
        "page_size: null  # no link to choose it for"
        if page is None
        else f"page_size: {page}  # the smallest with which every link reaches {SATURATED:.0%} of its best",
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


@torch.no_grad()
def attention_rate(device: torch.device, dtype: str, effort: Effort) -> float:
    """Operations per second of attention, forward."""
    shape = (max(1, effort.matrix // 128), 8, 256, 64)
    heads = torch.ones(shape, dtype=getattr(torch, dtype), device=device)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    return 4 * heads.numel() * shape[2] / _fastest(attend, device, effort.seconds)


def curved_rate(device: torch.device, dtype: str, effort: Effort) -> float:
    """Elements per second of an exponential function."""
    values = torch.ones(effort.matrix, effort.matrix, dtype=getattr(torch, dtype), device=device)
    return values.numel() / _fastest(lambda: F.gelu(values, approximate="tanh"), device, effort.seconds)


def update_rate(effort: Effort) -> float:
    """Bytes per second of optimizer arithmetic over memory that no cache holds: a 16-bit gradient is read, three fp32
    numbers are read and written, a 16-bit copy is written."""
    blocks = max(2, effort.copy_bytes // (16 * _UPDATE_NUMEL))
    masters = [torch.zeros(_UPDATE_NUMEL) for _ in range(blocks)]
    gradients = [torch.zeros(_UPDATE_NUMEL, dtype=torch.bfloat16) for _ in range(blocks)]
    optimizers = [torch.optim.AdamW([master], lr=1e-6, fused=True) for master in masters]

    def update() -> None:
        for master, gradient, optimizer in zip(masters, gradients, optimizers, strict=True):
            master.grad = gradient.float()
            optimizer.step()
            gradient.copy_(master)
            master.grad = None

    for master in masters:
        master.requires_grad_()
    with torch.no_grad():
        return 28 * _UPDATE_NUMEL * blocks / _fastest(update, torch.device("cpu"), effort.seconds)


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
                transfer(disk, region, pool, frames, max(_DEPTHS), write=True)  # blocks that exist are written faster
                for depth in _DEPTHS:
                    write = transfer(disk, region, pool, frames, depth, write=True)
                    read = transfer(disk, region, pool, frames, depth, write=False)
                    found.append(DiskTrial(path, block, depth, block / read, block / write))
            finally:
                if disk is not None:
                    disk.close()
                region.close()
    return found


@dataclass(frozen=True, slots=True)
class BothWays:
    """Reads and writes of one path together: by the clock, and by the time of the processor."""

    bytes_per_s: float
    bytes_per_core_s: float


def both_ways(path: Path, trials: Sequence[DiskTrial], effort: Effort) -> BothWays:
    """Reads and writes together, with the transfers that read fastest."""
    best = max((trial for trial in trials if trial.path == path), key=lambda trial: trial.read_bytes_per_s)
    block, depth = best.block_bytes, max(2, best.depth)
    frames = max(depth, effort.disk_bytes // block)
    with ThreadPoolExecutor(depth) as pool, ExitStack() as ends:
        region = HostRegion(depth * block)
        ends.callback(region.close)
        disk = DiskRegion([path], page_size=block, total_frames=frames)
        ends.callback(disk.close)
        transfer(disk, region, pool, frames, depth, write=True)
        before_s = time.process_time()
        seconds = transfer(disk, region, pool, frames, depth, write=None)
        core_s = max(time.process_time() - before_s, 1e-6)
        return BothWays(block / seconds, frames * block / core_s)


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of as many calls as take `seconds`, after one that warms up; three at least, if they are not
    slow."""

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
        if now - began > seconds and (count >= 3 or best > seconds):
            return best
    raise AssertionError


def _together(trials: Sequence[DiskTrial], field: str) -> float | None:
    """Pages are striped, so the slowest path bounds each."""
    best: dict[Path, float] = {}
    for trial in trials:
        best[trial.path] = max(best.get(trial.path, 0.0), getattr(trial, field))
    return min(best.values()) * len(best) if best else None


def _by_page(trials: Sequence[DiskTrial], device: torch.device) -> dict[str, dict[int, float]]:
    """The best rate of each link by size of a page."""
    found: dict[str, dict[int, float]] = {}
    for trial in trials:
        for name in ("read", "write"):
            rates = found.setdefault(f"{name} {trial.path}", {})
            rate: float = getattr(trial, f"{name}_bytes_per_s")
            rates[trial.block_bytes] = max(rate, rates.get(trial.block_bytes, 0.0))
    if device.type == "cuda":
        for block in _BLOCKS:
            for name, rate in copy_rates(device, block).items():
                found.setdefault(name, {})[block] = rate
    return found


def _side(device: torch.device, effort: Effort) -> int:
    return effort.matrix * (8 if device.type == "cuda" else 1)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def _rate(name: str, value: float | None, how: str, why_not: str) -> str:
    return f"{name}: null  # {why_not}" if value is None else f"{name}: {value:.4g}  # {how}"
