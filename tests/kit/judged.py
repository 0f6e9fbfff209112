"""Comparison of a training by a plain single-device Trainer, which is the judge, with the same training by the
strategy.

A `Judged` module trains a few residual blocks, each a unit, on seeded batches; tests override what they are about. What it
notes with `self.note` is compared bitwise, and so are losses, weights and `global_step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kit import twins
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.checkpoints import restore

MakeStrategy = Callable[..., AngelPTMStrategy]
"""Type of the fixture `strategy_at`."""

WIDTH = 64


def little_ram(monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> None:
    """When a run ends, RAM has room for the weights, and not, too, for what Adam has learnt on disk."""
    weights = sum(4 * -(-parameter.numel() // 64) * 64 for parameter in module.parameters())  # as they lie in pages
    monkeypatch.setattr(restore, "free_host_bytes", lambda: 2 * weights)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


class Judged(L.LightningModule):
    """Blocks between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.notes: list[Any] = []

    def note(self, value: Any) -> None:
        """To be equal to the judge's, bit for bit."""
        self.notes.append(value.detach().clone() if isinstance(value, Tensor) else value)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        self.note(loss)
        return loss

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class ByHand(Judged):
    """Module with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def trainer(strategy: AngelPTMStrategy | None, **options: Any) -> L.Trainer:
    """A quiet Trainer on one CPU rank that trains three batches; no strategy: Lightning's own for a single device."""
    return twins.trainer(strategy, **{"limit_train_batches": 3, **options})


def batches(count: int = 8) -> DataLoader[Any]:
    data = torch.randn(count * 4, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=4)


def run(build: Callable[[], Judged], strategy: AngelPTMStrategy | None, **options: Any) -> Judged:
    """A freshly built module after its training."""
    torch.manual_seed(0)
    module = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of = trainer(strategy, **options)
        of.fit(module, batches())
    module.note(of.global_step)
    return module


def assert_alike(ours: Judged, judge: Judged) -> None:
    """Weights and notes are the judge's, bit for bit."""
    assert len(ours.notes) == len(judge.notes), (ours.notes, judge.notes)
    for at, (mine, theirs) in enumerate(zip(ours.notes, judge.notes, strict=True)):
        same = torch.equal(mine, theirs) if isinstance(theirs, Tensor) else mine == theirs
        assert same, f"note {at}: {mine}, and {theirs} of a plain Trainer"
    theirs_by_name = dict(judge.named_parameters())
    differing = [name for name, value in ours.named_parameters() if not torch.equal(value, theirs_by_name[name])]
    assert not differing, f"weights differ: {differing}"


def judge(build: Callable[[], Judged], strategy: AngelPTMStrategy, **options: Any) -> None:
    """Train with both and compare. The judge trains once for all tests of the same module with the same plain options."""
    plain = tuple(sorted(options.items()))
    once = isinstance(build, type) and all(isinstance(value, str | int | float | None) for value in options.values())
    assert_alike(run(build, strategy, **options), _of_the_judge(build, plain) if once else run(build, None, **options))


@cache
def _of_the_judge(build: Callable[[], Judged], options: tuple[tuple[str, Any], ...]) -> Judged:
    return run(build, None, **dict(options))
