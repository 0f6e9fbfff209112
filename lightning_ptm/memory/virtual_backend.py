"""A device without memory: tensors over its regions have shapes and no values, and copies between them move nothing.

Owns nothing. With it, the allocator and everything above it run as they do in a run, on page tables alone: a virtual run
(runtime/engine/virtual_run.py) predicts by it how many pages a run takes.

I1: no byte of memory or disk is touched: every tier, also one on disk, has pages that hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.region import HostRegion, Region


@dataclass(frozen=True, slots=True)
class VirtualBackend(CpuBackend):
    """The device of a virtual run. Its work has ended when a call returns, as a CPU's."""

    name: ClassVar[str] = "virtual"
    has_bytes: ClassVar[bool] = False

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        return HostRegion(size_bytes, has_bytes=False)

    def device_region(self, size_bytes: int) -> Region:
        return HostRegion(size_bytes, has_bytes=False)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta
