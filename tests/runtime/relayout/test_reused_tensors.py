"""Tensors on disk that the new layout has, too, stay as they are; all others, and those in memory, are made again."""

from __future__ import annotations

from pathlib import Path

from handed_by_hand import new_pages, old_pages
from values_by_hand import MIXED, Odd

from lightning_ptm.planning.inventory import What
from lightning_ptm.terms import Tier


def kept_of(disk: Path, place: str, after: str = "", **changed: object) -> set[tuple[What, str, bool]]:
    """(kind, unit, whether it stays) of each row of which there was one before, where `frozen` trains from now on."""
    module = Odd()
    with old_pages(module, disk, place, **MIXED) as (_, handed, optimizer, _):
        module.frozen.requires_grad_(True)
        optimizer.add_param_group({"params": [module.frozen]})
        with new_pages(module, disk, after or place, handed, optimizer, **{**MIXED, **changed}) as (made, kept):
            units = made.blueprint.units
            found = set()
            for flat in made.blueprint.layout.flats:
                for what in (What.PARAMETERS, What.MASTERS, What.STATES):
                    rows = made.blueprint.inventory.of_flat(what, flat.index)
                    for tensor in kept.of(what, flat.index, len(rows)):
                        found.add((what, units[flat.unit].name, tensor is not None))
            taken = made.allocator.capacity_bytes(Tier.DISK) - made.allocator.free_bytes(Tier.DISK)
            rows_bytes = made.blueprint.inventory.pool_bytes(Tier.DISK)
            page = made.blueprint.layout.page_size
            assert taken <= rows_bytes + kept.more_pages.get(Tier.DISK, 0) * page
            handed.close()
    return found


def test_flats_that_are_the_same_stay_on_disk(disk: Path) -> None:
    blocks = {(what, f"blocks.{at}", True) for what in (What.MASTERS, What.STATES) for at in (0, 1)}
    found = kept_of(disk, "masters on disk")
    assert blocks <= found
    assert not {(what, unit, True) for what, unit, _ in found if unit == "" or what is What.PARAMETERS} & found
    assert {(What.PARAMETERS, "blocks.0", True)} <= kept_of(disk, "all on disk")


def test_what_is_to_lie_in_another_tier_moves(disk: Path) -> None:
    assert not any(stays for _, _, stays in kept_of(disk, "masters on disk", "ram"))
    assert not any(stays for _, _, stays in kept_of(disk, "ram", "masters on disk"))


def test_a_budget_without_room_for_what_lies_between_has_all_copied(disk: Path) -> None:
    module = Odd()
    with old_pages(module, disk, "masters on disk", **MIXED) as (_, handed, optimizer, _):
        module.frozen.requires_grad_(True)
        optimizer.add_param_group({"params": [module.frozen]})
        with new_pages(module, disk, "masters on disk", handed, optimizer, **MIXED) as (made, kept):
            needed = made.blueprint.pool_bytes[Tier.DISK]
            more = kept.more_pages[Tier.DISK] * made.blueprint.layout.page_size
        assert more > 0
        for size, stays in ((needed, False), (needed + more, True)):
            options = {**MIXED, "disk_memory": size}
            with new_pages(module, disk, "masters on disk", handed, optimizer, **options) as (_, kept):
                assert bool(kept.more_pages) is stays
        handed.close()
