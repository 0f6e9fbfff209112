from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from lightning_ptm.terms import TIERS, Link, Tier

TAPE = dataclasses.replace(Tier.DISK, name="TAPE")


@pytest.mark.parametrize("tier", [*TIERS, TAPE], ids=str)
def test_a_copy_of_a_tier_is_the_tier_itself(tier: Tier) -> None:
    assert copy.copy(tier) is tier
    assert copy.deepcopy({tier: 1}) == {tier: 1}


@pytest.mark.parametrize("tier", [*TIERS, TAPE], ids=str)
def test_a_tier_is_unpickled_as_that_of_the_process(tier: Tier) -> None:
    there, key = pickle.loads(pickle.dumps((tier, {tier: 1})))
    assert there is tier and key[tier] == 1


def test_tiers_are_one_object_if_and_only_if_they_have_the_same_values() -> None:
    assert dataclasses.replace(TAPE, setting="") is dataclasses.replace(TAPE, setting="") is not TAPE
    assert dataclasses.replace(TAPE) is TAPE
    assert dataclasses.replace(TAPE, update_link=Link.UPDATE_HOST) != TAPE
