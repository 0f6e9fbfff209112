"""Frozen weights kept in 8 or 4 bits: the numbers are those of a plain loop whose frozen weights were rounded before."""

from __future__ import annotations

import pytest
import torch
from plain_loop import DTYPES, Outcome, PlainLoop, fit, tokens
from tiny_models import WIDTH, Stack
from torch import Tensor, nn
from torch.nn import functional

from lightning_ptm.memory.codes import rounded
from lightning_ptm.terms import ALIGN_NUMEL, CODES

BATCHES = tokens(3)


class Adapter(nn.Module):
    """A frozen linear layer and LoRA matrices beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class AdaptedBlock(nn.Module):
    """A block whose matrices are frozen; the last of them ends inside a block of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = Adapter(WIDTH, 4 * WIDTH + 3)
        self.down = Adapter(4 * WIDTH + 3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Adapted(Stack):
    def __init__(self) -> None:
        super().__init__(3, AdaptedBlock)
        self.embedding.requires_grad_(False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, fused=True)


def rounded_by(code: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter as its codes have it, in its own dtype."""
    flat = value.detach().to(dtype).flatten()
    whole = functional.pad(flat, (0, -flat.numel() % ALIGN_NUMEL))
    return rounded(whole, CODES[code])[: flat.numel()].view(value.shape).to(value.dtype)


def coded(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith("base.weight")


def as_rounded_before(code: str, precision: str) -> Outcome:
    """A plain loop's, whose frozen weights were rounded before."""

    class Rounded(Adapted):
        def __init__(self) -> None:
            super().__init__()
            for name, parameter in self.named_parameters():
                if coded(name):
                    parameter.data = rounded_by(code, parameter, DTYPES[precision])

    plain = PlainLoop(Rounded, precision).run(BATCHES)
    if precision == "bf16-true":  # the loop tells frozen weights as they were built
        plain.weights.update({name: value.bfloat16() for name, value in plain.weights.items()})
    return plain


@pytest.mark.covering(1)
@pytest.mark.parametrize("code", ["int8", "nf4"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_the_numbers_are_those_of_weights_that_were_rounded_before(strategy_at, tier, code, precision) -> None:
    ours = fit(Adapted, BATCHES, strategy_at(tier, frozen_dtype=code), precision)
    ours.assert_equal(as_rounded_before(code, precision))
