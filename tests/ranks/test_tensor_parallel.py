"""Tensor parallelism: a module whose parameters are cut over ranks learns what it learns whole, and ranks share all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_harness import run_ranks
from rank_tensor_models import STEPS, Outcome, Run, assert_same_learning, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What one rank with whole parameters learns."""
    return run_ranks(train, 1, Run("gpt", norms=True), tmp_path_factory.mktemp("disk"))[0]


@pytest.mark.parametrize(
    ("ranks", "tensor", "tier"),
    [
        pytest.param(2, 2, "ram", marks=pytest.mark.in_turn),
        (4, 2, "masters_on_disk"),
        pytest.param(4, 4, "ram", marks=pytest.mark.in_turn),
        pytest.param(2, 2, "all_on_disk", marks=pytest.mark.in_turn),
        (2, 2, "lock_free"),
    ],
)
def test_it_learns_what_one_rank_learns(ranks: int, tensor: int, tier: str, whole: Outcome, disk: Path) -> None:
    outcomes = run_ranks(train, ranks, Run("gpt", ranks, tensor, tier), disk, limit_s=240)
    assert_same_learning(outcomes, whole)
    assert all(each.mesh == {"data_parallel": ranks // tensor, "tensor_parallel": tensor} for each in outcomes)


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
