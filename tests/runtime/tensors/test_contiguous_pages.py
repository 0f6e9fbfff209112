"""Device pages in a row, where the free ones may be scattered."""

from __future__ import annotations

import pytest
import torch
from small_parts import NUMEL, OnePage, parts

from lightning_ptm.errors import CapacityError
from lightning_ptm.runtime.tensors.contiguous_pages import contiguous_device_pages


def test_pages_lie_in_a_row_or_are_not_taken() -> None:
    with parts(OnePage(), (), device_pages=4) as made:
        taken = [contiguous_device_pages(made.allocator, f"page {at}", NUMEL, torch.float32) for at in range(4)]
        assert made.device_pages_free == 0
        with pytest.raises(CapacityError):
            contiguous_device_pages(made.allocator, "more", NUMEL, torch.float32)
        for each in (taken[0], taken[2]):
            made.allocator.release(each)
        told = "two needs 2 contiguous device pages and the free ones are scattered; .* raise device_memory"
        with pytest.raises(CapacityError, match=told):
            contiguous_device_pages(made.allocator, "two", 2 * NUMEL, torch.float32)
        assert made.device_pages_free == 2
        made.allocator.release(taken[1])
        two = contiguous_device_pages(made.allocator, "two", 2 * NUMEL, torch.float32)
        assert two.tensor().numel() == 2 * NUMEL and made.device_pages_free == 1
