"""The rows of an inventory: what each kind of run takes, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decided_by_hand import (
    ALL_ON_DISK,
    BF16,
    CLUSTER,
    FP32,
    FP64,
    MASTERS_ON_DISK,
    MIXED,
    ON_HOST,
    PAGE,
    RUNS,
    Net,
    Odd,
    adam,
    decided,
    sgd,
)
from torch import nn

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.inventory import Lifetime, Row, What
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.build_inventory import (
    gradient_row,
    queued_gradients_row,
    spare_versions_row,
    taken_dtype,
)
from lightning_ptm.runtime.tensors.page_io import BUFFERS
from lightning_ptm.terms import Tier, chunk_numel


def rows(found: Blueprint, what: What, lifetime: Lifetime = Lifetime.RUN) -> list[Row]:
    return [row for row in found.inventory.of(what) if row.lifetime is lifetime]


# -- rows -------------------------------------------------------------------------------------------------------------


def test_homes_in_the_order_of_set_up() -> None:
    found = decided(Odd(), **MIXED, **MASTERS_ON_DISK)
    homes = [row for row in found.inventory.rows if row.flat is not None]
    assert [(row.name, row.tier.name, row.dtype) for row in homes] == [
        ("flat 0 parameters", "DEVICE", "bfloat16"),
        ("flat 1 parameters", "DEVICE", "bfloat16"),
        ("flat 2 parameters", "DEVICE", "bfloat16"),
        ("0/0/master", "DISK", "float32"),
        ("0/0/exp_avg", "DISK", "float32"),
        ("0/0/exp_avg_sq", "DISK", "float32"),
        ("1/1/master", "DISK", "float32"),
        ("1/1/exp_avg", "DISK", "float32"),
        ("1/1/exp_avg_sq", "DISK", "float32"),
    ]
    for row in homes:
        assert row.flat is not None and row.shares_pages and row.count == 1
        assert (row.numel, row.unit) == (found.layout.flats[row.flat].shard_numel, found.layout.flats[row.flat].unit)


def test_gradients_with_homes() -> None:
    """Kept from the start, or taken as units end in the backward: the last unit first."""
    kept = decided(keep_gradients=True, **ON_HOST)
    assert [row.flat for row in rows(kept, What.GRADIENTS)] == [0, 1, 2, 3]
    assert not rows(kept, What.GRADIENTS, Lifetime.FIRST_GRADIENT)
    later = decided(**ON_HOST)
    assert [row.flat for row in rows(later, What.GRADIENTS, Lifetime.FIRST_GRADIENT)] == [3, 2, 1, 0]
    assert not rows(later, What.GRADIENTS)
    assert not decided().inventory.of(What.GRADIENTS)  # in `.grad`
    for found in (kept, later):
        assert {row.flat: row for row in found.inventory.of(What.GRADIENTS)} == {
            flat.index: gradient_row(found, flat) for flat in found.trained_flats()
        }


def test_gradients_that_pass_have_pages_and_no_row() -> None:
    passing = decided(machine=CLUSTER, ranks=2, device_memory="8MiB")
    flat = passing.layout.flats[1]
    row = gradient_row(passing, flat)
    assert (row.tier, row.numel, row.lifetime) == (Tier.DEVICE, flat.shard_numel, Lifetime.PASSING)
    assert not passing.inventory.of(What.GRADIENTS)
    for found, where in (
        (decided(), "in .grad"),
        (decided(lock_free=True, disk_path="/d", device_memory="8MiB"), "of no particular flat"),
    ):
        with pytest.raises(InternalError, match=f"gradient of flat 0 waits .*{where}.*, and has no pages of its own"):
            gradient_row(found, found.layout.flats[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        (MASTERS_ON_DISK, {"float32": 2}),  # the moments; the parameter is where the arithmetic is
        ({**MASTERS_ON_DISK, **MIXED}, {"float32": 3}),
        (ALL_ON_DISK, {"float32": 3}),
        ({**ALL_ON_DISK, **MIXED}, {"float32": 3, "bfloat16": 1}),
        ({**MASTERS_ON_DISK, "machine": CLUSTER, **MIXED}, {"float32": 3, "bfloat16": 1}),  # from the device to RAM
        ({**ON_HOST, **MIXED}, {}),
    ],
)
def test_staging_is_of_what_is_not_where_the_arithmetic_is(options: dict[str, Any], expected: dict[str, int]) -> None:
    found = decided(**options)
    staging = rows(found, What.STAGING)
    assert {row.dtype: row.count for row in staging} == {
        dtype: count * found.staging_chunks for dtype, count in expected.items()
    }
    assert {row.numel for row in staging} <= {chunk_numel(PAGE)}
    assert {row.tier for row in staging} <= {found.ram}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, set()),
        (MASTERS_ON_DISK, {FP32}),
        ({**MASTERS_ON_DISK, **MIXED}, {FP32}),
        ({**ALL_ON_DISK, **MIXED}, {FP32, BF16}),  # of the frozen block; of the others it is a rounded copy
        ({**ALL_ON_DISK, "optimizers": []}, {FP32}),
    ],
)
def test_saves_read_what_is_precise_and_on_disk(options: dict[str, Any], expected: set[torch.dtype]) -> None:
    found = decided(Odd(), **{"optimizers": adam, **options})
    made = list(found.save_rows)
    assert {taken_dtype(row) for row in made} == expected
    assert {row.count for row in made} <= {BUFFERS} and {row.tier for row in made} <= {found.ram}
    assert not found.inventory.of(What.SAVES)
    if "optimizers" not in options:
        behind = decided(Odd(), **options, checkpoints={"state_dict_type": "sharded", "async_save": True})
        assert list(behind.inventory.of(What.SAVES)) == made


def test_saves_do_not_read_what_is_a_rounded_copy() -> None:
    (row,) = decided(Net(), **ALL_ON_DISK, **MIXED).save_rows
    assert taken_dtype(row) is FP32


def test_buffers_of_saves_are_no_longer_than_what_they_read() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(700))
    found = decided(module, sgd, **ALL_ON_DISK)
    (row,) = found.save_rows
    assert 700 <= row.numel == found.layout.flats[0].shard_numel < chunk_numel(PAGE)


def test_values_in_transit_have_a_page_for_each_dtype() -> None:
    def pages(**options: Any) -> int:
        return sum(row.count for row in decided(module, **ALL_ON_DISK, **MIXED, **options).inventory.of(What.TRANSIT))

    module = Odd()
    assert pages() == 2
    module.wide = nn.Parameter(torch.zeros(5, dtype=FP64))
    assert pages() == 3
    # Where saves have buffers of their own it is what set-up needs.
    assert pages(checkpoints={"state_dict_type": "sharded", "async_save": True}) == 2
    assert not decided().inventory.of(What.TRANSIT)


def test_rows_of_no_flat() -> None:
    for make, what in ((spare_versions_row, What.VERSIONS), (queued_gradients_row, What.GRADIENTS)):
        row = make(Tier.HOST, 100, BF16, 3)
        assert (row.what, row.tier, row.numel, row.count, row.item_bytes) == (what, Tier.HOST, 100, 3, 2)
        assert (row.unit, row.flat, row.shares_pages, taken_dtype(row)) == (None, None, False, BF16)


@pytest.mark.parametrize("name", list(RUNS))
def test_the_device_has_room_for_the_root_and_two_units(name: str) -> None:
    """Or for gradients of theirs that leave the device."""
    found = decided(Odd(), **RUNS[name])
    homes = [home.parameter.computes for home in found.placement.homes]
    full = [found.layout.full_pages(unit, in_place=at_home) for unit, at_home in enumerate(homes)]
    pages = [max(both) for both in zip(full, found.gradient_pages, strict=True)]
    least = pages[0] + 2 * max(pages)
    room = sum(row.count for row in found.inventory.of(What.GATHERED))
    assert min(least, found.placement.gather_bytes // PAGE) <= room <= -(-found.placement.gather_bytes // PAGE)
