"""The rows of a blueprint's inventory: what its homes, gradients, updates and saves take, in the order of set-up.

Counts only; `planning/inventory.py` says what a row is, pages.py and the engine take them. What is decided before there are
homes asks here, too, what rows to come may take (`travelling`, `in_the_making`), and state_tensors.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.home_bytes import home_bytes
from lightning_ptm.planning.inventory import Inventory, Lifetime, Row, What, pages_of, with_room
from lightning_ptm.planning.layout import FlatLayout, round_up
from lightning_ptm.planning.placement_data import arithmetic_tier
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.deciding.state_tensors import (
    buffer_numel,
    buffer_numels,
    columns,
    row_of,
    scratch,
    staging_row,
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
"""With a disk tier: where pages take less of the free RAM than this, freed memory may stay for the next step."""
_DEVICE_CHUNKS = 3
"""Without a disk: one that comes from the device, one that is updated, one that goes back."""
_TRANSIT_PAGES = 2
"""Values on their way to or from the disk have no less."""


def build_inventory(blueprint: Blueprint) -> Inventory:
    """All rows of a rank that follows `blueprint`, whose own inventory is not asked."""
    lock_free = blueprint.lock_free
    rows = [
        *_parameters(blueprint),
        *(lock_free.gradients if lock_free is not None else ()),
        *_states(blueprint),
        *_kept_gradients(blueprint),
        *_staging(blueprint),
        *(save_rows(blueprint) if blueprint.saves_behind else ()),
        *(lock_free.spares if lock_free is not None else ()),
        *_later_gradients(blueprint),
    ]
    on_disk = any(size for tier, size in blueprint.placement.at_home_bytes.items() if not tier.addressable)
    transit = {blueprint.ram: _transit_pages(blueprint)} if on_disk else {}
    counted = _counted_bytes(blueprint, rows, transit)
    return with_room(rows, blueprint.layout.page_size, transit, _gathered_bytes(blueprint), counted)


def stocked(blueprint: Blueprint, settings: Settings, machine: Machine) -> Blueprint:
    """With the inventory, and what depends on how much of RAM it takes."""
    if machine.device_apart and not blueprint.placement.streams:
        blueprint = _with_spare_staging(blueprint, settings)
    inventory = build_inventory(blueprint)
    per_unit = [
        sum(flat.shard_bytes for flat in blueprint.layout.flats_of(unit) if flat.trainable)
        for unit in range(len(blueprint.units))
    ]
    left = blueprint.budget[Tier.DEVICE] - inventory.pool_bytes(Tier.DEVICE) if blueprint.unified else 0
    if machine.device_apart:  # beside those that have left it for pages of their own
        left = sum(
            flat.gradient_bytes
            for flat in blueprint.trained_flats()
            if (tier := blueprint.route(flat).own_pages) is not None and not tier.computes
        )
    return dataclasses.replace(
        blueprint,
        inventory=inventory,
        freed_memory=_freed_memory(blueprint, settings, machine, inventory),
        # What the pool leaves of the budget, but no less than one unit in use and one on its way out.
        gradient_room_bytes=max(2 * max(per_unit), left),
    )


def _with_spare_staging(blueprint: Blueprint, settings: Settings) -> Blueprint:
    """Several chunks of what passes between a device and updates in RAM, as far as the budgets leave them and the device
    needs no more for them: while one is updated, others come and go."""
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
    """On a CPU. It leaves where RAM is what is short: something is on disk, and pages take a good part of the RAM there is.
    With all in RAM a run takes about what it does without pages: what is kept of large blocks has to be saved elsewhere."""
    if settings.tuning.freed_memory != "auto":
        return Freed.STAYS if settings.tuning.freed_memory == "keep" else Freed.LEAVES
    pools = {tier: inventory.pool_bytes(tier) for tier in {row.tier for row in inventory.rows}}
    in_ram = sum(size for tier, size in pools.items() if tier.addressable)
    free = machine.free_host_bytes / machine.ranks
    roomy = in_ram < free * _ROOMY_SHARE and free >= SHORT_RAM_BYTES
    if any(size for tier, size in pools.items() if not tier.addressable):
        return Freed.STAYS if roomy else Freed.LEAVES
    return Freed.STAYS if roomy and _narrow_gradients(blueprint) else Freed.SMALL_STAYS


def _narrow_gradients(blueprint: Blueprint) -> bool:
    """Whether most of them are narrower than masters, in whose precision they are without pages: a mixed precision."""
    narrow = Counter[bool]()
    for flat in blueprint.trained_flats():
        master = blueprint.master_dtypes[flat.index]
        narrow[master is not None and blueprint.gradient_dtypes[flat.index].itemsize < master.itemsize] += (
            flat.shard_numel
        )
    return narrow[True] > narrow[False]


def in_the_making(ram: Tier, numel: int, dtype: torch.dtype, count: int) -> Row:
    """Pages of versions that lock-free updates write beside the homes."""
    return row_of(What.VERSIONS, ram, numel, dtype, count=count, name="version in the making")


def travelling(ram: Tier, numel: int, dtype: torch.dtype, count: int) -> Row:
    """Pages of gradients on their way to updates that run beside compute: of no flat."""
    return row_of(What.GRADIENTS, ram, numel, dtype, count=count, name="gradient")


def taken_dtype(row: Row) -> torch.dtype:
    """A row's dtype as torch has it."""
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
    for column in columns(blueprint, flat.index):
        if column.what in whats:
            yield row_of(
                column.what,
                home,
                column.numel,
                column.dtype,
                unit=flat.unit,
                flat=flat.index,
                name=prefix + column.name,
                shares_pages=True,
            )


