"""Tensor parallelism: a module whose parameters are cut over ranks learns what it learns whole, and ranks share all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import STEPS, WAYS, Outcome, Run, assert_same_learning, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Returns the outcome of one rank with whole parameters."""
    return run_ranks(train, 1, Run("gpt", norms=True), tmp_path_factory.mktemp("disk"))[0]


@pytest.mark.parametrize(
    ("ranks", "tensor", "tier"),
    [
        pytest.param(2, 2, "ram", marks=pytest.mark.slow),
        (4, 2, "masters_on_disk"),
        pytest.param(4, 4, "ram", marks=pytest.mark.slow),
        pytest.param(2, 2, "all_on_disk", marks=pytest.mark.slow),
        (2, 2, "lock_free"),
    ],
)
def test_it_learns_what_one_rank_learns(ranks: int, tensor: int, tier: str, whole: Outcome, disk: Path) -> None:
    outcomes = run_ranks(train, ranks, Run("gpt", ranks, tensor, tier), disk, limit_s=240)
    assert_same_learning(outcomes, whole)
    assert all(each.mesh == {"data_parallel": ranks // tensor, "tensor_parallel": tensor} for each in outcomes)


OVER_GLOO = {
    "with data, masters on disk": Run("gpt", 4, 2, "masters_on_disk", way="gloo"),
    "all on disk": Run("gpt", 2, 2, "all_on_disk", way="gloo"),
    "between sequences": Run("gpt", 2, 2, settings={"tensor_parallel": {"sequence_parallel": True}}, way="gloo"),
    "units given up": Run("gpt", 2, 2, "all_on_disk", evictions=0, way="gloo"),
}


@pytest.mark.parametrize(
    "name",
    [each if each == "between sequences" else pytest.param(each, marks=pytest.mark.slow) for each in OVER_GLOO],
)
def test_ranks_that_are_not_on_one_machine_learn_it_too(name: str, whole: Outcome, disk: Path) -> None:
    """The ranks reach each other by process groups alone."""
    how = OVER_GLOO[name]
    assert_same_learning(run_ranks(train, how.ranks, how, disk, limit_s=240), whole)


def test_two_ranks_have_the_same_bits_whichever_way_they_exchange(disk: Path) -> None:
    """The sum of two numbers is the same in either order."""
    found = [run_ranks(train, 2, Run("gpt", 2, 2, steps=3, way=way), disk) for way in WAYS]
    for near, over_gloo in zip(*found, strict=True):
        assert near.losses == over_gloo.losses
        assert all(torch.equal(near.weights[name], value) for name, value in over_gloo.weights.items())


def test_it_is_clipped_by_one_ranks_norm(disk: Path) -> None:
    clipped = {"gradient_clip_val": 0.5}
    (whole,) = run_ranks(train, 1, Run("gpt", norms=True, trainer=clipped), disk)
    outcomes = run_ranks(train, 4, Run("gpt", 4, 2, norms=True, trainer=clipped), disk, limit_s=240)
    assert_same_learning(outcomes, whole)
    for each in outcomes:
        assert each.norms == pytest.approx(whole.norms, rel=1e-12) and max(whole.norms) > 0.5


def test_recomputing_exchanges_nothing_again(whole: Outcome, disk: Path) -> None:
    plain = run_ranks(train, 2, Run("gpt", 2, 2), disk)
    recomputed = run_ranks(train, 2, Run("gpt", 2, 2, settings={"recompute": "all"}), disk)
    assert_same_learning(recomputed, whole)
    assert [each.exchanges for each in recomputed] == [each.exchanges for each in plain]
    # Two sums of a block each way, the embedding's, and the head's outputs and input gradient; and the proof of a block.
    assert plain[0].exchanges == STEPS * (2 * 4 + 1 + 2) + 4 + 1


@pytest.mark.parametrize(("ranks", "tensor"), [pytest.param(2, 2, marks=pytest.mark.slow), (4, 2)])
def test_each_element_has_one_owner(ranks: int, tensor: int, disk: Path) -> None:
    """Also of what every rank has whole: its pages are shared by all."""
    sizes = {"width": 256, "layers": 2}
    (whole,) = run_ranks(train, 1, Run("gpt", steps=1, sizes=sizes), disk)
    for each in run_ranks(train, ranks, Run("gpt", ranks, tensor, steps=1, sizes=sizes), disk, limit_s=240):
        for states, count in whole.state_bytes.items():
            assert each.state_bytes[states] <= 1.04 * count / ranks, states
