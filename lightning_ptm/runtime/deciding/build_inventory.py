"""Inventory of a blueprint: one row for each allocation of homes, gradients, updates and saves, in the order of set-up.

Counts only. `planning/inventory.py` defines a row; engine/set_up.py and the engine allocate them. Decisions that precede the
choice of homes use `queued_gradients_row` and `spare_versions_row` to size the rows of lock-free updates.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.activation_disk import staging_bytes
from lightning_ptm.planning.home_bytes import passing_sets
from lightning_ptm.planning.inventory import Inventory, Lifetime, Row, What, with_room
from lightning_ptm.planning.layout import FlatLayout, round_up
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.deciding.state_tensors import (
    StateTensor,
    buffer_numels,
    buffers,
    row_of,
    scratch,
    staging_row,
    streamed,
)
from lightning_ptm.runtime.machine.heap import Freed
from lightning_ptm.runtime.machine.machine import SHORT_RAM_BYTES
from lightning_ptm.runtime.tensors.page_io import BUFFERS
from lightning_ptm.terms import ALIGN_NUMEL, Tier, chunk_numel

if TYPE_CHECKING:
    from lightning_ptm.config import Settings
    from lightning_ptm.runtime.deciding.blueprint import Blueprint
    from lightning_ptm.runtime.machine.machine import Machine

_ROOMY_SHARE = 1 / 4
"""Share of the free RAM; if pages take less of it, and there is a disk tier, freed memory may stay with the process."""
_DEVICE_CHUNKS = 3
"""Chunks in flight without a disk: one copied from the device, one updated, one copied back."""
_TRANSIT_PAGES = 2
"""Minimum number of pages for copies to and from the disk."""


def build_inventory(blueprint: Blueprint) -> Inventory:
    """Returns all rows of a rank of `blueprint`; does not read the blueprint's own inventory."""
    lock_free = blueprint.lock_free
    rows = [
        *_parameters(blueprint),
        *(lock_free.gradients if lock_free is not None else _passing_gradients(blueprint)),
        *_states(blueprint),
        *_kept_gradients(blueprint),
        *_staging(blueprint),
        *(blueprint.save_rows if blueprint.saves_in_background else ()),
        *(lock_free.spares if lock_free is not None else ()),
        *blueprint.activation_rows,
        *_later_gradients(blueprint),
    ]
    on_disk = any(size for tier, size in blueprint.placement.at_home_bytes.items() if not tier.addressable)
    transit = {blueprint.ram: _transit_pages(blueprint)} if on_disk else {}
    return with_room(rows, blueprint.layout.page_size, transit, _gathered_bytes(blueprint))


def with_inventory(blueprint: Blueprint, settings: Settings, machine: Machine) -> Blueprint:
    """Returns the blueprint with its page inventory and what is decided from it.

    Decided are the spare staging buffers, the C allocator's policy for freed memory, and the limit of gradients that
    wait for updates.
    """
    blueprint = dataclasses.replace(blueprint, save_rows=tuple(_save_rows(blueprint)))
    if machine.device_has_own_memory and not blueprint.placement.streams:
        blueprint = _with_spare_staging(blueprint, settings)
    inventory = build_inventory(blueprint)
    per_unit = [
        sum(flat.shard_bytes for flat in blueprint.layout.flats_of(unit) if flat.trainable)
        for unit in range(len(blueprint.units))
    ]
    left = blueprint.budget[Tier.DEVICE] - inventory.pool_bytes(Tier.DEVICE) if blueprint.unified else 0
    return dataclasses.replace(
        blueprint,
        inventory=inventory,
        freed_memory=_freed_memory(blueprint, settings, machine, inventory),
        # What the pool leaves of the budget, but at least one unit in backward and one whose update is running.
        gradient_room_bytes=max(2 * max(per_unit), left),
    )


