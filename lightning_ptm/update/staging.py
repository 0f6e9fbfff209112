"""Pool of staging buffers, for states whose home the update's arithmetic cannot address.

Owns the staging pages. Knows no job and no chunk.
I1: a buffer that was taken is given back once, when no transfer touches it.
"""

from __future__ import annotations

import bisect
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor


class StagingPool:
    """Pool of buffers by tier, dtype and size. It grows on demand; `reserve` makes it grow in advance.

    Args:
        allocator: allocates the buffers.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

        self._free: dict[tuple[Tier, torch.dtype], list[PagedTensor]] = {}
        """Free buffers, smallest first."""
        self._owned: dict[tuple[Tier, torch.dtype], list[PagedTensor]] = {}

    def reserve(self, tier: Tier, dtype: torch.dtype, numel: int, count: int) -> None:
        """Allocates until the pool owns at least `count` buffers of `numel` elements.

        Raises:
            CapacityError: the tier has too few pages.
        """
        while sum(buffer.numel == numel for buffer in self._owned.get((tier, dtype), ())) < count:
            self.give_back(self._allocate(tier, dtype, numel))

    def take(self, tier: Tier, dtype: torch.dtype, numel: int) -> PagedTensor:
        """Takes a buffer of `numel` elements or more, with undefined contents.

        Raises:
            CapacityError: none is free and the tier has too few pages for another.
        """
        free = self._free.get((tier, dtype), [])
        for place, buffer in enumerate(free):
            if buffer.numel >= numel:
                return free.pop(place)
        return self._allocate(tier, dtype, numel)

    def give_back(self, buffer: PagedTensor) -> None:
        """Returns a buffer that no transfer touches to the pool."""
        # Among buffers of equal size the last used comes first: it may be in the cache.
        bisect.insort_left(self._free.setdefault((buffer.tier, buffer.dtype), []), buffer, key=attrgetter("numel"))

    def close(self) -> None:
        """Releases every buffer. Idempotent."""
        owned, self._owned, self._free = self._owned, {}, {}
        for buffers in owned.values():
            for buffer in buffers:
                self._allocator.release(buffer)

    def _allocate(self, tier: Tier, dtype: torch.dtype, numel: int) -> PagedTensor:
        buffer = self._allocator.allocate(f"update staging {dtype}", numel, dtype, tier, shared_tail=True)
        self._owned.setdefault((tier, dtype), []).append(buffer)
        self._allocator.merge(buffer)
        return buffer
