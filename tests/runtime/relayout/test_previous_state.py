"""Values, masters and states go from the pages of one layout to those of another one, wherever these are, on one rank.
Several ranks: tests/ranks; whole runs: tests/adversarial/test_laid_out_anew.py.

Elements come from old pages in the order in which they are wanted, each read once, and what is read is let go of. Between
ranks: tests/ranks/test_rank_laid_out_anew.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from handed_by_hand import assert_states, new_pages, old_pages, scalars_of
from test_gathered_flats import PAGE, flat_of
from values_by_hand import MIXED, PLACES, Odd, assert_equal, copies, values_of

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.reshard_moves import ShardRange
from lightning_ptm.runtime.relayout.gathered_flats import ShardMap
from lightning_ptm.runtime.relayout.previous_state import Resharder
from lightning_ptm.runtime.tensors.page_io import PageIO
from lightning_ptm.terms import Tier


@pytest.mark.parametrize("options", [{}, MIXED], ids=["true", "mixed"])
@pytest.mark.parametrize("after", list(PLACES))
@pytest.mark.parametrize("before", list(PLACES))
def test_all_bits_go_along(disk: Path, before: str, after: str, options: dict[str, object]) -> None:
    """Frozen parameters train, trained ones are frozen, and the others are in other tiers."""
    module = Odd()
    expected = copies(module)
    with old_pages(module, disk, before, **options) as (_, handed, optimizer, states):
        handed.free_all_but_states()
        module.frozen.requires_grad_(True)
        module.blocks[0].weight.requires_grad_(False)
        optimizer.add_param_group({"params": [module.frozen]})
        with new_pages(module, disk, after, handed, optimizer, **options) as (made, _):
            made.take_over(keep_frozen=True, handed=handed)
            made.optimizer_values.load(0, scalars_of(states), handed=handed)
            handed.close()
            assert_equal(values_of(made), expected)
            assert_states(made, states)
            for flats in made.flats:
                for flat in flats:
                    master = made.gathered_flats.master(flat.store)
                    if master is not None:
                        rounded = made.gathered_flats.read(master).to(torch.bfloat16)
                        assert torch.equal(made.gathered_flats.read(flat.store.values), rounded)


def test_a_value_is_told_as_it_was(disk: Path) -> None:
    module = Odd()
    expected = copies(module)
    with old_pages(module, disk, "masters on disk", **MIXED) as (_, handed, _, _):
        for name, parameter in module.named_parameters():
            assert parameter in handed and handed.dtype(id(parameter)) is torch.float32
            value = handed.precise(id(parameter), SoloCommunicator())
            assert torch.equal(value, expected[name]) and value.stride() == expected[name].stride()
        assert torch.nn.Parameter(torch.zeros(3)) not in handed
        assert not handed.resharder.irreversible
        assert handed.bytes_in_memory() and handed.bytes_on_disk()


def test_of_old_memory_nothing_is_left_when_all_is_read(disk: Path) -> None:
    module = Odd()
    with (
        old_pages(module, disk, "ram", **MIXED) as (old, handed, optimizer, states),
        new_pages(module, disk, "ram", handed, optimizer, **MIXED) as (made, _),
    ):
        made.take_over(keep_frozen=True, handed=handed)
        made.optimizer_values.load(0, scalars_of(states), handed=handed)
        assert handed.resharder.irreversible
        homes = [flat.home for flat in handed.flats.values()]
        kept = [old.gathered_flats.read(home).float().count_nonzero().item() for home in homes]
        # But for what shares a page of the system with padding, or what is read again.
        assert sum(kept) <= len(homes) * 2 * 4096, kept


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
