"""What becomes of activations: the replay of a step by hand, and the search against every choice of a small model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.planning.activation_choice import (
    ActivationCosts,
    Handling,
    OffloadTarget,
    UnitCost,
    choose,
    handling_of,
    replay,
)
from lightning_ptm.terms import Tier

BLOCK = UnitCost(forward_s=1.0, backward_s=2.0, saved_bytes=100, input_bytes=10)
FAST = {Tier.HOST: OffloadTarget(200.0, 200.0), Tier.DISK: OffloadTarget(25.0, 25.0)}


def blocks(count: int, room: float, **more: object) -> ActivationCosts:
    return ActivationCosts((BLOCK,) * count, room, **more)  # type: ignore[arg-type]


def test_each_handling_has_its_properties_and_is_found_by_them() -> None:
    for handling in Handling:
        assert handling_of(handling.recomputes, handling.tier) is handling


def test_kept_activations_add_up() -> None:
    found = replay(blocks(3, 0.0, root_bytes=7), [Handling.KEEP] * 3)
    assert (found.seconds, found.peak_bytes, found.away_bytes) == (9.0, 7 + 300 + 20, {})


def test_recomputed_units_keep_their_inputs_and_take_a_forward_more() -> None:
    found = replay(blocks(3, 0.0), [Handling.RECOMPUTE] * 3)
    assert (found.seconds, found.peak_bytes) == (12.0, 30 + 100 + 20)


def test_a_fast_link_costs_nothing_and_leaves_two_units_on_the_device() -> None:
    found = replay(blocks(4, 0.0, targets=FAST), [Handling.HOST] * 4)
    assert found.seconds == 12.0 and found.away_bytes == {Tier.HOST: 400}
    assert found.peak_bytes == 200 + 20


def test_compute_waits_for_a_slow_link_in_both_directions() -> None:
    # Each write takes 4 s. The write of a unit has to end before the call after the next begins; the last is not awaited.
    found = replay(blocks(3, 0.0, targets=FAST), [Handling.DISK] * 3)
    assert found.seconds == pytest.approx(1 + 4 + 4 + 4 + 4 + 2 + 2 + 2, abs=4)
    assert found.seconds > 9.0


def test_of_several_places_each_has_its_own_link() -> None:
    one = replay(blocks(8, 0.0, targets=FAST), [Handling.DISK] * 8).seconds
    both = replay(blocks(8, 0.0, targets=FAST), [Handling.DISK, Handling.HOST] * 4).seconds
    assert both < one


def test_temporaries_of_a_forward_and_of_a_backward_are_in_the_peak() -> None:
    unit = UnitCost(1.0, 2.0, 100, 10, beside_bytes=70)
    assert (
        replay(ActivationCosts((unit, BLOCK), 0.0), [Handling.KEEP] * 2).peak_bytes == 220
    )  # the second one's backward
    assert replay(ActivationCosts((BLOCK, unit), 0.0), [Handling.KEEP] * 2).peak_bytes == 270
    assert replay(ActivationCosts((unit,), 0.0), [Handling.RECOMPUTE]).peak_bytes == 180
    wide = UnitCost(1.0, 2.0, 100, 10, beside_bytes=400)
    costs = ActivationCosts((wide,), 0.0)
    assert replay(costs, [Handling.RECOMPUTE]).peak_bytes == 510
    assert (
        replay(ActivationCosts((BLOCK,), 0.0, loss_bytes=90), [Handling.KEEP]).peak_bytes == 190
    )  # before the backward


def test_where_memory_suffices_all_is_kept() -> None:
    assert choose(blocks(5, 520.0, targets=FAST)) == (Handling.KEEP,) * 5


def test_the_last_units_are_kept_since_the_first_have_time_to_return() -> None:
    found = choose(blocks(8, 500.0, targets={Tier.HOST: OffloadTarget(101.0, 101.0)}, recomputes=False))
    assert found[-1] is Handling.KEEP and found[0] is Handling.HOST
    assert replay(blocks(8, 500.0, targets=FAST), found).seconds == 24.0


def test_places_have_room_of_their_own() -> None:
    targets = {Tier.HOST: OffloadTarget(200.0, 200.0, room_bytes=250)}
    costs = blocks(8, 340.0, targets=targets)
    found = choose(costs)
    assert replay(costs, found).fits(costs)
    assert sum(handling is Handling.HOST for handling in found) <= 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(UnitCost, st.floats(0.1, 2.0), st.floats(0.1, 4.0), st.integers(20, 200), st.integers(1, 19)),
        min_size=1,
        max_size=4,
    ),
    st.floats(0.1, 1.0),
    st.floats(20.0, 400.0),
    st.floats(5.0, 100.0),
)
def test_the_search_finds_nearly_the_best_of_all_choices(
    units: list[UnitCost], share: float, host: float, disk: float
) -> None:
    kept = replay(ActivationCosts(tuple(units), 0.0), [Handling.KEEP] * len(units)).peak_bytes
    targets = {Tier.HOST: OffloadTarget(host, host, room_bytes=150), Tier.DISK: OffloadTarget(disk, disk)}
    costs = ActivationCosts(tuple(units), kept * share, targets=targets)
    found = replay(costs, choose(costs))
    every = [replay(costs, handlings) for handlings in itertools.product(Handling, repeat=len(units))]
    fitting = [each.seconds for each in every if each.fits(costs)]
    assert found.fits(costs) is bool(fitting) or not fitting
    if found.fits(costs):
        assert found.seconds <= 1.05 * min(fitting)
    else:
        assert not fitting and found.peak_bytes <= kept
