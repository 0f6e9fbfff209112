"""Bytes written to each path of the disk tier: those that a copy is predicted to write are those that the region counts."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_ptm.memory.disk import bytes_by_path
from lightning_ptm.memory.paged_tensor import Extent
from lightning_ptm.terms import BLOCK_BYTES, Tier

from .conftest import PAGE, MakeAllocator


@pytest.mark.parametrize("paths", [1, 2, 3, 5])
def test_bytes_of_a_range_are_those_of_its_blocks(paths: int) -> None:
    choose = random.Random(paths)
    for _ in range(200):
        start = choose.randrange(8 * PAGE // BLOCK_BYTES) * BLOCK_BYTES
        stop = start + choose.randrange(1, 5 * PAGE)
        found = [0] * paths
        for block in range(start, stop, BLOCK_BYTES):
            found[block // PAGE % paths] += BLOCK_BYTES
        assert bytes_by_path([Extent(start, stop)], PAGE, paths) == found


@pytest.mark.parametrize("paths", [1, 3])
def test_predicted_bytes_of_copies_are_counted(make_allocator: MakeAllocator, paths: int) -> None:
    """From aligned and unaligned places in RAM, up to the end of the tensor and to places inside a block before it."""
    choose = random.Random(paths)
    allocator = make_allocator(pages=24, paths=paths, poison=False)
    between = allocator.allocate("between", 5, torch.float32, Tier.DISK, shared_tail=True)
    on_disk = allocator.allocate("disk", 70_001, torch.float32, Tier.DISK, shared_tail=True)
    in_ram = allocator.allocate("ram", on_disk.numel, torch.float32, Tier.HOST)
    assert between.pages.extents[0].stop_bytes <= on_disk.pages.extents[0].start_bytes
    for _ in range(20):
        start = choose.randrange(on_disk.numel * 4 // BLOCK_BYTES) * BLOCK_BYTES // 4
        numel = choose.randrange(1, on_disk.numel - start + 1)
        before = allocator.disk_written_bytes()
        from_ = choose.randrange(in_ram.numel - numel + 1)
        allocator.copy(in_ram, on_disk, source_start=from_, target_start=start, numel=numel).wait()
        allocator.copy(
            on_disk, in_ram, source_start=start, target_start=from_, numel=numel
        ).wait()  # reading writes nothing
        counted = [now - then for now, then in zip(allocator.disk_written_bytes(), before, strict=True)]
        extents = on_disk.pages.between(4 * start, 4 * (start + numel))
        assert counted == bytes_by_path(extents, PAGE, paths)
