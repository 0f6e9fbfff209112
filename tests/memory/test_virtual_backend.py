"""A device without memory: page tables as of a run, and no byte of memory or disk."""

from __future__ import annotations

import pytest
import torch

from lightning_ptm.errors import CapacityError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.virtual_backend import VirtualBackend
from lightning_ptm.terms import TIERS, Tier

PAGE = 64 * 1024


@pytest.fixture
def allocator() -> Allocator:
    return Allocator(page_size=PAGE, backend=VirtualBackend(), sizes=dict.fromkeys(TIERS, 1 << 50))


@pytest.mark.parametrize("tier", TIERS)
def test_tensors_have_pages_and_shapes_and_no_bytes(allocator: Allocator, tier: Tier) -> None:
    tensor = allocator.allocate("a terabyte", 1 << 38, torch.float32, tier)
    assert allocator.capacity_bytes(tier) - allocator.free_bytes(tier) == 1 << 40
    if tier.addressable:
        assert tensor.tensor().is_meta and tensor.tensor().shape == (1 << 38,)
        assert allocator.backend.holds(tensor.tensor())
    allocator.release(tensor)
    assert allocator.capacity_bytes(tier) == allocator.free_bytes(tier)


@pytest.mark.parametrize("source", TIERS)
@pytest.mark.parametrize("target", TIERS)
def test_copies_end_at_once(allocator: Allocator, source: Tier, target: Tier) -> None:
    tensors = [allocator.allocate("values", PAGE, torch.float32, tier) for tier in (source, target)]
    assert allocator.copy(*tensors).done()


def test_a_tier_may_be_too_small() -> None:
    allocator = Allocator(page_size=PAGE, backend=VirtualBackend(), sizes={Tier.DEVICE: 2 * PAGE})
    with pytest.raises(CapacityError):
        allocator.allocate("values", 3 * PAGE, torch.uint8, Tier.DEVICE)


def test_a_peak_begins_with_what_is_used(allocator: Allocator) -> None:
    kept = allocator.allocate("kept", PAGE, torch.uint8, Tier.DEVICE)
    allocator.release(allocator.allocate("gone", 3 * PAGE, torch.uint8, Tier.DEVICE))
    assert allocator.peak_bytes(Tier.DEVICE) == 4 * PAGE
    allocator.begin_peak(Tier.DEVICE)
    assert allocator.peak_bytes(Tier.DEVICE) == PAGE
    allocator.release(kept)
    assert allocator.peak_bytes(Tier.DEVICE) == PAGE
