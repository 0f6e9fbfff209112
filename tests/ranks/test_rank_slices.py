"""Units in slices on several ranks: the numbers are those of plain data parallelism in the same slices, in every tier; and of
one rank where ranks divide layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.tensor_models import Run, assert_same_learning, train
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


IN_SLICES = {"slices": {"blocks.*": 2, "*.feed_forward": ("tokens", 3)}}
BY_TRIAL = {"slices": {"auto": ("tokens", 3)}, "recompute": "all"}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}
CLIPPED = {"gradient_clip_val": 0.5}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(Run("gpt", 2, 2, "all_on_disk", settings=IN_SLICES, trainer=CLIPPED), id="all on disk, clipped"),
        pytest.param(
            Run("gpt", 2, 2, settings={"slices": 2} | SEQUENCE, trainer=CLIPPED), id="tokens over ranks, clipped"
        ),
        pytest.param(Run("gpt", 2, 2, "lock_free", settings=IN_SLICES), id="lock-free", marks=pytest.mark.slow),
        pytest.param(Run("gpt", 2, 2, settings=BY_TRIAL, way="gloo"), id="by trial", marks=pytest.mark.slow),
        pytest.param(
            Run("gpt", 4, 2, "all_on_disk", settings=IN_SLICES, evictions=0), id="with data", marks=pytest.mark.slow
        ),
        pytest.param(Run("llama", 2, 2, settings={"slices": 2}), id="Transformers' Llama", marks=pytest.mark.slow),
    ],
)
def test_slices_of_divided_layers_learn_what_one_rank_learns(how: Run, disk: Path) -> None:
    (whole,) = run_ranks(train, 1, Run(how.model, trainer=how.trainer), disk)
    assert_same_learning(run_ranks(train, how.ranks, how, disk, limit_s=240), whole)
