"""Pages over device, host and disk, and the Allocator that owns them (the paper's sections 4.1 and 5)."""

from __future__ import annotations

from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.codes import CodedTensor
from lightning_ptm.memory.disk import DiskRegion, FileOps, check_folders, make_folders
from lightning_ptm.memory.links import Link, LinkStats
from lightning_ptm.memory.paged import PagedTensor, PageSpan
from lightning_ptm.memory.pool import PagePool
from lightning_ptm.memory.states import PageEvent, PageTable
from lightning_ptm.memory.transfer import Transfer

__all__ = [
    "Allocator",
    "CodedTensor",
    "DiskRegion",
    "FileOps",
    "Link",
    "LinkStats",
    "PageEvent",
    "PagePool",
    "PageSpan",
    "PageTable",
    "PagedTensor",
    "Transfer",
    "check_folders",
    "make_folders",
]
