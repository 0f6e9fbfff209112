"""Ranks whose tokens go to different experts: nothing hangs, and the numbers are those of plain data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import WIDTH, Tower
from kit.ranks.training import Training, fit_in_all_tiers, plain
from torch import Tensor, nn

from lightning_ptm.models.moe import Expert, MixtureOfExperts


class MoETower(Tower):
    """Blocks of ten experts, one or two a token; a batch of few distinct tokens reaches some of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            MixtureOfExperts(
                WIDTH,
                64,
                experts=10,
                choices=choices,
                capacity_factor=1.25,
                eval_capacity_factor=2.0,
                jitter=0.0,
                gated=False,
                dropout=0.0,
            )
            for choices in (1, 2)
        )
        for parameter in self.blocks.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        batch = batch % (3 + rank)
        x = self.embedding(batch[:, :-1])
        balance = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            out, routing = block(x)
            x, balance = x + out, balance + routing.balance_loss
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()) + 0.01 * balance


def idle_experts(rank: int) -> set[str]:
    """Experts that get no token of this rank's in the first step."""
    torch.manual_seed(0)
    module = MoETower()
    module.loss(torch.arange(68).view(4, 17), rank, 0).backward()
    return {name for name, inner in module.named_modules() if isinstance(inner, Expert) and inner.expand.grad is None}


def test_ranks_use_different_experts_and_some_use_none() -> None:
    first, second = idle_experts(0), idle_experts(1)
    assert first != second
    assert first & second


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"units": ["MixtureOfExperts", "Expert"], "recompute": "all"}],
    ids=["layers", "experts_recomputed"],
)
def test_two_ranks(settings: dict[str, Any], disk: Path) -> None:
    training = Training(MoETower, batches=4)
    theirs = plain(training, 2)
    tiers = ["ram", "three_tiers", "lock_free"] if settings else ["all_on_disk"]
    for rank, outcomes in enumerate(run_ranks(fit_in_all_tiers, 2, training, 2, disk, settings, tiers)):
        for ours in outcomes.values():
            ours.assert_equal(theirs[rank])
