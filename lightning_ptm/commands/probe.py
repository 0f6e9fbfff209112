"""`lightning-ptm probe --disk /my/disk > mine.yaml`: measures this machine and writes a hardware file for `plan`.

Measures what is free now, with the operations of a run: torch's matrix multiplication, copies of tensors, and the disk tier's
own file (O_DIRECT, threads). Owns an unnamed file in the folder of `--disk`, which disappears with the process, and buffers.
Launched on several ranks (torchrun), rank 0 measures what its node shares while the others wait; then all ranks measure
simultaneously what each has for itself, of which the slowest counts, and collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ptm.commands.collectives import Launch, Ranks, Rate, Rates, launched
from lightning_ptm.commands.compute_rates import Effort, copy_rate, ram_rate
from lightning_ptm.commands.rank_rates import PARTS, RankRates, rank_rates, sample_size, slowest
from lightning_ptm.commands.sample import sample_works
from lightning_ptm.config import DEFAULT_PAGE_BYTES, format_bytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import Backend, backend_here
from lightning_ptm.memory.disk import DiskRegion, check_folders
from lightning_ptm.memory.page_rates import SATURATED, copy_rates, smallest_saturating, transfer
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.machine.machine import this_machine

_BLOCKS = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
_DEPTHS = (1, 4, 8)


FULL = Effort(matrix=1024, copy_bytes=256 << 20, disk_bytes=256 << 20, seconds=0.5, steps=100)
QUICK = Effort(matrix=512, copy_bytes=32 << 20, disk_bytes=16 << 20, seconds=0.02, steps=10)


@dataclass(frozen=True, slots=True)
class DiskTrial:
    """Rates of one path with transfers of `block_bytes`, `depth` at once."""

    path: Path
    block_bytes: int
    depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float


def launched_measure(paths: Sequence[Path], *, quick: bool) -> str | None:
    """The output of `probe`, with these folders for the disk tier; None on ranks other than 0. Raises as `measure`."""
    return _measured(paths, QUICK if quick else FULL, launched())


def measured(paths: Sequence[Path], launch: Launch | None) -> str | None:
    """The output of `probe --quick` for connected ranks; None on ranks other than 0. Collective. Raises as `measure`.

    Args:
        launch: None: there are no other ranks.
    """
    return _measured(paths, QUICK, launch)


def _measured(paths: Sequence[Path], effort: Effort, launch: Launch | None) -> str | None:
    if launch is None:
        return _watched(paths, effort)
    with Ranks(launch) as ranks, _fp32_by_default():
        if launch.rank == 0:
            return _watched(paths, effort, ranks)
        _of_ranks(backend_here(), paths, effort, ranks)
        ranks.follow()
    return None


def quick_measure(paths: Sequence[Path]) -> str:
    """The output of `probe --quick` for this process's machine, with these folders for the disk tier. Raises as `measure`."""
    return _watched(paths, QUICK)


