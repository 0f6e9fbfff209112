"""Bytes of the homes of a unit's states, rank by rank where shards differ in length.

Counts only; the result holds for any order in which the homes are allocated (`home_bytes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_ptm.planning.layout import ModelLayout, round_up
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
        self.parameters: list[Bytes] = []
        """By unit, bytes of its parameter homes."""
        self.gradients: list[Bytes] = []
        """By unit, bytes of its gradient homes."""
        self.masters: list[Bytes] = []
        """By unit, bytes of its master homes: a tensor for each `SLOT_BYTES` of an element's states, and the states that have
        shapes of their own."""
        layouts = [layout.of(rank) for rank in range(self.ranks)]
        for unit in range(len(layout.units)):
            parameters, gradients, masters = [0] * self.ranks, [0] * self.ranks, [0] * self.ranks
            for rank, of_rank in enumerate(layouts):
                for flat in of_rank.flats_of(unit):
                    parameters[rank] += home_bytes(flat.shard_bytes)
                    if flat.trainable:
                        gradients[rank] += home_bytes(flat.gradient_bytes)
                        slots, rest = divmod(master_bytes_per_element[flat.index], SLOT_BYTES)
                        own = own_state_bytes.get(flat.index)
                        masters[rank] += slots * home_bytes(flat.shard_numel * SLOT_BYTES)
                        masters[rank] += home_bytes(flat.shard_numel * rest)
                        masters[rank] += sum(map(home_bytes, own[flat.rank] if own else ()))
            self.parameters.append(tuple(parameters))
            self.gradients.append(tuple(gradients))
            self.masters.append(tuple(masters))


_PASSING_UNITS = 4
"""Units whose gradients pass through RAM at once: one that is laid out, one that is reduced, and two whose updates are not
done (`first_to_wait_for`)."""

PassingSize = tuple[int, str, int]
"""Elements of a shard, dtype of its flat, and bytes of an element of its gradient."""


def passing_sets(layout: ModelLayout) -> Mapping[PassingSize, int]:
    """Returns the number of page sets of each size through which gradients pass to updates during the backward pass."""
    whole: Counter[PassingSize] = Counter()
    most: Counter[PassingSize] = Counter()
    for unit in range(len(layout.units)):
        flats = [flat for flat in layout.flats_of(unit) if flat.trainable]
        of_unit = Counter((flat.shard_numel, flat.dtype, flat.gradient_itemsize) for flat in flats)
        whole.update(of_unit)
        most |= of_unit
    return {size: min(whole[size], _PASSING_UNITS * count) for size, count in most.items()}


def passing_bytes(layout: ModelLayout) -> Bytes:
    """Returns the bytes of `passing_sets` on each rank: whole pages."""
    ranks = range(layout.world_size if layout.owned else 1)
    of_ranks = [passing_sets(layout.of(rank)).items() for rank in ranks]
    return tuple(
        sum(count * round_up(numel * itemsize, layout.page_size) for (numel, _, itemsize), count in sets)
        for sets in of_ranks
    )


def home_bytes(size: int) -> int:
    """Returns the bytes that a home of `size` bytes takes, in whatever order homes share pages.

    Homes are stored end to end in whole blocks and may cross page borders: only the rest of a tier's last page is lost.
    """
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
