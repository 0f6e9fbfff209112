"""Units in slices on several ranks: the numbers are those of plain data parallelism in the same slices, in every tier; and of
one rank where ranks divide layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.tensor_models import Outcome, Run, assert_same_learning, train
from kit.ranks.training import ClippedInFp64, Training, expected, fit_in_all_tiers, tiers_together, tokens
from torch import Tensor, nn
from torch.nn import functional

from lightning_ptm.runtime.autograd.slices import CutArguments
from lightning_ptm.runtime.autograd.slices_check import CallBytes, SlicesCheck
from lightning_ptm.runtime.autograd.token_slices import TokenSlices


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


def test_clipped_slices_are_plain_data_parallelism_clipped_by_a_norm_in_fp64(disk: Path) -> None:
    ours, plain = (Training(build, "bf16-mixed", accumulate=2, clip=0.2) for build in (Tower, TowerInSlices))
    tiers = ["ram", "tight"]
    found = run_ranks(fit_in_all_tiers, 2, ours, 2, disk, {"slices": 2}, tiers)
    theirs = ClippedInFp64(plain, 2).run(tokens(plain, 2))
    for of_rank, of_plain in zip(found, theirs, strict=True):
        for tier in tiers:
            of_rank[tier].assert_equal(of_plain)


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


def train_where_trials_differ(how: Run, disk: Path) -> tuple[Outcome, set[str]]:
    """One rank's part; the second rank finds no module worth while. Returns the modules that this rank has cut, too."""
    cut = set[str]()
    saves, recomputed = SlicesCheck.saves_more_than_inputs, TokenSlices._recomputed

    def saves_on_the_first_rank(self: SlicesCheck, call: CutArguments) -> bool:
        return saves(self, call) and os.environ["RANK"] == "0"

    def noted(self: TokenSlices, *args: object, **kwargs: object) -> object:
        cut.add(type(self._module).__name__)
        return recomputed(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlicesCheck, "saves_more_than_inputs", saves_on_the_first_rank)
        patch.setattr(TokenSlices, "_recomputed", noted)
        return train(how, disk), cut


@pytest.mark.parametrize(
    ("tensor", "tier", "settings"),
    [
        pytest.param(2, "ram", {}, id="tensor"),
        pytest.param(1, "all_on_disk", {"recompute": "all"}, id="data"),
    ],
)
def test_ranks_whose_trials_differ(tensor: int, tier: str, settings: dict[str, object], disk: Path) -> None:
    """Ranks that exchange in a module cut it together or not at all; others may differ."""
    (whole,) = run_ranks(train, 1, Run("gpt"), disk)
    how = Run("gpt", 2, tensor, tier, settings={"slices": {"auto": ("tokens", 3)}} | settings)
    outcomes, cut = zip(*run_ranks(train_where_trials_differ, 2, how, disk), strict=True)
    assert_same_learning(outcomes, whole)
    assert cut[1] == set()
    assert ("FeedForward" in cut[0]) == (tensor == 1)


class EvalFromStep4(L.Callback):
    """Makes calls of the norms another kind."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        if trainer.global_step >= 4:
            for each in module.modules():
                if isinstance(each, nn.LayerNorm):
                    each.eval()


def train_where_one_rank_cuts_norms(how: Run, disk: Path) -> tuple[Outcome, set[str]]:
    """One rank's part; returns the modules that this rank has cut, too."""
    cut = set[str]()
    saves, recomputed = SlicesCheck.saves_more_than_inputs, TokenSlices._recomputed

    def saves_in_norms_of_the_first_rank(self: SlicesCheck, call: CutArguments) -> bool:
        is_norm = isinstance(self._unit.module, nn.LayerNorm)
        return os.environ["RANK"] == "0" if is_norm else saves(self, call)

    def noted(self: TokenSlices, *args: object, **kwargs: object) -> object:
        cut.add(type(self._module).__name__)
        return recomputed(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_ptm.runtime.autograd.token_slices._LEAST_TOKENS", 1)
        patch.setattr("lightning_ptm.runtime.autograd.token_slices.chosen_count", lambda *_: 2)
        patch.setattr(SlicesCheck, "saves_more_than_inputs", saves_in_norms_of_the_first_rank)
        patch.setattr(TokenSlices, "_recomputed", noted)
        return train(how, disk, EvalFromStep4()), cut


def test_ranks_ask_for_one_number_of_slices_of_a_module_that_only_one_of_them_cuts(disk: Path) -> None:
    (whole,) = run_ranks(train, 1, Run("gpt"), disk)
    how = Run("gpt", 2, 2, "ram", settings={"slices": {"auto": ("tokens", "auto")}})
    outcomes, cut = zip(*run_ranks(train_where_one_rank_cuts_norms, 2, how, disk), strict=True)
    assert_same_learning(outcomes, whole)
    assert cut[0] - cut[1] == {"LayerNorm"}


def train_where_bytes_differ(how: Run, disk: Path) -> tuple[Outcome, set[int]]:
    """One rank's part; a call on the second rank seems to save four times as much. Returns the numbers of slices, too."""
    counts, measured, call = set[int](), SlicesCheck.bytes_of_token, CutArguments.slices

    def more_on_the_second_rank(self: SlicesCheck, cut: CutArguments) -> CallBytes:
        found = measured(self, cut)
        more = os.environ["RANK"] == "1" and found.saved >= 2 * found.given  # so that ranks agree what is worth while
        return found._replace(saved=4 * found.saved) if more else found

    def noted(self: CutArguments, sizes: Sequence[int]) -> list[list[object]]:
        counts.add(len(sizes))
        return call(self, sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_ptm.runtime.autograd.token_slices._LEAST_TOKENS", 1)
        patch.setattr(SlicesCheck, "bytes_of_token", more_on_the_second_rank)
        patch.setattr(CutArguments, "slices", noted)
        return train(how, disk), counts


@pytest.mark.parametrize("name", ["auto", "*.feed_forward"])
def test_ranks_that_exchange_in_a_module_choose_one_number_of_slices(name: str, disk: Path) -> None:
    (whole,) = run_ranks(train, 1, Run("gpt"), disk)
    how = Run("gpt", 2, 2, "ram", settings={"slices": {name: ("tokens", "auto")}})
    outcomes, counts = zip(*run_ranks(train_where_bytes_differ, 2, how, disk), strict=True)
    assert_same_learning(outcomes, whole)
    assert counts[0] == counts[1] != set()


def test_slices_of_dense_units_beside_divided_experts(disk: Path) -> None:
    slices = {"*.blocks.0": 2, "auto": ("tokens", 3)}
    how = Run("t5_moe", 2, 1, "all_on_disk", settings={"expert_parallel_size": 2, "slices": slices})
    (whole,) = run_ranks(train, 1, Run("t5_moe", 2).on_one_by_batches(), disk)
    assert_same_learning(run_ranks(train, 2, how, disk), whole)
