from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.terms import TIERS

PAGE = 64 * 1024
MakeAllocator = Callable[..., Allocator]


@pytest.fixture(autouse=True, scope="package")
def one_compute_thread() -> Iterator[None]:
    """Tensors are tiny here: handing their loops to a thread pool costs more than running them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_allocator(tmp_path: Path) -> Iterator[MakeAllocator]:
    """Makes allocators with `pages` pages of 64 KiB in each tier of a CPU machine; no thread may outlive the test."""
    made: list[Allocator] = []

    def make(
        pages: int = 16, *, paths: int = 1, files: FileOps | None = None, poison: bool = True, threads: int = 2
    ) -> Allocator:
        folders = [tmp_path / f"disk{index}" for index in range(paths)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        allocator = Allocator(
            page_size=PAGE,
            backend=CpuBackend(),
            sizes=dict.fromkeys(TIERS, pages * PAGE),
            disk_paths=folders,
            poison=poison,
            io_threads_per_path=threads,
            file_ops=files,
        )
        made.append(allocator)
        return allocator

    yield make
    for allocator in made:
        allocator.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ptm-io")] == []
