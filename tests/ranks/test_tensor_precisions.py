"""Tensor parallelism in 16 bits: gradients are one rank's but for rounding, and an overflow skips the step on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import Blocks, loader, trainer_of, weights_of
from kit.ranks.tensor_models import MODELS, Held, Outcome, PreciseGPT, Run, Unbounded, train
from torch import Tensor, nn

from lightning_ptm import AngelPTMPrecision
from lightning_ptm.update.loss_scale import LossScale

RATE = 0.1


class GPTBySGD(PreciseGPT):
    """Model that moves by its gradients."""

    def __init__(self, rate: float = RATE, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rate = rate

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class LlamaBySGD(Held):
    def __init__(self, rate: float = RATE, **sizes: Any) -> None:
        super().__init__("llama", rate=rate, **sizes)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


MODELS |= {"gpt by SGD": GPTBySGD, "llama by SGD": LlamaBySGD}


def learn(how: Run, disk: Path) -> Outcome:
    """Calls `train`. Defined here so that the rank processes import this module, which adds to MODELS."""
    return train(how, disk)


def moved(after: Outcome, before: Outcome) -> dict[str, Tensor]:
    return {name: (value - before.weights[name]).float() for name, value in after.weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("steps", [1, 12])
def test_every_parameter_moves_as_on_one_rank_but_for_rounding(
    steps: int, model: str, precision: str, disk: Path
) -> None:
    if model == "llama":
        pytest.importorskip("transformers", reason="trains a model of theirs")
    how = Run(f"{model} by SGD", 2, 2, precision=precision, steps=steps)
    how_still = Run(how.model, precision=precision, steps=1, sizes={"rate": 0.0})
    (still,) = run_ranks(learn, 1, how_still, disk)
    (whole,) = run_ranks(learn, 1, how.on_one(), disk)
    expected = moved(whole, still)
    for mine in run_ranks(learn, 2, how, disk):
        assert mine.losses == pytest.approx(whole.losses, rel=1e-6 if precision == "32-true" else 2**-7)
        off = {
            name: float((each - expected[name]).norm() / expected[name].norm())
            for name, each in moved(mine, still).items()
        }
        most = {"32-true": 1e-4, "bf16-mixed": 0.03}[precision]  # twice what was seen
        assert [(name, each) for name, each in off.items() if each > most] == []


NOW = [False]


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Unbounded.apply(x) if NOW[0] else x  # type: ignore[no-any-return, no-untyped-call]


class Overflows(Blocks):
    """In its second step one rank's part of the first weight has a gradient without bound, and nobody has another."""

    def __init__(self, culprit: int) -> None:
        super().__init__()
        self.culprit = culprit
        self.blocks[0].inside = Overflow()
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        NOW[0] = batch_idx == 1 and self.global_rank == self.culprit
        self.scales.append(self.trainer.precision_plugin.loss_scale.state_dict()["scale"])  # type: ignore[union-attr]
        return super().training_step(batch.float(), batch_idx)


def overflow(ranks: int, culprit: int, batches: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Overflows(culprit)
    # As a plugin: Lightning makes bf16-mixed of it on a CPU.
    plugins = [AngelPTMPrecision("16-mixed", LossScale(2.0**10))]
    trainer_of(ranks, 2, precision=None, plugins=plugins).fit(module, loader(2 * batches * ranks // 2))
    return module.scales, weights_of(module)


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_overflow_in_one_ranks_part_skips_the_step_on_all(culprit: int) -> None:
    before = run_ranks(overflow, 2, 2, culprit, 1)
    skipped = run_ranks(overflow, 2, 2, culprit, 2)
    trained = run_ranks(overflow, 2, 2, culprit, 3)
    for rank in range(2):
        assert trained[rank][0][2] == trained[rank][0][1] / 2
        for name, value in before[rank][1].items():
            assert torch.equal(skipped[rank][1][name], value), name
            assert torch.equal(trained[rank][1][name], trained[0][1][name]), name
        assert any(not torch.equal(trained[rank][1][name], value) for name, value in before[rank][1].items())
