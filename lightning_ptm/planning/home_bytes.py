"""What homes of a unit's states cost, rank by rank where ranks have shards of different lengths.

Counts only; holds for any order in which the homes are allocated (`home_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_ptm.planning.layout import FlatLayout, ModelLayout, round_up
from lightning_ptm.terms import BLOCK_BYTES

SLOT_BYTES = 4
"""Bytes per element of one tensor of master states: the fp32 parameter, one moment..."""

Bytes = tuple[int, ...]
"""Of each rank; of one that stands for all, where all have the same."""


def less(left: Bytes, size: Bytes) -> Bytes:
    """What each has left when so much is taken."""
    return tuple(have - each for have, each in zip(left, size, strict=True))


class HomeBytes:
    """Args: as `place`."""

    def __init__(
        self,
        layout: ModelLayout,
        master_bytes_per_element: Sequence[int],
        own_state_bytes: Mapping[int, Sequence[Sequence[int]]],
    ) -> None:
        self.ranks = layout.world_size if layout.owned else 1
        """How many are counted apart."""
        self._per_element = master_bytes_per_element
        self._own_state_bytes = own_state_bytes
        self._layouts = [layout.of(rank) for rank in range(self.ranks)]

    def parameters(self, unit: int, *, gradients: bool) -> Bytes:
        """Of a unit's parameter homes; with those of gradients that do not only pass."""
        return tuple(
            sum(
                home_bytes(flat.shard_bytes) + (home_bytes(flat.gradient_bytes) if gradients and flat.trainable else 0)
                for flat in layout.flats_of(unit)
            )
            for layout in self._layouts
        )

    def masters(self, unit: int) -> Bytes:
        """Of a unit's master homes: a tensor for each `SLOT_BYTES` of an element's states, and those of own shapes."""
        return tuple(
            sum(self._masters_of(flat) for flat in layout.flats_of(unit) if flat.trainable) for layout in self._layouts
        )

    def _masters_of(self, flat: FlatLayout) -> int:
        slots, rest = divmod(self._per_element[flat.index], SLOT_BYTES)
        own = self._own_state_bytes.get(flat.index)
        return (
            slots * home_bytes(flat.shard_numel * SLOT_BYTES)
            + home_bytes(flat.shard_numel * rest)
            + sum(home_bytes(size) for size in (own[flat.rank] if own else ()))
        )


def home_bytes(size: int) -> int:
    """Bytes that a home of `size` bytes costs, in whatever order homes share pages.

    They lie end to end, in whole blocks, whatever page that ends in: nothing is lost but the rest of a tier's last page.
    """
    return round_up(size, BLOCK_BYTES)