def _with_spare_staging(blueprint: Blueprint, settings: Settings) -> Blueprint:
    """Returns the blueprint with several chunks in flight between the device and updates in RAM, so that copies overlap
    with arithmetic, if the budgets have room for them and the device tier does not grow."""
    least = build_inventory(blueprint)
    for chunks in range(_DEVICE_CHUNKS, 1, -1):
        wider = dataclasses.replace(blueprint, staging_chunks=chunks)
        inventory = build_inventory(wider)
        staging = sum(inventory.by_what(tier).get(What.STAGING, 0) for tier in blueprint.budget)
        if (settings.tuning.staging_bytes is None or staging <= settings.tuning.staging_bytes) and all(
            inventory.pool_bytes(tier) <= max(least.pool_bytes(tier), 0 if tier.computes else blueprint.budget[tier])
            for tier in blueprint.budget
        ):
            return wider
    return blueprint


def _freed_memory(blueprint: Blueprint, settings: Settings, machine: Machine, inventory: Inventory) -> Freed:
    """Decides what the C allocator does with freed memory; it matters on a CPU only.

    Freed memory is returned to the system where RAM is short: something is on disk, and pages take a good part of the free
    RAM. With everything in RAM a run should take about as much RAM as without pages: large freed blocks may stay only where
    gradients narrower than the master weights save as much.
    """
    if settings.tuning.freed_memory != "auto":
        return Freed.STAYS if settings.tuning.freed_memory == "keep" else Freed.LEAVES
    pools = inventory.pools
    in_ram = sum(size for tier, size in pools.items() if tier.addressable)
    free = machine.free_host_bytes / machine.ranks
    roomy = in_ram < free * _ROOMY_SHARE and free >= SHORT_RAM_BYTES
    if any(size for tier, size in pools.items() if not tier.addressable):
        return Freed.STAYS if roomy else Freed.LEAVES
    return Freed.STAYS if roomy and _narrow_gradients(blueprint) else Freed.SMALL_STAYS


def _narrow_gradients(blueprint: Blueprint) -> bool:
    """Whether most gradients are narrower than the master weights (mixed precision); without pages they are as wide."""
    narrow = Counter[bool]()
    for flat in blueprint.trained_flats():
        master = blueprint.master_dtypes[flat.index]
        narrow[master is not None and blueprint.gradient_dtypes[flat.index].itemsize < master.itemsize] += (
            flat.shard_numel
        )
    return narrow[True] > narrow[False]


def spare_versions_row(ram: Tier, numel: int, dtype: torch.dtype, count: int) -> Row:
    """Returns the row of spare versions, which lock-free updates write while compute reads the homes."""
    return row_of(What.VERSIONS, ram, numel, dtype, count=count, name="version in the making")


def queued_gradients_row(ram: Tier, numel: int, dtype: torch.dtype, count: int) -> Row:
    """Returns the row of gradients that are passed to updates; its pages belong to no particular flat."""
    return row_of(What.GRADIENTS, ram, numel, dtype, count=count, name="gradient")


def activation_rows(ram: Tier, tiers: Collection[Tier | None], paths: int) -> tuple[Row, ...]:
    """Returns the row of the staging buffers of activations that may be offloaded to `paths` paths of the disk tier.

    Args:
        tiers: the tiers that all activations are offloaded to. (Where runs choose handlings, buffers come with the first
            activations that have no room.)
    """
    if Tier.DISK not in tiers:
        return ()
    return (row_of(What.ACTIVATIONS, ram, staging_bytes(paths), torch.uint8, name="staging of activations"),)


