"""Frozen weights in codes on several ranks: gathered as codes, with the values that one rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import SkipsABlock
from kit.ranks.tensor_models import Run, assert_same_learning, train
from kit.ranks.training import TIERS, Training, fit_in_all_tiers, plain
from test_rank_experts import MoETower
from torch import nn

from lightning_ptm.memory.quantization import rounded
from lightning_ptm.models.moe import Expert
from lightning_ptm.terms import ALIGN_NUMEL, CODES

CODE = CODES["nf4"]


class Frozen(SkipsABlock):
    """Matrices of blocks are frozen; one rank leaves a block out at some steps."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.matrices():
            parameter.requires_grad_(False)

    def matrices(self) -> list[nn.Parameter]:
        return [each for block in self.blocks for each in (block.up.weight, block.down.weight)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)


class RoundedBefore(Frozen):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.matrices():
            assert parameter.numel() % ALIGN_NUMEL == 0
            parameter.data = rounded(parameter.data.flatten(), CODE).view(parameter.shape)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)  # the loop goes through all


@pytest.mark.slow_unless("tiers0-3")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("tiers", [["ram", "all_on_disk"], ["three_tiers", "lock_free"]])
def test_any_number_of_ranks_has_the_numbers_of_weights_that_were_rounded_before(
    world_size: int, tiers: list[str], disk: Path
) -> None:
    assert set(tiers) < set(TIERS)
    theirs = plain(Training(RoundedBefore), world_size)
    settings: dict[str, Any] = {"frozen_dtype": CODE.name}
    ours = run_ranks(fit_in_all_tiers, world_size, Training(Frozen), world_size, disk, settings, tiers)
    for rank, by_tier in enumerate(ours):
        for outcome in by_tier.values():
            outcome.assert_equal(theirs[rank])


class FrozenExperts(MoETower):
    """Experts are frozen; what is around them learns."""

    def __init__(self) -> None:
        super().__init__()
        for inner in self.modules():
            if isinstance(inner, Expert):
                inner.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


@pytest.mark.parametrize(
    "tier", [*(pytest.param(tier, marks=pytest.mark.slow) for tier in ("ram", "all_on_disk")), "three_tiers"]
)
def test_divided_experts_compute_with_the_same_codes(tier: str, disk: Path) -> None:
    training = Training(FrozenExperts, "64-true", batches=3)
    settings = {"units": ["MixtureOfExperts", "Expert"], "frozen_dtype": CODE.name}
    whole = run_ranks(fit_in_all_tiers, 2, training, 2, disk, settings, ["ram"])
    divided = run_ranks(fit_in_all_tiers, 2, training, 2, disk, {**settings, "expert_parallel_size": 2}, [tier])
    exact = run_ranks(fit_in_all_tiers, 2, training, 2, disk, {"units": settings["units"]}, ["ram"])
    for ours, theirs, uncoded in zip(divided, whole, exact, strict=True):
        torch.testing.assert_close(ours[tier].losses, theirs["ram"].losses, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours[tier].weights, theirs["ram"].weights, rtol=0, atol=1e-9)
        assert not torch.equal(theirs["ram"].losses[0], uncoded["ram"].losses[0])


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["ram", "all_on_disk"])
def test_divided_layers_learn_what_one_rank_learns_with_the_same_codes(tier: str, disk: Path) -> None:
    """Rows of each part are multiples of a block."""
    pytest.importorskip("peft", reason="trains adapters of theirs")
    sizes = {"lora": True, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    how = Run("llama", 2, 2, tier, settings={"frozen_dtype": CODE.name}, sizes=sizes)
    (whole,) = run_ranks(train, 1, how.on_one(), disk)
    outcomes = run_ranks(train, 2, how, disk, limit_s=240)
    assert_same_learning(outcomes, whole)
    for mine in outcomes:
        assert all(
            torch.equal(mine.weights[name], whole.weights[name]) for name in mine.weights if "base_layer" in name
        )
