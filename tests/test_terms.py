from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from lightning_ptm.terms import TIERS, Tier

TAPE = dataclasses.replace(Tier.DISK, name="TAPE")


@pytest.mark.parametrize("tier", [*TIERS, TAPE], ids=str)
def test_a_copy_of_a_tier_is_the_tier_itself(tier: Tier) -> None:
    assert copy.copy(tier) is tier
    assert copy.deepcopy({tier: 1}) == {tier: 1}


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_a_built_in_tier_is_unpickled_as_that_of_the_process(tier: Tier) -> None:
    assert pickle.loads(pickle.dumps(tier)) is tier


def test_a_further_tier_is_unpickled_with_its_properties() -> None:
    there, key = pickle.loads(pickle.dumps((TAPE, {TAPE: 1})))
    assert (there.name, there.addressable, there.toward) == ("TAPE", False, Tier.HOST)
    assert key[there] == 1
