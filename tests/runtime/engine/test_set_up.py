"""Set-ups take what the inventory says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from decided_by_hand import PAGE, RUNS, Net, Odd, decided, laid_out
from engine_by_hand import (
    HOMES,
    Chain,
    build,
    hooks_on,
    of_all,
    weights,
)

from lightning_ptm.comm import Communicators, SoloCommunicator
from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.inventory import Lifetime, What, pages_of
from lightning_ptm.planning.inventory import Row as InventoryRow
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.build_inventory import gradient_row
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.engine.set_up import RunPages
from lightning_ptm.terms import TIERS, Tier


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
def test_pages_are_taken_for_the_rows_of_the_inventory_alone(disk: Path, tier: Tier) -> None:
    def with_a_row_more(blueprint: Any) -> Any:
        row = InventoryRow(What.SAVES, tier, 100, "float32", 4, lifetime=Lifetime.RUN)
        inventory = dataclasses.replace(blueprint.inventory, rows=(*blueprint.inventory.rows, row))
        return dataclasses.replace(blueprint, inventory=inventory)

    module = Chain()
    with pytest.raises(InternalError, match=rf"set-up has allocated \d+ bytes of the {tier.name.lower()} tier"):
        build(module, of_all(module), disk, change=with_a_row_more, **HOMES["masters on disk"])
    assert weights(module) == [0.5, 2.0, 3.0] and hooks_on(module) == []


@pytest.mark.parametrize("name", list(RUNS))
def test_set_up_takes_what_the_rows_say(name: str, disk: Path) -> None:
    """To the page, in each tier; gradients that come later are laid behind them in their order."""
    found = decided(Odd(), **RUNS[name])
    with laid_out(found, [disk]) as made:
        for lifetimes in ((Lifetime.RUN,), (Lifetime.RUN, Lifetime.FIRST_GRADIENT)):
            for tier in TIERS:
                taken = [
                    row
                    for row in found.inventory.rows
                    if row.tier is tier
                    and row.lifetime in lifetimes
                    and (row.flat is not None or row.what is What.GRADIENTS)
                ]
                used = made.allocator.capacity_bytes(tier) - made.allocator.free_bytes(tier)
                assert used == pages_of(taken, PAGE) * PAGE
                assert made.allocator.capacity_bytes(tier) == found.inventory.pool_bytes(tier)
            for flat in reversed([flat for unit in made.flats for flat in unit]):
                if flat.gradient.route.waits is Waits.FROM_FIRST:
                    flat.gradient.reserve()


@contextmanager
def pages(
    found: Blueprint, disk_paths: tuple[Path, ...] = (), sizes: dict[Tier, int] | None = None
) -> Iterator[RunPages]:
    """Yields the pages of a run whose set-up has not begun."""
    sizes = dict(found.pool_bytes) if sizes is None else sizes
    with Allocator(
        page_size=PAGE,
        backend=CpuBackend(),
        sizes=sizes,
        disk_paths=list(disk_paths) if sizes[Tier.DISK] else [],
        poison=True,
    ) as allocator:
        yield RunPages(found, allocator, Communicators(found.holders.mesh, SoloCommunicator()), torch.device("cpu"))


LOCK_FREE: dict[str, Any] = {"lock_free": True, "disk_path": "/d"}


@pytest.mark.parametrize("name", list(RUNS))
def test_what_is_taken_of_a_flat_is_where_its_homes_are(name: str, disk: Path) -> None:
    found = decided(Odd(), **RUNS[name])
    with laid_out(found, [disk]) as made:
        for store in made.stores:
            homes = found.placement.homes[store.unit.index]
            for flat in store.flats:
                dtype = found.dtypes[flat.layout.index]
                assert (flat.home.tier, flat.home.dtype, flat.home.numel) == (
                    homes.parameter,
                    dtype,
                    flat.layout.shard_numel,
                )
                assert flat.binding.dtype is dtype
                names = [slot.spec.name for slot in flat.layout.slots]
                by_name = dict(Odd.named_parameters(found.units[0].module))
                assert all(mine is by_name[name] for mine, name in zip(flat.binding.parameters, names, strict=True))
        updates = [flat for unit in made.flats for flat in unit]
        assert [flat.store.layout for flat in updates] == list(found.trained_flats())
        for flat in updates:
            layout, homes = flat.store.layout, found.placement.homes[flat.store.layout.unit]
            (traits,), master = found.traits[layout.index], found.master_dtypes[layout.index]
            assert flat.states.traits is traits and flat.gradient.route is found.route(layout)
            kept = {**flat.states.slots, **({"master": flat.states.master} if flat.states.master is not None else {})}
            assert all(paged.name.endswith(f"/{name}") for name, paged in kept.items())
            dtypes = {slot.name: slot.dtype for slot in traits.slots} | ({"master": master} if master else {})
            assert {name: (paged.tier, paged.dtype, paged.numel) for name, paged in kept.items()} == {
                name: (homes.master, dtype, layout.shard_numel) for name, dtype in dtypes.items()
            }


@pytest.mark.parametrize(
    ("options", "is_copy", "closes"),
    [
        ({}, False, False),
        ({"compute": torch.bfloat16, "mixed": True}, True, True),  # of masters
        ({"device_memory": "4MiB", "offload_parameters": "host", "optimizers": []}, True, False),  # of pages elsewhere
        ({"offload_optimizer": "disk", "disk_path": "/d"}, False, True),  # an update may be writing
    ],
)
def test_parameters_that_are_copies_and_those_that_close(options: dict[str, Any], is_copy: bool, closes: bool) -> None:
    found = decided(Net(1), **options)
    with pages(found, sizes={Tier.DEVICE: 1 << 22, Tier.HOST: 1 << 22, Tier.DISK: 0}) as made:
        (flat,) = made.store(1).flats
        assert (flat.binding._is_copy, flat.binding.parameter_guard.closes) == (is_copy, closes)


def test_a_tier_with_too_few_pages_is_refused_by_the_name_of_the_row() -> None:
    found = decided()
    with pages(found, sizes={Tier.DEVICE: PAGE, Tier.HOST: 0, Tier.DISK: 0}) as made:
        made.store(0)
        with pytest.raises(CapacityError, match="flat 1 parameters"):
            made.store(1)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "lasts"),
    [
        ({"device_memory": "4MiB", "offload_parameters": "host", "offload_optimizer": "host"}, True),
        (
            {
                "compute": torch.bfloat16,
                "mixed": True,
                "sums_gradients": True,
                "offload_optimizer": "disk",
                "disk_path": "/d",
            },
            False,
        ),
    ],
)
def test_a_gradient_has_the_pages_of_its_row(options: dict[str, Any], lasts: bool, disk: Path) -> None:
    found = decided(Net(1), **options)
    with laid_out(found, [disk]) as made:
        (flat,) = made.flats[1]
        row = gradient_row(found, flat.store.layout)
        assert (row.lifetime is Lifetime.FIRST_GRADIENT) == lasts
        before = made.allocator.free_bytes(row.tier)
        flat.gradient.reserve()
        taken = flat.gradient.shard.pages
        assert taken is not None
        assert (taken.name, taken.tier, taken.numel, str(taken.dtype)) == (
            row.name,
            row.tier,
            row.numel,
            f"torch.{row.dtype}",
        )
        assert before - made.allocator.free_bytes(row.tier) == pages_of([row], PAGE) * PAGE
        flat.gradient.used()
        assert (made.allocator.free_bytes(row.tier) == before) != lasts


def test_gradients_travel_in_pages_of_no_flat(disk: Path) -> None:
    found = decided(Net(1), **LOCK_FREE, device_memory="8MiB")
    assert found.lock_free is not None
    with pages(found, (disk,)) as made:
        stores = [made.store(unit) for unit in range(2)]
        with pytest.raises(
            InternalError, match="flat 0 is made before the pages of gradients that are passed to updates"
        ):
            made.flats(stores[0])
        travelling = made.take_gradient_pages()
        assert travelling is not None
        (flat,) = made.flats(stores[0])
        flat.gradient.reserve()
        own = flat.gradient.shard.pages
        (row,) = found.lock_free.gradients
        rest = [travelling.take(row.numel, torch.float32) for _ in range(row.count - 1)]
        assert own is not None and own not in rest and all(each.is_contiguous for each in (own, *rest))
        assert {(each.tier, each.numel) for each in (own, *rest)} == {(row.tier, row.numel)}


def test_where_grad_itself_travels_there_are_no_pages_for_it(disk: Path) -> None:
    with pages(decided(Net(1), **LOCK_FREE), (disk,)) as made:
        assert made.take_gradient_pages() is None


# -- of no flat -------------------------------------------------------------------------------------------------------


def test_versions_in_the_making_and_buffers_of_saves(disk: Path) -> None:
    found = decided(Net(1), **LOCK_FREE, checkpoints={"state_dict_type": "sharded", "async_save": True})
    with pages(found, (disk,)) as made:
        (row,) = found.inventory.of(What.VERSIONS)
        spares = made.spares()
        assert [(each.tier, each.numel, each.is_contiguous) for each in spares] == [
            (row.tier, row.numel, True)
        ] * row.count
        (row,) = found.inventory.of(What.SAVES)
        before = made._allocator.free_bytes(row.tier)
        made.buffers_for_saves()
        assert (
            before - made._allocator.free_bytes(row.tier)
            == row.count * pages_of([dataclasses.replace(row, count=1)], PAGE) * PAGE
        )


def test_without_them_nothing_is_taken() -> None:
    with pages(decided()) as made:
        before = made._allocator.free_bytes(Tier.DEVICE)
        assert made.spares() == () and made.take_gradient_pages() is None
        made.buffers_for_saves()
        assert made._allocator.free_bytes(Tier.DEVICE) == before
