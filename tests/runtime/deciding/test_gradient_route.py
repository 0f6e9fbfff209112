"""The route of a gradient: each question that decides it, alone and together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_ptm.runtime.deciding.gradient_route import GradientUse, Passes, Until, Waits, route
from lightning_ptm.terms import TIERS, Tier


def waits(home: Tier = Tier.DEVICE, until: Until = Until.BACKWARD, **asked: Any) -> Waits:
    return route(home, torch.bfloat16, GradientUse(until=until, **{"passes": Passes.AS_LEFT, **asked})).waits


def test_where_it_waits() -> None:
    copied = {"passes": Passes.COPIED}
    assert waits() is Waits.IN_GRAD
    assert waits(until=Until.STEP) is waits(until=Until.CLEARED) is Waits.IN_GRAD
    assert waits(lock_free=True) is Waits.IN_GRAD
    assert waits(**copied) is Waits.PASSING
    assert waits(Tier.HOST) is waits(Tier.DISK, **copied) is Waits.FROM_FIRST
    assert waits(Tier.HOST, Until.STEP) is waits(until=Until.CLEARED, **copied) is Waits.KEPT
    assert waits(Tier.HOST, Until.STEP, lock_free=True) is waits(lock_free=True, **copied) is Waits.QUEUED


USES = [
    GradientUse(
        until=until, passes=passes, widens=widens, lock_free=lock_free, transformed=changed, reduced_at_step=late
    )
    for until, passes, widens, lock_free, changed, late in itertools.product(Until, Passes, *[(False, True)] * 4)
]


@pytest.mark.parametrize("home", TIERS, ids=str)
def test_every_use(home: Tier) -> None:
    for use in USES:
        found = route(home, torch.float32, use)
        in_grad = use.passes is Passes.AS_LEFT and home is Tier.DEVICE
        assert (found.waits is Waits.IN_GRAD) == in_grad
        assert found.tier is home and found.dtype is torch.float32
        assert found.until is use.until and found.reduced_at_step == use.reduced_at_step
        assert found.adds_up_in_grad == (in_grad or use.reduced_at_step)
        # The pages of what waits in `.grad`, or travels, are not its own.
        own = not in_grad and not use.lock_free
        assert found.own_pages is (home if own else None)
        assert (found.waits is Waits.KEPT) == (own and use.until is not Until.BACKWARD)
        assert found.waits is not Waits.PASSING or home is Tier.DEVICE
        assert found.clips_in_place == (use.until is Until.CLEARED or (in_grad and not use.widens))
        kept = use.until is Until.STEP and not (use.widens and use.transformed)
        assert found.outlives_step == (use.until is Until.CLEARED or kept)
