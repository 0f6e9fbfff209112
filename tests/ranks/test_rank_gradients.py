"""Edits of gradients and optimizers by users, on two ranks: as with DDP, or refused on both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Block
from kit.ranks.harness import run_ranks
from kit.ranks.training import make_strategy
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import UsageError


class Net(L.LightningModule):
    """Two steps by hand; `between` is what a test does between backward and step."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.between = between
        self.first = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(Block(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.zero_grad()
        self.manual_backward(self(batch[0]))
        getattr(self, self.between)(optimizer)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)

    def nothing(self, optimizer: Any) -> None:
        pass

    def forgets_a_block(self, optimizer: Any) -> None:
        self.blocks[0].zero_grad()

    def zeroes(self, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def forgets_by_hand(self, optimizer: Any) -> None:
        for parameter in self.blocks[1].parameters():
            parameter.grad = None

    def clips(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
        optimizer.step()

    def changes_the_rate(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    def reads(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def assigns(self, optimizer: Any) -> None:
        self.head.weight.grad = torch.ones_like(self.head.weight)

    def forgets_half_a_flat(self, optimizer: Any) -> None:
        self.blocks[0].up.weight.grad = None


def trained(between: str, strategy: Any, precision: Any = "32-true") -> list[Tensor]:
    torch.manual_seed(0)
    module = Net(between)
    trainer = quiet_trainer(
        strategy, devices=2, precision=precision, max_epochs=1, limit_train_batches=2, use_distributed_sampler=False
    )
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1 + trainer.global_rank))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    return [parameter.detach().clone() for parameter in module.parameters()]


def alike(betweens: Sequence[str], tiers: Sequence[str], folder: Path) -> list[str]:
    """Returns the cases that train differently from DDP."""
    differing = []
    for between in betweens:
        judge = trained(between, DDPStrategy())
        for tier in tiers:
            ours = trained(between, make_strategy(folder, tier))
            if not all(map(torch.equal, ours, judge)):
                differing.append(f"{between} {tier}")
    return differing


@pytest.mark.parametrize(
    "tiers",
    [
        ("masters_on_disk",),
        *(pytest.param(tiers, marks=pytest.mark.slow) for tiers in (("ram", "lock_free"), ("three_tiers",))),
    ],
    ids="+".join,
)
def test_two_ranks_do_in_manual_optimization_what_ddp_does(tiers: tuple[str, ...], disk: Path) -> None:
    betweens = ("nothing", "forgets_a_block", "zeroes", "forgets_by_hand", "clips", "changes_the_rate")
    assert run_ranks(alike, 2, betweens, tiers, disk) == [[], []]


def refused(betweens: Sequence[str], folder: Path) -> list[str]:
    """Returns the answer to each edit."""
    return [_answer(lambda name=between: trained(name, make_strategy(folder))) for between in betweens]  # type: ignore[misc]


def _answer(act: Callable[[], Any]) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return "nothing was refused"


def test_what_one_rank_cannot_know_is_refused(disk: Path) -> None:
    for name, reason in (
        ("reads", "was read, and on several ranks each rank has only its shard of the gradient"),
        ("assigns", ".grad of head.weight was assigned, and on several ranks"),
        ("forgets_half_a_flat", "was set to None on several ranks"),
    ):
        for answers in run_ranks(refused, 2, (name,), disk):
            assert reason in answers[0], answers
