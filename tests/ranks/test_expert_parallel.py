"""Experts that ranks divide among them: the numbers of plain data parallelism, wherever the experts are.

Against the plain loop of rank_training.py, which knows one process only. In float64, where what differs (a matrix product
over the tokens of several ranks instead of a sum of products) is far below what any mistake would show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import run_ranks
from rank_models import MomentumTower
from rank_training import Outcome, Training, fit_in_all_tiers, plain
from test_rank_experts import MoETower

BOUND = 1e-9


class MomentumMoE(MoETower, MomentumTower):
    """With an optimizer that does not forgive gradients of another scale, as Adam does."""


def assert_near(ours: Outcome, theirs: Outcome, bound: float = BOUND) -> None:
    assert all(torch.isfinite(loss) for loss in ours.losses)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=bound)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("world_size", "size", "settings", "tiers"),
    [
        (2, 2, {}, ["ram", "all_on_disk", "three_tiers"]),
        (2, 2, {"recompute": "all"}, ["ram", "masters_on_disk", "lock_free"]),
        (3, 3, {}, ["ram", "three_tiers"]),  # 4, 3 and 3 of the ten experts
        (4, 2, {"recompute": "every 2nd"}, ["all_on_disk", "lock_free"]),
    ],
    ids=["two", "two_recomputed", "three", "two_groups"],
)
def test_training(world_size: int, size: int, settings: dict[str, Any], tiers: list[str], disk: Path) -> None:
    training = Training(MomentumMoE, "64-true", batches=3, clip=0.5)
    theirs = plain(training, world_size)
    given = {"units": ["MixtureOfExperts", "Expert"], "expert_parallel_size": size, **settings}
    for rank, outcomes in enumerate(run_ranks(fit_in_all_tiers, world_size, training, world_size, disk, given, tiers)):
        for ours in outcomes.values():
            assert_near(ours, theirs[rank])
