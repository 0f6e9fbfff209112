"""Free memory of one rank, and its rates while the other ranks of its node are equally busy: arithmetic, copies to and from
its device, updates, and overheads of steps. Ranks of a node share caches, memory and execution units, so all of them measure
simultaneously.

Owns nothing after it has returned. What a node shares as a whole (its disk, its RAM) is measured by probe.py, rates between
ranks by collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from lightning_ptm.commands.collectives import as_if_alone
from lightning_ptm.commands.compute_rates import (
    Effort,
    attention_rate,
    copy_rate,
    curved_rate,
    matrix_rate,
    product_rate,
)
from lightning_ptm.commands.fixed_costs import FixedCosts, fixed_costs
from lightning_ptm.commands.sample import small_gpt, typical_s
from lightning_ptm.commands.update_rates import UpdateRates, update_rates
from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.hardware import DTYPES
from lightning_ptm.forecasting.node import forward_s
from lightning_ptm.memory.backend import Backend, CpuBackend
from lightning_ptm.runtime.machine.machine import free_host_bytes

PARTS = 4 * len(DTYPES) + 3
"""Number of parts that `rank_rates` begins; with a GPU there are three more."""


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """Bytes per second of copies within a GPU, to it and from it."""

    within: float
    to_device: float
    to_host: float


@dataclass(frozen=True, slots=True)
class RankRates:
    """Measured speeds of one rank, per second, for the hardware file.

    Attributes:
        free_device_bytes, free_host_bytes: free memory of its device and RAM of its node.
        copies: copies between RAM and the device; None on a CPU.
        matrix_flops, attention_flops: operations of forward and backward, by dtype.
        curved_numel: elements of exponential functions (as in GELU), by dtype.
        product_flops: operations of matrix products in updates (Muon), by dtype.
        sample_s: seconds of a forward and a backward of a small GPT.
    """

    free_device_bytes: int
    free_host_bytes: int
    fixed: FixedCosts
    copies: DeviceCopies | None
    matrix_flops: dict[str, float]
    attention_flops: dict[str, float]
    curved_numel: dict[str, float]
    product_flops: dict[str, float]
    sample_s: float
    updates: UpdateRates

    def efficiency(self, works: Sequence[UnitWork], memory_bytes_per_s: float) -> float:
        """The share of these rates that a model reaches; at most 1.

        Args:
            works: the units' work in the small GPT (`sample_size`).
        """
        matrix, attention, curved = (
            each["bfloat16"] for each in (self.matrix_flops, self.attention_flops, self.curved_numel)
        )
        planned_s = 3 * sum(forward_s(work, matrix, attention, curved, memory_bytes_per_s) for work in works)
        return min(1.0, planned_s / self.sample_s)


def sample_size(backend: Backend, effort: Effort) -> tuple[int, int]:
    """Width and batch size of the small GPT that is timed."""
    return max(64, effort.side(backend) // 2), max(1, effort.matrix // 256)


def rank_rates(backend: Backend, paths: Sequence[Path], effort: Effort, cores: int) -> RankRates:
    """Measures all rates of this rank.

    Args:
        paths: folders of the disk tier; may be empty.
        cores: number of cores for updates that run concurrently with compute.
    """
    host = CpuBackend()
    free = backend.free_bytes(), free_host_bytes()
    effort.begins("steps of tiny models")
    with as_if_alone():
        fixed = fixed_costs(backend, effort.steps)
    copies = None
    if backend.has_own_memory:
        pairs = ((backend, backend), (host, backend), (backend, host))
        copies = DeviceCopies(*(copy_rate(source, target, effort) for source, target in pairs))
    matrix = {dtype: matrix_rate(backend, dtype, effort) for dtype in DTYPES}
    attention = {dtype: attention_rate(backend, dtype, effort) for dtype in DTYPES}
    curved = {dtype: curved_rate(backend, dtype, effort) for dtype in DTYPES}
    products = {dtype: product_rate(dtype, effort) for dtype in DTYPES}
    effort.begins("a small GPT")
    compute = small_gpt(backend, *sample_size(backend, effort))
    sample_s = typical_s(compute, effort.seconds)
    effort.begins("updates")
    updates = update_rates(paths, effort.copy_bytes // 16, effort.seconds, cores, compute)
    return RankRates(*free, fixed, copies, matrix, attention, curved, products, sample_s, updates)


def slowest(found: Sequence[RankRates]) -> RankRates:
    """The least of free memory and of each rate and the largest of each duration: ranks in step wait for the slowest, and all
    need as much memory."""
    made: RankRates = _slowest(found, "")
    return made


def _slowest(values: Sequence[Any], name: str) -> Any:
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first)]
        return type(first)(**{each: _slowest([getattr(value, each) for value in values], each) for each in names})
    if isinstance(first, dict):
        return {key: _slowest([value[key] for value in values], name) for key in first}
    costs = name == "beside_loss" or (name.endswith("_s") and not name.endswith("_per_s"))
    return None if first is None else max(values) if costs else min(values)