_OF_GRADIENTS = {
    Waits.KEPT: Lifetime.RUN,
    Waits.FROM_FIRST: Lifetime.FIRST_GRADIENT,
    Waits.PASSING: Lifetime.PASSING,
}
"""What waits elsewhere has no pages of its own."""


def gradient_row(blueprint: Blueprint, flat: FlatLayout) -> Row:
    """Pages of a flat's own gradient; what passes has its place among units in use, and no row in the table."""
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


def _kept_gradients(blueprint: Blueprint) -> Iterator[Row]:
    """Those with homes for the whole run. What travels to lock-free updates has pages of no flat."""
    for flat in blueprint.trained_flats():
        if blueprint.route(flat).waits is Waits.KEPT:
            yield gradient_row(blueprint, flat)


def _later_gradients(blueprint: Blueprint) -> Iterator[Row]:
    """Those that leave the device for the update: taken when the first comes, as units end in a backward pass, and kept."""
    for flat in reversed(list(blueprint.trained_flats())):
        if blueprint.route(flat).waits is Waits.FROM_FIRST:
            yield gradient_row(blueprint, flat)


def _staging(blueprint: Blueprint) -> Iterator[Row]:
    """Buffers of what is not where the arithmetic is; flats of the same dtypes and tiers share one set for each chunk."""
    most: Counter[tuple[Tier, torch.dtype, int]] = Counter()
    beside: Counter[tuple[Tier, torch.dtype, int]] = Counter()
    numels = buffer_numels(blueprint)
    for flat in blueprint.trained_flats():
        for update in range(len(flat.optimizers)):
            most |= _staged(blueprint, flat, numels, update)
            place, found = _place_of_update(blueprint, flat, update), scratch(blueprint, flat, numels)
            beside |= Counter({(place, *key): count for key, count in found.items()})
    counts = Counter({key: count * blueprint.staging_chunks for key, count in most.items()})
    counts.update(beside)
    for (tier, dtype, numel), count in counts.items():
        yield staging_row(tier, dtype, numel, count)


def _place_of_update(blueprint: Blueprint, flat: FlatLayout, update: int) -> Tier:
    homes = blueprint.placement.homes[flat.unit]
    kept = columns(blueprint, flat.index, update=update)
    stateless = not any(column.what in (What.MASTERS, What.STATES) for column in kept)
    return arithmetic_tier(homes.parameter if stateless else homes.master, blueprint.placement.staging_tier)


def _staged(
    blueprint: Blueprint, flat: FlatLayout, numels: Mapping[torch.dtype, int], update: int
) -> Counter[tuple[Tier, torch.dtype, int]]:
    """Foretells `update.update_job.Progress.staged`, which is the rule by which a run goes: the updater takes no
    buffer that it does
    not need, and a test looks whether it takes more than these."""
    homes, kept = blueprint.placement.homes[flat.unit], columns(blueprint, flat.index, update=update)
    tiers = {
        What.MASTERS: homes.master,
        What.STATES: homes.master,
        What.PARAMETERS: homes.parameter,
        # A travelling one is in RAM, where it is used.
        What.GRADIENTS: blueprint.route(flat).own_pages,
    }
    place = _place_of_update(blueprint, flat, update)
    return Counter(
        (place, column.dtype, buffer_numel(blueprint, flat, numels, column))
        for column in kept
        if tiers[column.what] not in (None, place)
    )


