"""Owners of parameters that are updated whole: bytes and arithmetic are even, over the whole model and over each unit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.planning.layout import FlatLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.whole_parameter_owners import choose_owners, work_of
from lightning_ptm.terms import BLOCK_BYTES

PAGE = 1 << 16


def whole(name: str, *shape: int) -> ParameterSpec:
    """Returns a parameter with two states like the parameter."""
    numel = math.prod(shape)
    return ParameterSpec(
        name, shape, "float32", 4, trainable=True, group=0, updated_whole=True, states_bytes=16 * numel
    )


def transformer(layers: int, width: int, vocabulary: int) -> list[UnitSpec]:
    def block(layer: int) -> UnitSpec:
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        shapes |= {"norm": (width,), "bias": (4 * width,)}
        return UnitSpec(f"{layer}", tuple(whole(f"{layer}.{name}", *shape) for name, shape in shapes.items()))

    return [UnitSpec("", (whole("embedding", vocabulary, width),)), *map(block, range(layers))]


def shares(units: Sequence[UnitSpec], ranks: int) -> tuple[list[int], list[int]]:
    """Bytes and arithmetic of each rank."""
    sizes, work = [0] * ranks, [0] * ranks
    owners = choose_owners(units, ranks)
    for spec in (spec for unit in units for spec in unit.parameters):
        sizes[owners[spec.name]] += spec.states_bytes
        work[owners[spec.name]] += work_of(spec.shape)
    return sizes, work


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5000), max_size=6), min_size=1, max_size=8), st.integers(2, 9))
def test_no_rank_owns_more_than_its_share_and_one_parameter(numels: list[list[int]], ranks: int) -> None:
    units = [
        UnitSpec(f"{at}", tuple(whole(f"{at}.{place}", numel) for place, numel in enumerate(of_unit)))
        for at, of_unit in enumerate(numels)
    ]
    sizes, _ = shares(units, ranks)
    largest = max((16 * numel for of_unit in numels for numel in of_unit), default=0)
    assert max(sizes) <= sum(sizes) / ranks + largest


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_bytes_and_arithmetic_of_a_transformer_are_even(ranks: int) -> None:
    for of_ranks in shares(transformer(24, 768, 1000), ranks):
        assert max(of_ranks) <= 1.06 * sum(of_ranks) / ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_large_parameter_is_made_up_for(ranks: int) -> None:
    sizes, _ = shares(transformer(12, 768, 50257), ranks)
    assert max(sizes) <= 1.02 * sum(sizes) / ranks or max(sizes) == 16 * 50257 * 768


@pytest.mark.parametrize("vocabulary", [1000, 50257])
def test_no_unit_is_one_ranks_affair(vocabulary: int) -> None:
    units = transformer(12, 768, vocabulary)
    owners = choose_owners(units, 2)
    for unit in units[1:]:
        assert {owners[spec.name] for spec in unit.parameters} == {0, 1}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20000), min_size=1, max_size=8), st.integers(2, 5), st.data())
def test_each_parameter_lies_whole_in_its_owners_share(numels: list[int], ranks: int, data: st.DataObject) -> None:
    specs = tuple(whole(f"{place}", numel) for place, numel in enumerate(numels))
    (flat,) = build_layout([UnitSpec("", specs)], page_size=PAGE, world_size=ranks).flats
    owners = choose_owners([UnitSpec("", specs)], ranks)
    assert sorted(slot.spec.name for slot in flat.slots) == sorted(spec.name for spec in specs)
    assert flat.shares[0] == 0 and flat.shares[-1] == flat.padded_numel and len(flat.shares) == ranks + 1
    assert all(end > start and end % BLOCK_BYTES == 0 for start, end in itertools.pairwise(flat.shares))
    for rank in range(ranks):
        _check_share(flat.of(rank), rank, owners)
    assert max(flat.of(rank).shard_numel for rank in range(ranks)) == flat.longest_shard_numel
    assert -(-flat.longest_shard_bytes // PAGE) == flat.shard_pages


def _check_share(flat: FlatLayout, rank: int, owners: dict[str, int]) -> None:
    (piece,) = flat.pieces(rank)
    assert (piece.full_start, piece.numel) == (flat.shard_start, flat.shard_numel)
    assert flat.owner(piece.full_start) == flat.owner(piece.full_start + piece.numel - 1) == rank
    mine = dict(flat.whole_slots())
    assert {slot.spec.name for slot in mine.values()} == {name for name, owner in owners.items() if owner == rank}
    for place, slot in mine.items():
        assert slot.start % BLOCK_BYTES == 0 and slot.end <= flat.shard_numel
        assert slot.start + flat.shard_start == flat.slots[place].start
        assert flat.owner(flat.slots[place].start) == rank


def test_one_rank_lays_out_as_ever() -> None:
    (flat,) = build_layout([UnitSpec("", (whole("a", 100),))], page_size=PAGE, world_size=1).flats
    assert not flat.shares and flat.shard_numel == 128 and [place for place, _ in flat.whole_slots()] == [0]
