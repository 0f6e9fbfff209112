"""Allocation of contiguous device pages, for flats and buffers that kernels and collectives use as one tensor.

Owns nothing.

I1: a failed allocation keeps no pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_ptm.errors import CapacityError
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor


def contiguous_device_pages(allocator: Allocator, name: str, numel: int, dtype: torch.dtype) -> PagedTensor:
    """Returns a tensor of `numel` elements in contiguous device pages, with undefined contents.

    Raises:
        CapacityError: there are too few free pages, or they are not contiguous.
    """
    tensor = allocator.allocate(name, numel, dtype, Tier.DEVICE)
    if not tensor.is_contiguous:
        pages = len(tensor.pages.frames)
        allocator.release(tensor)
        raise CapacityError(
            f"{name} needs {pages} contiguous device pages and the free ones are scattered; other units are released "
            f"first; raise device_memory (host_memory on a CPU-only machine) if this repeats"
        )
    return tensor
