"""The route of a gradient: each question that decides it, alone and together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_ptm.runtime.deciding.gradient_route import Waits, route
from lightning_ptm.terms import TIERS, Tier

PLAIN: dict[str, Any] = {
    "one_rank": True,
    "sums": False,
    "widens": False,
    "lock_free": False,
    "reduced_at_step": False,
    "outlives_backward": False,
    "outlives_step": False,
}


def waits(home: Tier = Tier.DEVICE, **differences: bool) -> Waits:
    return route(home, torch.bfloat16, **{**PLAIN, **differences}).waits


def test_where_it_waits() -> None:
    assert waits() is Waits.IN_GRAD
    assert waits(outlives_backward=True) is Waits.IN_GRAD
    assert waits(lock_free=True) is Waits.IN_GRAD
    assert waits(sums=True) is waits(one_rank=False) is Waits.PASSING
    assert waits(Tier.HOST) is waits(Tier.DISK, one_rank=False) is Waits.FROM_FIRST
    assert waits(Tier.HOST, outlives_backward=True) is waits(one_rank=False, outlives_backward=True) is Waits.KEPT
    assert waits(Tier.HOST, lock_free=True, outlives_backward=True) is waits(sums=True, lock_free=True) is Waits.QUEUED


@pytest.mark.parametrize("home", TIERS, ids=str)
def test_every_combination(home: Tier) -> None:
    for values in itertools.product((False, True), repeat=len(PLAIN)):
        asked = dict(zip(PLAIN, values, strict=True))
        found = route(home, torch.float32, **asked)
        in_grad = asked["one_rank"] and home is Tier.DEVICE and not asked["sums"]
        assert (found.waits is Waits.IN_GRAD) == in_grad
        assert found.tier is home and found.dtype is torch.float32
        for name in ("reduced_at_step", "outlives_backward", "outlives_step"):
            assert getattr(found, name) == asked[name]
        assert found.adds_up_in_grad == (in_grad or asked["reduced_at_step"])
        # The pages of what waits in `.grad`, or travels, are not its own.
        own = not in_grad and not asked["lock_free"]
        assert found.own_pages is (home if own else None)
        assert (found.waits is Waits.KEPT) == (own and asked["outlives_backward"])
        assert found.waits is not Waits.PASSING or home is Tier.DEVICE
        assert found.clips_in_place == (asked["outlives_step"] or (in_grad and not asked["widens"]))
