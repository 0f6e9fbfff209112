"""The rows of a blueprint's inventory: what its homes, gradients, updates and saves take, in the order of set-up.

Counts only; `planning/inventory.py` says what a row is, pages.py and the engine take them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lightning_ptm.planning.homes import arithmetic_tier
from lightning_ptm.planning.inventory import Inventory, Lifetime, Row, What, with_room
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.runtime.pieces import BUFFERS
from lightning_ptm.terms import ALIGN_NUMEL, Tier, chunk_numel

if TYPE_CHECKING:
    from lightning_ptm.runtime.blueprint import Blueprint

_TRANSIT_PAGES = 2
"""Values on their way to or from the disk take no less."""


def take_stock(drawn: Blueprint) -> Inventory:
    """All rows of a rank that follows `drawn`, whose own inventory is not asked."""
    rows = [
        *_parameters(drawn),
        *_travelling_gradients(drawn),
        *_states(drawn),
        *_kept_gradients(drawn),
        *_staging(drawn),
        *(save_rows(drawn) if drawn.saves_behind else ()),
        *_versions(drawn),
        *_later_gradients(drawn),
    ]
    on_disk = drawn.placement.disk_home_bytes > 0
    transit = {drawn.ram: _TRANSIT_PAGES} if on_disk else {}
    page = drawn.layout.page_size
    return with_room(rows, page, transit, _gathered_bytes(drawn), _least_bytes(drawn, rows))


def taken_dtype(row: Row) -> torch.dtype:
    """A row's dtype as torch has it."""
    dtype = getattr(torch, row.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _row(what: What, tier: Tier, numel: int, dtype: torch.dtype, **more: object) -> Row:
    return Row(what, tier, numel, str(dtype).removeprefix("torch."), dtype.itemsize, **more)  # type: ignore[arg-type]


def _parameters(drawn: Blueprint) -> Iterator[Row]:
    for flat in drawn.layout.flats:
        yield _row(
            What.PARAMETERS,
            drawn.placement.homes[flat.unit].parameter,
            flat.shard_numel,
            drawn.dtypes[flat.index],
            unit=flat.unit,
            flat=flat.index,
            name=f"flat {flat.index} parameters",
            shares_pages=True,
        )


def _states(drawn: Blueprint) -> Iterator[Row]:
    """In the order of `FlatStates.allocate`."""
    for flat in drawn.trained_flats():
        tier, name = drawn.placement.homes[flat.unit].master, f"{flat.unit}/{flat.index}"
        master, traits = drawn.master_dtypes[flat.index], drawn.traits[flat.index]
        kinds = [] if master is None else [(What.MASTERS, "master", master)]
        kinds += [(What.STATES, slot.name, slot.dtype) for slot in (traits.slots if traits is not None else ())]
        for what, slot, dtype in kinds:
            yield _row(
                what,
                tier,
                flat.shard_numel,
                dtype,
                unit=flat.unit,
                flat=flat.index,
                name=f"{name}/{slot}",
                shares_pages=True,
            )


def _gradient(drawn: Blueprint, flat: FlatLayout, tier: Tier, lifetime: Lifetime) -> Row:
    return _row(
        What.GRADIENTS,
        tier,
        flat.shard_numel,
        drawn.gradient_dtypes[flat.index],
        lifetime=lifetime,
        unit=flat.unit,
        flat=flat.index,
        name=f"flat {flat.index} gradient",
        shares_pages=True,
    )


def _kept_gradients(drawn: Blueprint) -> Iterator[Row]:
    """Those with homes for the whole run. What travels to lock-free updates has pages of no flat."""
    if drawn.keep_gradients and drawn.lock_free is None:
        for flat in drawn.trained_flats():
            tier = drawn.gradient_pages(flat)
            if tier is not None:
                yield _gradient(drawn, flat, tier, Lifetime.RUN)


def _later_gradients(drawn: Blueprint) -> Iterator[Row]:
    """Those that leave the device for the update: taken when the first comes, as units end in a backward pass, and kept."""
    if not drawn.keep_gradients and drawn.lock_free is None:
        for flat in reversed(list(drawn.trained_flats())):
            tier = drawn.gradient_pages(flat)
            if tier is not None and tier is not Tier.DEVICE:
                yield _gradient(drawn, flat, tier, Lifetime.FIRST_GRADIENT)


def _travelling_gradients(drawn: Blueprint) -> Iterator[Row]:
    for kind in drawn.lock_free.gradients if drawn.lock_free is not None else ():
        yield _row(What.GRADIENTS, drawn.ram, kind.numel, kind.dtype, count=kind.count, name="gradient")


def _versions(drawn: Blueprint) -> Iterator[Row]:
    for kind in drawn.lock_free.spares if drawn.lock_free is not None else ():
        yield _row(What.VERSIONS, drawn.ram, kind.numel, kind.dtype, count=kind.count, name="version in the making")


def _staging(drawn: Blueprint) -> Iterator[Row]:
    """Buffers of what is not where the arithmetic is; flats of the same dtypes and tiers share one set for each chunk."""
    most: Counter[tuple[Tier, torch.dtype]] = Counter()
    for flat in drawn.trained_flats():
        most |= _staged(drawn, flat)
    for (tier, dtype), count in most.items():
        yield _row(
            What.STAGING,
            tier,
            chunk_numel(drawn.layout.page_size),
            dtype,
            count=count * drawn.staging_chunks,
            name=f"update staging {dtype}",
            shares_pages=True,
        )


def _staged(drawn: Blueprint, flat: FlatLayout) -> Counter[tuple[Tier, torch.dtype]]:
    homes, traits, master = drawn.placement.homes[flat.unit], drawn.traits[flat.index], drawn.master_dtypes[flat.index]
    states = [slot.dtype for slot in traits.slots] if traits is not None else []
    states += [] if master is None else [master]
    columns = [*((homes.master, dtype) for dtype in states), (homes.parameter, drawn.dtypes[flat.index])]
    gradient = drawn.gradient_pages(flat)
    if gradient is not None and drawn.lock_free is None:  # there it is in RAM, where it is used
        columns.append((gradient, drawn.gradient_dtypes[flat.index]))
    place = arithmetic_tier(homes.master if states else homes.parameter, drawn.placement.staging_tier)
    return Counter((place, dtype) for tier, dtype in columns if tier is not place)


def save_rows(drawn: Blueprint) -> Iterator[Row]:
    """Buffers through which a save brings what is on disk into memory: for the whole run where saves go on behind training,
    else while one is made."""
    longest: dict[torch.dtype, int] = {}
    for flat in drawn.layout.flats:
        homes, traits, master = (
            drawn.placement.homes[flat.unit],
            drawn.traits[flat.index],
            drawn.master_dtypes[flat.index],
        )
        precise = (homes.parameter, drawn.dtypes[flat.index]) if master is None else (homes.master, master)
        kept = [precise, *((homes.master, slot.dtype) for slot in (traits.slots if traits is not None else ()))]
        for tier, dtype in kept:
            if tier is Tier.DISK:
                longest[dtype] = max(longest.get(dtype, 0), flat.shard_numel)
    for dtype, numel in longest.items():
        least = min(chunk_numel(drawn.layout.page_size), -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL)
        yield _row(What.SAVES, drawn.ram, least, dtype, count=BUFFERS, name="values in transit")


def _gathered_bytes(drawn: Blueprint) -> int:
    """Of the device, for gathered and fetched units and passing gradients."""
    placement, layout = drawn.placement, drawn.layout
    # Gradients that stay in `.grad` are memory of torch's own: the pool makes room for them by being smaller. What the
    # plan keeps only to save a fetch may then find no room, and is fetched again.
    outside = _outside_bytes(drawn)
    least = layout.page_size * (layout.full_pages(0) + 2 * max(map(layout.full_pages, range(len(layout.units)))))
    return max(placement.gather_bytes - outside, min(placement.gather_bytes, least))


def _least_bytes(drawn: Blueprint, rows: list[Row]) -> dict[Tier, int]:
    """Pools as homes were chosen by: what each costs at most in whatever order they share pages."""
    placement, page = drawn.placement, drawn.layout.page_size

    def whole(size: int) -> int:
        return -(-size // page) * page

    on_disk = placement.disk_home_bytes > 0
    least = {
        Tier.DEVICE: whole(placement.device_home_bytes - _in_place_home_bytes(drawn)) + whole(_gathered_bytes(drawn)),
        Tier.HOST: whole(placement.host_home_bytes),
        Tier.DISK: whole(placement.disk_home_bytes),
    }
    if on_disk:
        least[drawn.ram] += whole(placement.staging_bytes) + _TRANSIT_PAGES * page
    for flat in drawn.trained_flats():
        homes = placement.homes[flat.unit]
        if not drawn.unified and homes.gradient is Tier.DEVICE and homes.master is not Tier.DEVICE:
            least[Tier.HOST] += max(whole(flat.gradient_bytes), page)
    for row in rows:
        if row.what in (What.SAVES, What.VERSIONS) or (row.what is What.GRADIENTS and row.flat is None):
            least[drawn.ram] += row.count * whole(row.bytes_each)
    if drawn.lock_free is not None:  # their homes were counted one by one
        least[drawn.ram] -= sum(
            flat.gradient_bytes for flat in drawn.trained_flats() if drawn.gradient_pages(flat) is not None
        )
    return least


def _in_place_home_bytes(drawn: Blueprint) -> int:
    """Home bytes that the placement has set off for kept gradients which will stay in `.grad`."""
    if not drawn.placement.keeps_gradients:
        return 0
    page = drawn.layout.page_size
    return sum(
        flat.shard_bytes // page * page
        for flat in drawn.layout.flats
        if flat.trainable
        and drawn.placement.homes[flat.unit].gradient is Tier.DEVICE
        and drawn.layout.world_size == 1
        and not flat.sums_gradients
    )


def _outside_bytes(drawn: Blueprint) -> int:
    """The most that passing gradients in `.grad` take at once: the root's, and those of two units in turn."""
    if drawn.layout.world_size > 1 or drawn.placement.keeps_gradients:
        return 0
    per_unit = [
        sum(flat.padded_bytes for flat in drawn.layout.flats_of(unit) if flat.trainable)
        if drawn.gradient_home(unit) is Tier.DEVICE
        else 0
        for unit in range(len(drawn.units))
    ]
    return per_unit[0] + 2 * max(per_unit[1:], default=0)


__all__ = ["save_rows", "take_stock", "taken_dtype"]