def taken_dtype(row: Row) -> torch.dtype:
    """Returns the torch dtype of a row."""
    dtype = getattr(torch, row.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _parameters(blueprint: Blueprint) -> Iterator[Row]:
    for flat in blueprint.layout.flats:
        home = blueprint.placement.homes[flat.unit].parameter
        yield from _homes(blueprint, flat, home, f"flat {flat.index} ", What.PARAMETERS)


def _states(blueprint: Blueprint) -> Iterator[Row]:
    for flat in blueprint.trained_flats():
        home = blueprint.placement.homes[flat.unit].master
        yield from _homes(blueprint, flat, home, f"{flat.unit}/{flat.index}/", What.MASTERS, What.STATES)


def _homes(blueprint: Blueprint, flat: FlatLayout, home: Tier, prefix: str, *whats: What) -> Iterator[Row]:
    for column in blueprint.state_tensors[flat.index]:
        if column.what in whats:
            yield row_of(
                column.what,
                home,
                column.layout.numel,
                column.layout.dtype,
                unit=flat.unit,
                flat=flat.index,
                name=prefix + column.layout.name,
                shares_pages=True,
            )


_OF_GRADIENTS = {
    Waits.KEPT: Lifetime.RUN,
    Waits.FROM_FIRST: Lifetime.FIRST_GRADIENT,
    Waits.PASSING: Lifetime.PASSING,
}
"""Lifetime of gradient pages by waiting place; other waiting places have no pages of their own."""


def gradient_row(blueprint: Blueprint, flat: FlatLayout) -> Row:
    """Returns the row of a flat's gradient pages. Passing gradients use the pages of gathered units, so that the inventory
    has no row for them."""
    route = blueprint.route(flat)
    if route.waits not in _OF_GRADIENTS:
        raise InternalError(f"the gradient of flat {flat.index} waits {route.waits.value}, and has no pages of its own")
    return row_of(
        What.GRADIENTS,
        route.tier,
        flat.shard_numel,
        route.dtype,
        lifetime=_OF_GRADIENTS[route.waits],
        unit=flat.unit,
        flat=flat.index,
        name=f"flat {flat.index} gradient",
        shares_pages=True,
    )


def _passing_gradients(blueprint: Blueprint) -> Iterator[Row]:
    """Yields the pages in RAM through which gradients pass to updates during the backward pass."""
    sets = dict(passing_sets(blueprint.layout)) if blueprint.placement.passing_bytes else {}
    for flat in blueprint.trained_flats():
        count = sets.pop((flat.shard_numel, flat.dtype, flat.gradient_itemsize), 0)
        if count:
            dtype = blueprint.gradient_dtypes[flat.index]
            yield queued_gradients_row(blueprint.ram, flat.shard_numel, dtype, count)


def _kept_gradients(blueprint: Blueprint) -> Iterator[Row]:
    """Yields the gradients that have pages for the whole run; those queued for lock-free updates have pages of no flat."""
    for flat in blueprint.trained_flats():
        if blueprint.route(flat).waits is Waits.KEPT:
            yield gradient_row(blueprint, flat)


def _later_gradients(blueprint: Blueprint) -> Iterator[Row]:
    """Yields the gradients that leave the device for the update: their pages are allocated at the first gradient, in the
    order in which units end in a backward pass, and kept."""
    for flat in reversed(blueprint.trained_flats()):
        if blueprint.route(flat).waits is Waits.FROM_FIRST:
            yield gradient_row(blueprint, flat)


def _staging(blueprint: Blueprint) -> Iterator[Row]:
    """Yields the staging buffers of states whose home is not the tier of the arithmetic; flats of the same dtypes and tiers
    share one set of buffers per chunk."""
    most: Counter[tuple[Tier, torch.dtype, int]] = Counter()
    beside: Counter[tuple[Tier, torch.dtype, int]] = Counter()
    numels = buffer_numels(blueprint)
    for flat in blueprint.trained_flats():
        found = scratch(blueprint, flat, numels)
        for number in flat.optimizers:
            kept = streamed(blueprint.state_tensors[flat.index], number)
            place = _place_of_update(blueprint, flat, kept)
            most |= _staged(blueprint, flat, numels, kept, place)
            beside |= Counter({(place, *key): count for key, count in found.items()})
    counts = Counter({key: count * blueprint.staging_chunks for key, count in most.items()})
    counts.update(beside)
    for (tier, dtype, numel), count in counts.items():
        yield staging_row(tier, dtype, numel, count)


def _place_of_update(blueprint: Blueprint, flat: FlatLayout, kept: Sequence[StateTensor]) -> Tier:
    homes = blueprint.placement.homes[flat.unit]
    stateless = not any(column.what in (What.MASTERS, What.STATES) for column in kept)
    return (homes.parameter if stateless else homes.master).updated_in(blueprint.placement.staging_tier)


def _staged(
    blueprint: Blueprint,
    flat: FlatLayout,
    numels: Mapping[torch.dtype, int],
    kept: Sequence[StateTensor],
    place: Tier,
) -> Counter[tuple[Tier, torch.dtype, int]]:
    """Predicts `update.update_job.Progress.staged`, the rule that a run follows. The updater takes only buffers that it
    needs; a test checks that it takes no more than these.

    Args:
        kept: state tensors that the update streams.
        place: tier of its arithmetic.
    """
    homes = blueprint.placement.homes[flat.unit]
    tiers = {
        What.MASTERS: homes.master,
        What.STATES: homes.master,
        What.PARAMETERS: homes.parameter,
        # A queued one (lock-free) is in RAM already.
        What.GRADIENTS: blueprint.route(flat).own_pages,
    }
    moved = [column for column in kept if tiers[column.what] not in (None, place)]
    return Counter({(place, *key): count for key, count in buffers(blueprint, flat, numels, moved).items()})


def _save_rows(blueprint: Blueprint) -> Iterator[Row]:
    """Yields `Blueprint.save_rows`."""
    longest: dict[torch.dtype, int] = {}
    for flat in blueprint.layout.flats:
        homes, kept = blueprint.placement.homes[flat.unit], blueprint.state_tensors[flat.index]
        tiers = {What.MASTERS: homes.master, What.STATES: homes.master, What.PARAMETERS: homes.parameter}
        if any(column.what is What.MASTERS for column in kept):
            del tiers[What.PARAMETERS]  # a rounded copy of the master weights; not saved
        for column in kept:
            if (tier := tiers.get(column.what)) is not None and not tier.addressable:
                chunk, layout = column.chunk(chunk_numel(blueprint.layout.page_size)), column.layout
                longest[layout.dtype] = max(longest.get(layout.dtype, 0), min(layout.numel, chunk))
    for dtype, numel in longest.items():
        least = round_up(numel, ALIGN_NUMEL)
        yield row_of(What.SAVES, blueprint.ram, least, dtype, count=BUFFERS, name="values in transit")


def _transit_pages(blueprint: Blueprint) -> int:
    """Returns the pages that `PageIOBuffers.for_now` needs: one per dtype that a save reads, unless saves have buffers for
    the whole run."""
    return max(_TRANSIT_PAGES, 0 if blueprint.saves_in_background else len(blueprint.save_rows))


def _gathered_bytes(blueprint: Blueprint) -> int:
    """Returns the device bytes for gathered and fetched units and passing gradients."""
    placement, layout = blueprint.placement, blueprint.layout
    # Gradients that stay in `.grad` are in torch's own memory: the pool is smaller by them. Units that the plan keeps only
    # to save a fetch may then not fit, and are fetched again.
    outside = _outside_bytes(blueprint)
    planned = [
        max(layout.full_pages(unit, in_place=home.parameter.computes), gradients)
        for unit, (home, gradients) in enumerate(zip(placement.homes, blueprint.gradient_pages, strict=True))
        if unit not in blueprint.by_need
    ]
    pages = planned[0] + (1 if blueprint.by_need else 2) * max(planned)
    least = pages * layout.page_size + blueprint.by_need_bytes
    return max(placement.gather_bytes - outside, min(placement.gather_bytes, least))


def _outside_bytes(blueprint: Blueprint) -> int:
    """Returns the most bytes that passing gradients in `.grad` take at once: the root's and those of two other units."""
    placement = blueprint.placement
    if blueprint.layout.shared or placement.keeps_gradients:
        return 0
    per_unit = [
        gradients.all.full if homes.gradient.computes else 0
        for homes, gradients in zip(placement.homes, placement.gradients, strict=True)
    ]
    return (per_unit[0] + 2 * max(per_unit[1:], default=0)) * blueprint.layout.page_size
