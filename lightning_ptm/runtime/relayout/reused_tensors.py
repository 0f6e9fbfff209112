"""Decision about tensors on disk of an engine that has ended: which the next engine can use without a copy.

Decides; touches no page. A reused tensor has the same elements at the same offsets of the same shard, in the same tier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.reused_extents import ReusedExtents, frames_of
from lightning_ptm.planning.inventory import Lifetime, Row, What, pages_of
from lightning_ptm.runtime.deciding.state_tensors import StateTensor
from lightning_ptm.runtime.relayout.gathered_flats import geometry
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.runtime.deciding.blueprint import Blueprint
    from lightning_ptm.runtime.relayout.previous_state import PreviousFlat, PreviousState

_OF_FLATS = (What.PARAMETERS, What.MASTERS, What.STATES)


@dataclasses.dataclass(frozen=True, slots=True)
class ReusedTensors:
    """The tensors that a new engine takes over.

    Attributes:
        reused_extents: their extents of the disk tier; None where no tensor is reused.
        tensors: old tensors by (kind of row, flat), one for each inventory row; None for a tensor that is newly
            allocated.
        more_pages: by tier, pages beyond those of the inventory, since reused tensors do not share partly filled pages.
    """

    reused_extents: ReusedExtents | None = None
    tensors: Mapping[tuple[What, int], Sequence[PagedTensor | None]] = dataclasses.field(default_factory=dict)
    more_pages: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    more_pages_at_once: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    """Pages beyond those of the inventory that set-up allocates, by tier."""

    def of(self, row: What, flat: int, count: int) -> Sequence[PagedTensor | None]:
        return self.tensors.get((row, flat), [None] * count)


def reused_tensors(
    blueprint: Blueprint, handed: PreviousState, optimizers: Sequence[Optimizer], disk_paths: Sequence[Path]
) -> ReusedTensors:
    """Returns the previous engine's tensors on disk that the new engine can use without a copy.

    Returns none if the disk budget has no room for the pages that reuse costs: reused tensors do not share partly
    filled pages.

    Args:
        handed: the previous engine's state.
        optimizers: the new engine's.
    """
    allocator, pools = handed.allocator, blueprint.pool_bytes
    tier = next((tier for tier in blueprint.budget if not tier.addressable and pools[tier]), None)
    if tier is None or tuple(disk_paths) != handed.disk_paths or allocator.page_size != blueprint.layout.page_size:
        return ReusedTensors()
    numbers = [next((at for at, old in enumerate(handed.optimizers) if old is each), None) for each in optimizers]
    found: dict[tuple[What, int], Sequence[PagedTensor | None]] = {}
    for flat in blueprint.layout.flats:
        by_name = {item.name: id(item.parameter) for item in blueprint.units[flat.unit].parameters}
        old = handed.flats.get(geometry(flat, [by_name[slot.spec.name] for slot in flat.slots]))
        if old is None:
            continue
        kept = blueprint.state_tensors[flat.index]
        for what in _OF_FLATS:
            rows = blueprint.inventory.of_flat(what, flat.index)
            of_rows = zip(rows, [column for column in kept if column.what is what], strict=True)
            found[what, flat.index] = [_same(row, _old(old, column, numbers)) for row, column in of_rows]
    kept_tensors = [tensor for each in found.values() for tensor in each if tensor is not None]
    page, taken, new = blueprint.layout.page_size, len(frames_of(kept_tensors)), _new_rows(blueprint, tier, found)
    more = taken + pages_of(new, page) - pools[tier] // page
    if pools[tier] + more * page > blueprint.budget[tier]:
        return ReusedTensors()
    of_set_up = [row for row in new if row.lifetime is Lifetime.RUN]
    at_once = taken + pages_of(of_set_up, page) - blueprint.inventory.held_bytes(tier, Lifetime.RUN) // page
    read = [each for each in handed.tensors() if each not in kept_tensors and not each.tier.addressable]
    return ReusedTensors(allocator.reusable_extents(kept_tensors, read), found, {tier: more}, {tier: at_once})


def _old(old: PreviousFlat, column: StateTensor, numbers: Sequence[int | None]) -> PagedTensor | None:
    if column.what is What.STATES:
        number = None if column.optimizer is None else numbers[column.optimizer]
        tensor, layout = (None, None) if number is None else old.states.get((number, column.layout.name), (None, None))
        return tensor if layout == column.layout else None
    return old.master if column.what is What.MASTERS else old.home


def _same(row: Row, old: PagedTensor | None) -> PagedTensor | None:
    if old is None or row.tier.addressable or old.tier is not row.tier:
        return None
    return old if (old.numel, str(old.dtype)) == (row.numel, f"torch.{row.dtype}") else None


def _new_rows(
    blueprint: Blueprint, tier: Tier, found: Mapping[tuple[What, int], Sequence[PagedTensor | None]]
) -> list[Row]:
    """Returns the rows of a tier that reuse no tensor."""
    reused = {key: iter(tensors) for key, tensors in found.items()}
    rows = (row for row in blueprint.inventory.rows if row.tier is tier)
    return [row for row in rows if row.flat is None or next(reused.get((row.what, row.flat), iter(())), None) is None]
