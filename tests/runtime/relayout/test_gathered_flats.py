"""Values that count, and where they are, on one rank. Several ranks: tests/ranks.

What lies where in a flat's tensor, on all ranks: every element of every parameter once, whatever shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from values_by_hand import MIXED, PLACES, Odd, copies, run_of

from lightning_ptm.comm import Work
from lightning_ptm.errors import InternalError
from lightning_ptm.planning.layout import FlatLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.runtime.relayout.gathered_flats import ShardMap, _gathered, geometry
from lightning_ptm.terms import Tier


def test_masters_are_the_homes_that_count(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "masters on disk", **MIXED) as made:
        made.take_over()
        flat = next(flat for flat in made.stores[1].flats)
        assert flat.home.tier is Tier.DEVICE and flat.home.dtype is torch.bfloat16
        assert made.values.precise(flat).dtype is torch.float32
        (update,) = made.flats[1]
        assert made.gathered_flats.precise_map(flat).segments(0) == update.states.segments


@pytest.mark.parametrize("place", list(PLACES))
def test_what_there_is_in_order(disk: Path, place: str) -> None:
    module = Odd()
    before = copies(module)
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over(keep_frozen=True)
        flats = list(made.gathered_flats.flats)
        assert [store.unit.name for store, _, _ in flats] == ["", "", "blocks.0", "blocks.1"]
        assert [each for _, each, _ in flats] == list(made.gathered_flats.bindings)
        assert {name: each.shape for name, each in made.gathered_flats.names()} == {
            k: v.shape for k, v in before.items()
        }
        shapes = made.gathered_flats.shapes()
        assert all(shapes[id(each)] == before[name].shape for name, each in made.gathered_flats.names())
        for store, binding, flat in flats:
            assert flat is not None and made.gathered_flats.source(store) is None
            assert (
                (made.gathered_flats.master(flat) is None)
                == (made.gathered_flats.update_of(flat) is None)
                == (not flat.layout.trainable)
            )
            home = made.gathered_flats.precise_home(flat)
            assert home is (made.gathered_flats.master(flat) or flat.values)
            masters = 0 if home is flat.values else home.nbytes
            assert made.gathered_flats.bytes_of_homes(flat) == flat.values.nbytes + masters
            whole = made.gathered_flats.broadcast(
                store, binding, made.gathered_flats.whole(flat, made.gathered_flats.precise_map(flat))
            )
            for slot, named in enumerate(binding.layout.slots):
                expected = before[named.spec.name].to(whole.dtype)
                assert torch.equal(binding.arrangement.view(whole, slot), expected), named.spec.name


class Late:
    """A communicator by which nothing comes before somebody waits for it."""

    def gather_shares(self, share: Tensor | None, full: Tensor, shares: Sequence[int]) -> Work:
        return Work(finish=lambda: full.copy_(torch.arange(shares[-1])))


def test_states_of_other_owners_have_come_when_they_are_read(disk: Path) -> None:
    store: Any = SimpleNamespace(
        layout=SimpleNamespace(shared=True), binding=SimpleNamespace(device="cpu"), communicator=Late()
    )
    held: Any = SimpleNamespace(own=SimpleNamespace(shares=(0, 2, 5)), dtype=torch.float32, elements=None)
    with run_of(Odd(), disk, "masters on disk", **MIXED) as made:
        assert made.gathered_flats.whole(store, held).tolist() == [0, 1, 2, 3, 4]


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


class Pieces:
    """Two ranks' shards of a flat, of which a collective sends no more than it is asked for."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self.shards = shards
        self.sent: list[int] = []

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        (done,) = {int((each == shard[0]).nonzero()) for each in self.shards if shard[0] in each}
        assert full.numel() == flat.padded_numel and flat.padded_numel == 2 * flat.shard_numel
        self.sent.append(full.numel())
        return Work(finish=lambda: full.copy_(torch.cat([each[done:][: flat.shard_numel] for each in self.shards])))


def test_whole_flats_are_gathered_by_the_stripe() -> None:
    """At the end of a run, pages may leave the device no room for more."""
    unit = UnitSpec("", tuple(ParameterSpec(f"p{n}", (3, 20000), "float32", 4, True, 0) for n in range(2)))
    (layout,) = build_layout([unit], world_size=2, page_size=65536).flats
    numel = 2 * layout.piece_numel
    assert layout.stripes == 3 and layout.tail_piece_numel
    elements = torch.arange(layout.padded_numel)
    stripes = [elements[: 3 * numel].view(3, 2, -1), elements[3 * numel :].view(1, 2, -1)]
    shards = [torch.cat([each[:, rank].flatten() for each in stripes]) for rank in range(2)]
    ranks = Pieces(shards)
    store: Any = SimpleNamespace(layout=layout, binding=SimpleNamespace(device=torch.device("cpu")), communicator=ranks)
    assert torch.equal(_gathered(store, shards[1], torch.device("cpu")), elements)
    assert ranks.sent == [*[numel] * 3, layout.padded_numel - 3 * numel]
