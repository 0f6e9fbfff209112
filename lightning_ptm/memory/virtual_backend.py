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


class VirtualRegion(HostRegion):
    """A region without memory.

    Args:
        size_bytes: size of `tensor`, which is on the meta device.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(0)
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device="meta")


@dataclass(frozen=True, slots=True)
class VirtualBackend(CpuBackend):
    """The device of a virtual run. Its work has ended when a call returns, as a CPU's."""

    name: ClassVar[str] = "virtual"
    has_bytes: ClassVar[bool] = False

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        return VirtualRegion(size_bytes)

    def device_region(self, size_bytes: int) -> Region:
        return VirtualRegion(size_bytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta
