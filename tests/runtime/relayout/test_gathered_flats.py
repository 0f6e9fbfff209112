"""Which values count, and where they are, on one rank. Several ranks: tests/ranks."""

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
        flats = list(made.gathered_flats.flats())
        assert [store.unit.name for store, _, _ in flats] == ["", "", "blocks.0", "blocks.1"]
        assert [each for _, each, _ in flats] == list(made.gathered_flats.bindings())
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
