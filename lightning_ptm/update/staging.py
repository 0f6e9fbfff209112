"""Buffers between a tier that the arithmetic can address and the homes of what it updates.

Owns the staging pages of one tier. Knows no job and no chunk.
I1: a buffer that was taken is given back once, when no transfer touches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged import PagedTensor


class StagingPool:
    """Equal buffers of `numel` elements, kept by tier and dtype. Grows on demand; `reserve` makes it grow beforehand.

    Args:
        allocator: where buffers come from.
        numel: elements of a buffer.
    """

    def __init__(self, allocator: Allocator, numel: int) -> None:
        self._allocator = allocator
        self._numel = numel

        self._free: dict[tuple[Tier, torch.dtype], list[PagedTensor]] = {}
        self._owned: dict[tuple[Tier, torch.dtype], list[PagedTensor]] = {}

    def reserve(self, tier: Tier, dtype: torch.dtype, count: int) -> None:
        """Own at least `count` buffers.

        Raises:
            CapacityError: the tier has too few pages.
        """
        while len(self._owned.get((tier, dtype), ())) < count:
            self.give_back(self._allocate(tier, dtype))

    def take(self, tier: Tier, dtype: torch.dtype) -> PagedTensor:
        """A buffer with undefined contents.

        Raises:
            CapacityError: none is free and the tier has too few pages for another.
        """
        free = self._free.get((tier, dtype))
        return free.pop() if free else self._allocate(tier, dtype)

    def give_back(self, buffer: PagedTensor) -> None:
        """Return a buffer that no transfer touches."""
        self._free.setdefault((buffer.tier, buffer.dtype), []).append(buffer)

    def close(self) -> None:
        """Release every buffer. Idempotent."""
        owned, self._owned, self._free = self._owned, {}, {}
        for buffers in owned.values():
            for buffer in buffers:
                self._allocator.release(buffer)

    def _allocate(self, tier: Tier, dtype: torch.dtype) -> PagedTensor:
        buffer = self._allocator.allocate(f"update staging {dtype}", self._numel, dtype, tier, shared_tail=True)
        self._owned.setdefault((tier, dtype), []).append(buffer)
        self._allocator.merge(buffer)
        return buffer