@contextmanager
def _fp32_by_default() -> Iterator[None]:
    """Makes tensors without a dtype fp32 inside the block, whatever torch's default is in the caller's process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _watched(paths: Sequence[Path], effort: Effort, ranks: Ranks | None = None) -> str:
    """`measure`, with a progress bar on a terminal."""
    with Progress().parts("probe", _parts(paths, ranks)) as begins, _fp32_by_default():
        return measure(paths, dataclasses.replace(effort, begins=begins), ranks)


def _parts(paths: Sequence[Path], ranks: Ranks | None) -> int:
    """Number of parts that `measure` begins."""
    backend = backend_here()
    peers = ranks is None and backend.count() > 1
    on_disk = len(paths) * (len(_BLOCKS) + 1)
    copies = 1 + 3 * backend.has_own_memory + peers
    return on_disk + copies + PARTS + (ranks is not None)


def _of_ranks(backend: Backend, paths: Sequence[Path], effort: Effort, launched_ranks: Ranks | None) -> RankRates:
    """Rates of each rank's own resources. With several ranks collective: all measure simultaneously; the slowest counts."""
    count = max(1, backend.count()) if launched_ranks is None else launched_ranks.launch.ranks_per_node
    cores = max(1, this_machine(backend, (), count).cores // 2 // count)
    if launched_ranks is None:
        return rank_rates(backend, paths, effort, cores)
    return slowest(launched_ranks.at_once(lambda effort: rank_rates(backend, paths, effort, cores), effort))


def measure(paths: Sequence[Path], effort: Effort, launched_ranks: Ranks | None = None) -> str:
    """The text of a hardware file for this machine.

    Args:
        launched_ranks: the ranks that measure, of which this is rank 0; None: this process alone.

    Raises:
        RankError: another rank has failed.
        ConfigError: a path is not a folder, or has too little room.
        PageIOError: a transfer failed.
    """
    check_folders(paths)
    backend = backend_here()
    computes_on = backend.description()
    ranks = max(1, backend.count())
    if launched_ranks is not None:
        ranks = launched_ranks.launch.ranks_per_node
    machine = this_machine(backend, paths, ranks)
    needed = max(effort.disk_bytes, max(_BLOCKS) * max(_DEPTHS))
    if paths and machine.free_disk_bytes < 2 * needed * len(paths):
        raise ConfigError(
            f"the disk of {paths[0]} has {format_bytes(machine.free_disk_bytes)} free, and probing takes "
            f"{format_bytes(needed)} a path; make room, or leave --disk out"
        )
    trials = [trial for path in paths for trial in disk_trials(path, effort)]
    read = _together(trials, "read_bytes_per_s")
    write = _together(trials, "write_bytes_per_s")
    threads = torch.get_num_threads() * (1 if launched_ranks is None else ranks)
    ram = ram_rate(threads, effort)
    per_core = min((core_rate(path, trials, effort) for path in paths), default=None)
    page = smallest_saturating(_by_page(trials, backend))
    own = _of_ranks(backend, paths, effort, launched_ranks)
    rates = Rates()
    if launched_ranks is not None:
        effort.begins("collectives")
        rates = launched_ranks.measure(page or DEFAULT_PAGE_BYTES, effort.copy_bytes // 4, effort.seconds, effort.steps)
        intra, between = _value(rates.in_node), _of(rates.in_node)
    else:
        peers = backend.has_own_memory and ranks > 1
        intra = copy_rate(backend_here(0), backend_here(1), effort) if peers else None
        between = "a copy between two devices, which collectives do not exceed"
    copies, updates, fixed = own.copies, own.updates, own.fixed
    memory = 2 * ram / ranks if copies is None else 2 * copies.within
    efficiency = own.efficiency(sample_works(*sample_size(backend, effort)), memory)
    streams = 1 if launched_ranks is None else ranks
    stream = updates.stream_bytes_per_s and streams * updates.stream_bytes_per_s
    least = "" if launched_ranks is None else ", the least of all ranks"
    rows = [
        "# Measured by `lightning-ptm probe`; sizes in bytes, rates per second. What ranks share is given for a node.",
        f"device: {backend.name}",
        f"ranks_per_node: {ranks}            # {'devices that torch sees' if launched_ranks is None else 'launched'}",
        f"device_memory: {own.free_device_bytes}  # free now{least}",
        f"host_memory: {own.free_host_bytes}  # free now, within this process's limits{least}",
        f"disk_memory: {machine.free_disk_bytes}  # free now",
        f"cpu_cores: {machine.cores}",
        f"compute_flops_per_s:         # forward and backward, {effort.side(backend)} rows and columns, {computes_on}",
        *(f"  {dtype}: {rate:.4g}" for dtype, rate in own.matrix_flops.items()),
        f"compute_efficiency: {efficiency:.3f}    # share of all these rates that a small GPT's forward and backward reach",
        _rate(
            "device_memory_bytes_per_s",
            None if copies is None else 2 * copies.within,
            "a copy on the device: read and written",
            "no device",
        ),
        _rate("host_memory_bytes_per_s", 2 * ram, f"a copy by {threads} threads: read and written", ""),
        _rate(
            "host_to_device_bytes_per_s",
            None if copies is None else copies.to_device,
            "from page-locked memory",
            "no device",
        ),
        _rate(
            "device_to_host_bytes_per_s",
            None if copies is None else copies.to_host,
            "to page-locked memory",
            "no device",
        ),
        _rate("disk_read_bytes_per_s", read, "the best of the trials below", "no --disk"),
        _rate("disk_write_bytes_per_s", write, "the best of the trials below", "no --disk"),
        _rate("intra_node_bytes_per_s", intra, between, "one rank"),
        _rate("inter_node_bytes_per_s", _value(rates.of_all), _of(rates.of_all), "not measured: no other node"),
        _rate(
            "tensor_exchange_bytes_per_s",
            None if rates.sums is None else rates.sums.bytes_per_s,
            "sums of activations among the ranks",
            "not measured",
        ),
        _rate("collective_s", _least_s(rates), "a gather of next to nothing", "one rank"),
        _rate(
            "tensor_exchange_s",
            None if rates.sums is None else rates.sums.least_s,
            "such a sum, in a step",
            "not measured",
        ),
        _rate("round_s", rates.round_s, "a round in which ranks agree", "one rank"),
        "attention_flops_per_s:       # 64 heads of 256 x 64 with a causal mask, all of it counted",
        *(f"  {dtype}: {rate:.4g}" for dtype, rate in own.attention_flops.items()),
        "curved_numel_per_s:          # GELU in its tanh form",
        *(f"  {dtype}: {rate:.4g}" for dtype, rate in own.curved_numel.items()),
        _rate("update_bytes_per_s", updates.ram_bytes_per_s, "fused AdamW on the CPU, 28 bytes of an element", ""),
        _rate(
            "disk_update_bytes_per_s", updates.disk_bytes_per_s, "the same, concurrent with its transfers", "no --disk"
        ),
        f"chunk_s: {updates.chunk_s:.4g}  # per chunk of updates, apart from its arithmetic and transfers",
        _rate(
            "beside_update_bytes_per_s", updates.beside_bytes_per_s, "the same, in a thread concurrent with compute", ""
        ),
        f"beside_loss: {updates.beside_loss:.3f}  # seconds that compute loses to each second of that",
        f"learn_numel_per_s: {updates.learn_numel_per_s:.4g}  # what learning a weight prediction adds to that",
        f"prediction_numel_per_s: {updates.prediction_numel_per_s:.4g}  # adding a weight prediction to parameters",
        "states_numel_per_s:          # optimizer states decoded and encoded again, by optimizer_state_dtype",
        *(f"  {word}: {rate:.4g}" for word, rate in updates.states_numel_per_s.items()),
        "update_flops_per_s:          # matrix products of updates on the CPU, such as Muon's",
        *(f"  {dtype}: {rate:.4g}" for dtype, rate in own.product_flops.items()),
        _rate(
            "disk_both_bytes_per_s",
            stream,
            "what updates read and write, while they do",
            "no --disk",
        ),
        _rate("disk_bytes_per_core_s", per_core, "the same bytes by the processor's time that they took", "no --disk"),
        _rate(
            "collective_bytes_per_core_s",
            None if backend.has_own_memory else _per_core(rates),
            "what a rank receives, by the processor's time that it took",
            "none of the cores that compute" if backend.has_own_memory else "one rank",
        ),
        f"unit_s: {fixed.unit_s:.4g}  # a forward or backward of a unit of next to no size",
        f"step_s: {fixed.step_s:.4g}  # a step without units",
        "cpu_threads: null  # not those that compute"
        if backend.has_own_memory
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


def _least_s(rates: Rates) -> float | None:
    """Latency of a collective among as many ranks as there are."""
    slowest_of = rates.of_all or rates.in_node
    return None if slowest_of is None else slowest_of.least_s


def _per_core(rates: Rates) -> float | None:
    """Bytes of collectives among as many ranks as there are, per second of a core."""
    slowest_of = rates.of_all or rates.in_node
    return None if slowest_of is None else slowest_of.bytes_per_core_s


def _value(rate: Rate | None) -> float | None:
    return None if rate is None else rate.bytes_per_s


def _of(rate: Rate | None) -> str:
    """A description of how a rate of collectives was measured."""
    if rate is None:
        return ""
    return (
        f"two all-gathers ({rate.gather_bytes_per_s / 1e9:.3g} GB/s) and a reduce-scatter "
        f"({rate.reduce_bytes_per_s / 1e9:.3g}) of {rate.ranks} ranks, {format_bytes(rate.page_bytes)} of each at once: "
        f"what a rank receives"
    )


def disk_trials(path: Path, effort: Effort) -> list[DiskTrial]:
    """Reads and writes on one path, for several transfer sizes and queue depths; writes come first."""
    found = []
    with ThreadPoolExecutor(max(_DEPTHS)) as pool:
        for block in _BLOCKS:
            effort.begins(f"{path}: {format_bytes(block)}")
            frames = max(max(_DEPTHS), effort.disk_bytes // block)
            region = HostRegion(max(_DEPTHS) * block)
            disk: DiskRegion | None = None
            try:
                disk = DiskRegion([path], page_size=block, total_frames=frames)
                transfer(disk, region, pool, frames, max(_DEPTHS), write=True)  # allocated blocks are written faster
                for depth in _DEPTHS:
                    write = transfer(disk, region, pool, frames, depth, write=True)
                    read = transfer(disk, region, pool, frames, depth, write=False)
                    found.append(DiskTrial(path, block, depth, block / read, block / write))
            finally:
                if disk is not None:
                    disk.close()
                region.close()
    return found


def core_rate(path: Path, trials: Sequence[DiskTrial], effort: Effort) -> float:
    """Bytes per second of one core, from the processor time of transfers of the size and depth that read fastest."""
    effort.begins(f"{path}: reads and writes together")
    best = max((trial for trial in trials if trial.path == path), key=lambda trial: trial.read_bytes_per_s)
    block, depth = best.block_bytes, max(2, best.depth)
    frames = max(depth, effort.disk_bytes // block)
    core_s: list[float] = []
    with ThreadPoolExecutor(depth) as pool, ExitStack() as ends:
        region = HostRegion(depth * block)
        ends.callback(region.close)
        disk = DiskRegion([path], page_size=block, total_frames=frames)
        ends.callback(disk.close)
        transfer(disk, region, pool, frames, depth, write=True)
        transfer(disk, region, pool, frames, depth, write=None, core_s=core_s)
    return frames * block / max(sum(core_s), 1e-6)


def _together(trials: Sequence[DiskTrial], field: str) -> float | None:
    """The rate of all paths together; pages are striped, so the slowest path bounds each."""
    best: dict[Path, float] = {}
    for trial in trials:
        best[trial.path] = max(best.get(trial.path, 0.0), getattr(trial, field))
    return min(best.values()) * len(best) if best else None


def _by_page(trials: Sequence[DiskTrial], backend: Backend) -> dict[str, dict[int, float]]:
    """The best rate of each link by page size."""
    found: dict[str, dict[int, float]] = {}
    for trial in trials:
        for name in ("read", "write"):
            rates = found.setdefault(f"{name} {trial.path}", {})
            rate: float = getattr(trial, f"{name}_bytes_per_s")
            rates[trial.block_bytes] = max(rate, rates.get(trial.block_bytes, 0.0))
    for block in _BLOCKS:
        for name, rate in copy_rates(backend, block).items():
            found.setdefault(name, {})[block] = rate
    return found


def _rate(name: str, value: float | None, how: str, why_not: str) -> str:
    return f"{name}: null  # {why_not}" if value is None else f"{name}: {value:.4g}  # {how}"
