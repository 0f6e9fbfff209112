"""Plain training beside a run: how products of 16-bit tensors are computed on this machine, as a run computes them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.trainer.matmul_precision import products_here


def products_of(precision: str) -> AbstractContextManager[None]:
    """Inside, plain code computes products as a run of `precision` does."""
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(precision.split("-")[0], torch.float32)
    return products_here(dtype, CpuBackend())
