"""Elements come from old pages in the order in which they are wanted, each read once, and what is read is let go of. Between
ranks: tests/ranks/test_rank_laid_out_anew.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_shard_map import PAGE, flat_of

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.reshard_moves import ShardRange
from lightning_ptm.runtime.relayout.reshard import Resharder
from lightning_ptm.runtime.relayout.shard_map import ShardMap
from lightning_ptm.runtime.tensors.page_io import PageIO
from lightning_ptm.terms import Tier

SIZES = (100, 70_000, 64, 33_000)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
def test_what_is_wanted_comes_in_order(disk: Path, tier: Tier) -> None:
    flat = flat_of(1, *SIZES)
    with Allocator(
        page_size=PAGE,
        backend=CpuBackend(),
        sizes={Tier.DEVICE: 40 * PAGE, Tier.DISK: 20 * PAGE},
        disk_paths=[disk],
    ) as allocator:
        paged = allocator.allocate("values", flat.shard_numel, torch.float32, tier)
        values = torch.arange(flat.shard_numel, dtype=torch.float32) + 1
        pages = PageIO(allocator)
        pages.write(paged, [(0, values)])
        held, resharder = ShardMap(flat, (0,), (10, 11, 12, 13), torch.float32, paged), Resharder(pages)
        for key, slot in zip(held.keys, flat.slots, strict=True):
            assert torch.equal(resharder.whole(held, key, SoloCommunicator()), values[slot.start : slot.end])
        assert resharder.moved_bytes == 4 * sum(SIZES) and not resharder.irreversible and not resharder.sent_bytes
        wanted = [
            ShardRange(13, 5, 30_000, 0, 7),
            ShardRange(10, 0, 100, 0, 40_000),
            ShardRange(11, 0, 70_000, 0, 50_000),
        ]
        found = torch.zeros(200_000)
        end = 0
        sources = dict.fromkeys(held.keys, held)
        for place, part in resharder.reshard(wanted, sources, SoloCommunicator(), last_read=True):
            assert place >= end and part.nbytes <= PAGE
            end = place + part.numel()
            found[place:end] = part
        expected = torch.zeros(200_000)
        last = flat.slots[3].start + 5
        expected[7:30_007] = values[last : last + 30_000]
        expected[40_000:40_100] = values[:100]
        expected[50_000:120_000] = values[flat.slots[1].start : flat.slots[1].end]
        assert torch.equal(found, expected)
        assert resharder.irreversible is tier.addressable
        left = pages.read(paged)
        assert torch.equal(left[-2000:], values[-2000:]), "nobody has wanted these"
        if tier.addressable:
            assert int((left[flat.slots[1].start :][:70_000] != 0).sum()) <= 2 * 1024


def test_of_many_tensors_through_one_buffer(disk: Path) -> None:
    flat, count = flat_of(1, 20_000), 6
    with Allocator(
        page_size=PAGE, backend=CpuBackend(), sizes={Tier.DEVICE: 2 * PAGE, Tier.DISK: 20 * PAGE}, disk_paths=[disk]
    ) as allocator:
        sources, pages = {}, PageIO(allocator)
        for key in range(count):
            paged = allocator.allocate(f"values {key}", flat.shard_numel, torch.float32, Tier.DISK)
            pages.write(paged, [(0, torch.full((flat.shard_numel,), float(key)))])
            sources[key] = ShardMap(flat, (0,), (key,), torch.float32, paged)
        wanted = [ShardRange(key, 0, 20_000, 0, 20_000 * key) for key in range(count)]
        moved = Resharder(pages).reshard(wanted, sources, SoloCommunicator())
        assert all(bool((part == place // 20_000).all()) for place, part in moved)
