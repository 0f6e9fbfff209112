"""A 1-D run of elements of one dtype, stored on pages of one tier (the paper's Tensor, section 4.1)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from lightning_ptm.errors import UsageError
from lightning_ptm.terms import Tier


@dataclass(frozen=True, slots=True)
class PageSpan:
    """A tensor's bytes in one page: whole blocks, so the last span may extend past the tensor's last element."""

    frame: int
    offset_bytes: int
    bytes: int


class PagedTensor:
    """A 1-D tensor on pages. Only the Allocator creates, places, moves and releases it; any code may read it.

    Only the first span may begin inside its page and only the last may end inside it. `pages` lists them in order; the
    tensor is contiguous if their bytes follow each other in the tier.
    """

    __slots__ = ("_released", "_view", "dtype", "id", "moving", "name", "numel", "pages", "tier")

    def __init__(self, tensor_id: int, name: str, numel: int, dtype: torch.dtype, tier: Tier) -> None:
        self.id = tensor_id
        self.name = name
        self.numel = numel
        self.dtype = dtype

        # State, changed by the Allocator under its lock.
        self.tier = tier
        self.pages: tuple[PageSpan, ...] = ()
        self._view: torch.Tensor | None = None
        self.moving = False
        self._released = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without the padding to a whole block."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return all(after.frame == before.frame + 1 for before, after in itertools.pairwise(self.pages))

    @property
    def is_released(self) -> bool:
        return self._released

    def tensor(self) -> torch.Tensor:
        """Returns a view of the elements without a copy, shape (numel,), valid until released, moved or merged.

        Raises:
            UsageError: released, being moved, on disk, or scattered over pages (`merge` first).
        """
        if self._view is not None and not self.moving:
            return self._view
        if self._released:
            raise UsageError(f"{self.name} is released: its pages may hold another tensor; allocate it again")
        if self.moving:
            raise UsageError(f"{self.name} is being moved; wait for the transfer that move() returned")
        if not self.tier.addressable:
            raise UsageError(f"{self.name} is on disk and has no address; copy it to the device or host tier first")
        raise UsageError(f"{self.name} is scattered over {len(self.pages)} pages; merge it first")

    def move(self, *, under_way: bool) -> None:
        """The Allocator has begun to move the tensor, or has ended it."""
        self.moving = under_way

    def place(self, tier: Tier, pages: tuple[PageSpan, ...], view: torch.Tensor | None) -> None:
        """Puts the tensor on pages (for the Allocator); `view` is None if they have no single address."""
        self.tier, self.pages, self._view = tier, pages, view

    def forget(self) -> None:
        """Marks the tensor as released (for the Allocator)."""
        self.pages, self._view, self._released = (), None, True

    def __repr__(self) -> str:
        where = "released" if self._released else f"{self.tier.name.lower()}, {len(self.pages)} pages"
        return f"PagedTensor({self.name}, {self.numel} x {self.dtype}, {where})"
