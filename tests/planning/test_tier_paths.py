from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace

import pytest

from lightning_ptm.planning.placement_data import Budget
from lightning_ptm.planning.tier_paths import links_between, path_to_compute
from lightning_ptm.terms import TIERS, Link, Tier

from .models import BESIDE

DEVICE, HOST, DISK = TIERS
ALL = (*TIERS, BESIDE)


def test_a_way_passes_what_is_there() -> None:
    assert path_to_compute(DISK, TIERS) == [DISK, HOST, DEVICE]
    assert path_to_compute(DISK, [DEVICE, DISK]) == [DISK, DEVICE]
    assert path_to_compute(BESIDE, ALL) == [BESIDE, HOST, DEVICE]
    assert path_to_compute(DEVICE, []) == [DEVICE]


@pytest.mark.parametrize(
    ("source", "target", "links"),
    [
        (DISK, DEVICE, [Link.DISK_READ, Link.HOST_TO_DEVICE]),
        (DEVICE, DISK, [Link.DEVICE_TO_HOST, Link.DISK_WRITE]),
        (HOST, DISK, [Link.DISK_WRITE]),
        (DISK, HOST, [Link.DISK_READ]),
        (HOST, DEVICE, [Link.HOST_TO_DEVICE]),
        (DISK, DISK, []),
        (BESIDE, DISK, [Link.HOST_TO_DEVICE, Link.DISK_WRITE]),  # up to the host, which both pass, and no further
    ],
    ids=str,
)
def test_a_copy_takes_the_links_of_both_ways_as_far_as_they_differ(
    source: Tier, target: Tier, links: list[Link]
) -> None:
    assert links_between(source, target, ALL) == links


def test_without_a_host_the_disk_is_read_to_where_compute_is() -> None:
    assert links_between(DISK, DEVICE, [DEVICE, DISK]) == [Link.DISK_READ]
    assert links_between(DEVICE, DISK, [DEVICE, DISK]) == [Link.DISK_WRITE]


def test_a_way_back_takes_as_many_links() -> None:
    for source, target in itertools.permutations(ALL, 2):
        assert len(links_between(source, target, ALL)) == len(links_between(target, source, ALL)) > 0


def test_a_budget_lists_its_tiers_from_compute_on_and_has_nothing_of_others() -> None:
    budget = Budget({DISK: 3, BESIDE: 2, DEVICE: 1})
    assert list(budget.items()) == [(DEVICE, 1), (BESIDE, 2), (DISK, 3)]
    assert budget[HOST] == 0 and HOST not in budget
    assert budget.without(DISK, 2) == Budget({DEVICE: 1, BESIDE: 2, DISK: 1})


def test_what_is_updated_elsewhere_goes_to_staging() -> None:
    assert [tier.updated_in(HOST) for tier in ALL] == [DEVICE, HOST, HOST, BESIDE]
    assert replace(BESIDE, update_link=None).updated_in(HOST) is HOST


@pytest.mark.parametrize("tier", ALL, ids=str)
def test_a_row_that_was_copied_is_the_same_tier(tier: Tier) -> None:
    for other in (copy.deepcopy(tier), pickle.loads(pickle.dumps(tier))):
        assert {tier: 1}[other] == 1
    assert len(set(ALL)) == len(ALL)
