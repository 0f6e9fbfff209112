"""What lies where in a flat's tensor, on all ranks: every element of every parameter once, whatever shares it."""

from __future__ import annotations

import pytest
import torch

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.layout import FlatLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.runtime.relayout.shard_map import ShardMap, geometry

PAGE = 64 * 1024


def flat_of(ranks: int, *sizes: int, whole: bool = False, rank: int = 0) -> FlatLayout:
    specs = tuple(
        ParameterSpec(f"p{at}", (size,), "float32", 4, True, 0, updated_whole=whole, states_bytes=size)
        for at, size in enumerate(sizes)
    )
    (flat,) = build_layout([UnitSpec("", specs)], page_size=PAGE, world_size=ranks, rank=rank).flats
    return flat


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_element_is_somewhere_once(ranks: int, whole: bool) -> None:
    sizes = (100, 70_000, 1, 33_000)
    flat = flat_of(ranks, *sizes, whole=whole)
    of_slots = tuple(slot.numel for slot in flat.slots)  # in the order of owners
    assert sorted(of_slots) == sorted(sizes)
    held = ShardMap(flat, tuple(range(ranks)), (10, 11, 12, 13), torch.float32, None)
    found = held.of_parameters()
    for key, size in zip(held.keys, of_slots, strict=True):
        done = 0
        for stretch in found[key]:
            assert stretch.first == done and stretch.numel > 0
            done = stretch.stop
        assert done == size
    places = [(each.rank, each.place + at) for each in held.stretches() for at in (0, each.numel - 1) if each.numel > 1]
    assert len(places) == len(set(places))
    assert held.shape(11) == (of_slots[1],) and held.stride(11) is None


def test_what_is_the_same_lies_at_the_same_places() -> None:
    one, other = flat_of(2, 100, 200), flat_of(2, 100, 200)
    assert geometry(one, (1, 2)) == geometry(other, (1, 2))
    assert geometry(one, (1, 2)) != geometry(other, (2, 1))
    assert geometry(one, (1, 2)) != geometry(flat_of(1, 100, 200), (1, 2))
    assert geometry(one, (1, 2)) != geometry(flat_of(2, 100, 264), (1, 2))


def test_a_rank_without_elements_is_asked_for_none() -> None:
    with pytest.raises(InternalError, match="has no elements on this rank"):
        ShardMap(flat_of(1, 5), (0,), (1,), torch.float32, None).here()
