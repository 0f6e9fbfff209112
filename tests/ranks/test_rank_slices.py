"""Units in slices on several ranks: the numbers are those of plain data parallelism in the same slices, in every tier."""

from __future__ import annotations

from pathlib import Path

import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, expected, fit_in_all_tiers, tiers_together
from torch import Tensor
from torch.nn import functional


class TowerInSlices(Tower):
    """Calls its blocks on two samples each, the last ones first, as a sliced run does."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = torch.cat([block(each) for each in reversed(x.split(2))][::-1])
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@tiers_together("three_tiers+tight")
def test_slices_are_plain_data_parallelism(tiers: list[str], disk: Path) -> None:
    ours, plain = (Training(build, "bf16-mixed", accumulate=2) for build in (Tower, TowerInSlices))
    found = run_ranks(fit_in_all_tiers, 2, ours, 2, disk, {"slices": 2}, tiers)
    theirs = expected(plain, 2)
    for of_rank, plain in zip(found, theirs, strict=True):
        for tier in tiers:
            of_rank[tier].assert_equal(plain)