def save_rows(blueprint: Blueprint) -> Iterator[Row]:
    """Buffers through which a save brings what is on disk into memory: for the whole run where saves go on behind training,
    else while one is made."""
    longest: dict[torch.dtype, int] = {}
    for flat in blueprint.layout.flats:
        homes, kept = blueprint.placement.homes[flat.unit], columns(blueprint, flat.index)
        tiers = {What.MASTERS: homes.master, What.STATES: homes.master, What.PARAMETERS: homes.parameter}
        if any(column.what is What.MASTERS for column in kept):
            del tiers[What.PARAMETERS]  # a rounded copy
        for column in kept:
            if (tier := tiers.get(column.what)) is not None and not tier.addressable:
                chunk = column.chunk(chunk_numel(blueprint.layout.page_size))
                longest[column.dtype] = max(longest.get(column.dtype, 0), min(column.numel, chunk))
    for dtype, numel in longest.items():
        least = round_up(numel, ALIGN_NUMEL)
        yield row_of(What.SAVES, blueprint.ram, least, dtype, count=BUFFERS, name="values in transit")


def _transit_pages(blueprint: Blueprint) -> int:
    """For what `PageIOBuffers.for_now` takes in any case: a page for each dtype that a save reads, where its buffers are not
    there all the time."""
    return max(_TRANSIT_PAGES, 0 if blueprint.saves_behind else sum(1 for _ in save_rows(blueprint)))


def _gathered_bytes(blueprint: Blueprint) -> int:
    """Of the device, for gathered and fetched units and passing gradients."""
    placement, layout = blueprint.placement, blueprint.layout
    # Gradients that stay in `.grad` are memory of torch's own: the pool makes room for them by being smaller. What the
    # plan keeps only to save a fetch may then find no room, and is fetched again.
    outside = _outside_bytes(blueprint)
    least = layout.page_size * (layout.full_pages(0) + 2 * max(map(layout.full_pages, range(len(layout.units)))))
    return max(placement.gather_bytes - outside, min(placement.gather_bytes, least))


def _counted_bytes(blueprint: Blueprint, rows: list[Row], transit: Mapping[Tier, int]) -> dict[Tier, int]:
    """What the placement has counted for homes, and what is beside them."""
    placement, page = blueprint.placement, blueprint.layout.page_size

    def whole(size: int) -> int:
        return -(-size // page) * page

    counted = {tier: whole(size) for tier, size in placement.at_home_bytes.items()}
    on_device = placement.at_home_bytes[Tier.DEVICE] - _in_place_home_bytes(blueprint)
    counted[Tier.DEVICE] = whole(on_device) + whole(_gathered_bytes(blueprint))
    if placement.streams:
        counted[blueprint.ram] += whole(placement.staging_bytes)
    for tier, pages in transit.items():
        counted[tier] += pages * page
    counted[blueprint.ram] += whole(
        sum(
            home_bytes(flat.gradient_bytes)
            for flat in blueprint.trained_flats()
            for homes in (placement.homes[flat.unit],)
            if not blueprint.unified and homes.gradient.computes and not homes.master.computes
        )
    )
    travel = blueprint.lock_free.gradients if blueprint.lock_free is not None else ()
    beside = [row for row in rows if row.what in (What.SAVES, What.VERSIONS)]
    counted[blueprint.ram] += pages_of((*travel, *beside), page) * page
    if blueprint.lock_free is not None:  # their homes were counted one by one
        counted[blueprint.ram] -= sum(
            flat.gradient_bytes for flat in blueprint.trained_flats() if blueprint.route(flat).waits is Waits.TRAVELLING
        )
    return counted


def _in_place_home_bytes(blueprint: Blueprint) -> int:
    """Home bytes that the placement has set off for kept gradients which will stay in `.grad`."""
    if not blueprint.placement.keeps_gradients:
        return 0
    return sum(
        home_bytes(flat.shard_bytes)
        for flat in blueprint.trained_flats()
        if blueprint.placement.homes[flat.unit].gradient.computes and blueprint.route(flat).waits is Waits.IN_GRAD
    )


def _outside_bytes(blueprint: Blueprint) -> int:
    """The most that passing gradients in `.grad` take at once: the root's, and those of two units in turn."""
    if blueprint.layout.shared or blueprint.placement.keeps_gradients:
        return 0
    per_unit = [
        sum(flat.padded_bytes for flat in blueprint.layout.flats_of(unit) if flat.trainable)
        if blueprint.gradient_home(unit).computes
        else 0
        for unit in range(len(blueprint.units))
    ]
    return per_unit[0] + 2 * max(per_unit[1:], default=0)
