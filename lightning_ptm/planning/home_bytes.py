"""Bytes of the homes of a unit's states, rank by rank where shards differ in length.

Counts only; the result holds for any order in which the homes are allocated (`home_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_ptm.planning.layout import FlatLayout, ModelLayout, round_up
from lightning_ptm.terms import BLOCK_BYTES

SLOT_BYTES = 4
"""Bytes per element of one tensor of master states: the fp32 parameter, one moment..."""

Bytes = tuple[int, ...]
"""Bytes of each rank, or of one rank that represents all, where all have the same."""


def less(left: Bytes, size: Bytes) -> Bytes:
    """Returns the bytes that are left on each rank after `size` is taken."""
    return tuple(have - each for have, each in zip(left, size, strict=True))


def together(one: Bytes, other: Bytes) -> Bytes:
    """Returns the sum of two sizes on each rank."""
    return tuple(first + second for first, second in zip(one, other, strict=True))


class HomeBytes:
    """Sizes of the homes of each unit. Args as `placement.place`."""

    def __init__(
        self,
        layout: ModelLayout,
        master_bytes_per_element: Sequence[int],
        own_state_bytes: Mapping[int, Sequence[Sequence[int]]],
    ) -> None:
        self.ranks = layout.world_size if layout.owned else 1
        """Number of ranks that are counted separately."""
        self._per_element = master_bytes_per_element
        self._own_state_bytes = own_state_bytes
        self._layouts = [layout.of(rank) for rank in range(self.ranks)]

    def parameters(self, unit: int) -> Bytes:
        """Returns the bytes of a unit's parameter homes."""
        return tuple(sum(home_bytes(flat.shard_bytes) for flat in layout.flats_of(unit)) for layout in self._layouts)

    def gradients(self, unit: int) -> Bytes:
        """Returns the bytes of a unit's gradient homes."""
        return tuple(
            sum(home_bytes(flat.gradient_bytes) for flat in layout.flats_of(unit) if flat.trainable)
            for layout in self._layouts
        )

    def masters(self, unit: int) -> Bytes:
        """Returns the bytes of a unit's master homes.

        There is a tensor for each `SLOT_BYTES` of an element's states, and the states that have shapes of their own.
        """
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
    """Returns the bytes that a home of `size` bytes takes, in whatever order homes share pages.

    Homes are stored end to end in whole blocks and may cross page borders: only the rest of a tier's last page is lost.
    """
    return round_up(size, BLOCK_BYTES)
