"""Rates of one rank's arithmetic and copies in memory, for `lightning-ptm probe`, measured with a run's own operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptm.memory.backend import Backend, CpuBackend
from lightning_ptm.progress import Begun
from lightning_ptm.trainer.matmul_precision import products_here


def _untold(part: str) -> None:
    """A `Begun` that shows nothing."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Extent of a measurement: sizes, durations and numbers of steps.

    Attributes:
        matrix: rows and columns of matrices on a CPU; on a GPU eight times as many.
        copy_bytes: size of each copy in memory.
        disk_bytes: size of each trial of a disk.
        seconds: duration of each measurement in memory.
        steps: number of steps of each training run for fixed costs.
        begins: called with the name of the next measurement.
    """

    matrix: int
    copy_bytes: int
    disk_bytes: int
    seconds: float
    steps: int
    begins: Begun = _untold

    def side(self, backend: Backend) -> int:
        """Rows and columns of the matrices for a backend."""
        return self.matrix * (8 if backend.has_own_memory else 1)


def matrix_rate(backend: Backend, dtype: str, effort: Effort) -> float:
    """Operations per second of large matrix multiplications in training: one forward, two backward."""
    effort.begins(f"matrices of {dtype}")
    side, device = effort.side(backend), backend.device
    left, right = (torch.randn(side, side, device=device).to(getattr(torch, dtype)).requires_grad_() for _ in range(2))
    gradient = torch.randn(side, side, device=device).to(left.dtype)

    def multiply() -> None:
        with products_here(left.dtype, backend):
            torch.autograd.grad(torch.mm(left, right), (left, right), gradient)

    return 6 * side**3 / _typical(multiply, backend, effort.seconds)


def product_rate(dtype: str, effort: Effort) -> float:
    """Operations per second of large matrix multiplications in updates on the CPU: in the optimizer's dtype, whether or not
    the processor has arithmetic for it."""
    effort.begins(f"products of updates in {dtype}")
    backend = CpuBackend()
    left, right = (torch.randn(effort.matrix, effort.matrix).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * effort.matrix**3 / _typical(lambda: torch.mm(left, right), backend, effort.seconds)


def attention_rate(backend: Backend, dtype: str, effort: Effort) -> float:
    """Operations per second of attention, forward and backward; a backward counts as two forwards."""
    effort.begins(f"attention in {dtype}")
    shape = (max(1, effort.matrix // 128), 8, 256, 64)
    heads = torch.randn(shape, device=backend.device).to(getattr(torch, dtype)).requires_grad_()
    gradient = torch.randn(shape, device=backend.device).to(heads.dtype)

    def attend() -> None:
        with products_here(heads.dtype, backend):
            torch.autograd.grad(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), heads, gradient)

    return 3 * 4 * heads.numel() * shape[2] / _typical(attend, backend, effort.seconds)


def curved_rate(backend: Backend, dtype: str, effort: Effort) -> float:
    """Elements per second of an exponential function (GELU), forward and backward; a backward counts as two forwards."""
    effort.begins(f"GELU in {dtype}")
    shape = (effort.matrix, 2 * effort.matrix)
    values = torch.randn(shape, device=backend.device).to(getattr(torch, dtype)).requires_grad_()
    gradient = torch.randn(shape, device=backend.device).to(values.dtype)

    def curve() -> None:
        torch.autograd.grad(F.gelu(values, approximate="tanh"), values, gradient)

    return 3 * values.numel() / _typical(curve, backend, effort.seconds)


def ram_rate(threads: int, effort: Effort) -> float:
    """Bytes per second of a copy in RAM by as many threads as all ranks of the node have."""
    of_a_rank = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return copy_rate(CpuBackend(), CpuBackend(), effort)
    finally:
        torch.set_num_threads(of_a_rank)


def copy_rate(source: Backend, target: Backend, effort: Effort) -> float:
    """Bytes per second of a large copy; RAM is page-locked if the other side is a GPU."""
    effort.begins(f"copies from {source.device} to {target.device}")
    pinned = source.has_own_memory != target.has_own_memory

    def made(side: Backend) -> Tensor:
        pin = pinned and not side.has_own_memory
        return torch.zeros(effort.copy_bytes, dtype=torch.uint8, device=side.device, pin_memory=pin)

    read, written = made(source), made(target)
    timed = source if source.has_own_memory else target
    return effort.copy_bytes / _typical(lambda: written.copy_(read, non_blocking=True), timed, effort.seconds)


def _typical(work: Callable[[], object], backend: Backend, seconds: float) -> float:
    """The median duration of as many calls as take `seconds`, after a warm-up; at least three unless they are slow. The
    minimum would not be typical of a long run."""
    found: list[float] = []
    began = perf_counter()
    while True:
        started = perf_counter()
        work()
        backend.synchronize()
        now = perf_counter()
        found.append(now - started)
        if now - began > seconds and (len(found) > 3 or found[-1] > seconds):
            return median(found[1:] or found)
