"""Parameters are unfrozen between two batches on two ranks: the weights are those of one rank with both ranks' batches, and a
rank that unfreezes alone ends the run on both. (DDP does not reduce gradients of what was frozen when it began.)"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rank_harness import run_ranks, watch_ranks
from rank_training import loader, make_strategy
from tensor_blocks import Blocks, trainer_of, weights_of
from tensor_blocks import loader as rows_of_blocks
from torch import Tensor, nn

from lightning_ptm.storage.writer import SaveOps

WIDTH = 64


class Net(L.LightningModule):
    """Trains its blocks from the second epoch on.

    Args:
        alone: on rank 0 only.
        whole: by an optimizer that updates whole parameters.
    """

    def __init__(self, *, alone: bool = False, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = whole
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)
        self.alone = alone

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = batch + torch.tanh(block(batch))
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.whole:
            return torch.optim.Adafactor(self.head.parameters(), lr=1e-2)
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2, fused=True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and (self.trainer.is_global_zero or not self.alone):
            self.blocks.requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.blocks.parameters())})


def weights(
    home: str | None, folder: Path, ranks: int = 1, ops: SaveOps | None = None, epochs: int = 3, **options: Any
) -> dict[str, Tensor]:
    rows = torch.randn(32, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = Net(**options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if home is None else make_strategy(folder, home),
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=epochs,
        gradient_clip_val=0.1,
        use_distributed_sampler=False,
    )
    if ops is not None:
        trainer.strategy.save_ops = ops
    trainer.fit(module, loader(rows, ranks, 8 // ranks))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def weights_here(home: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    return weights(home, folder, 2, **options)


@pytest.mark.parametrize(
    ("home", "whole"),
    [
        ("masters_on_disk", True),
        ("lock_free", False),
        *(pytest.param(home, False, marks=pytest.mark.in_turn) for home in ("ram", "masters_on_disk", "all_on_disk")),
        *(pytest.param(home, True, marks=pytest.mark.in_turn) for home in ("ram", "all_on_disk", "lock_free")),
    ],
)
def test_ranks_train_what_is_unfrozen(home: str, whole: bool, disk: Path) -> None:
    expected = weights(None, disk, whole=whole)
    for found in run_ranks(partial(weights_here, whole=whole), 2, home, disk):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert not [*disk.iterdir()]


def unfreezes_alone(folder: Path) -> None:
    weights("masters_on_disk", folder, 2, alone=True)


def test_a_rank_that_unfreezes_alone_ends_the_run_on_both(disk: Path) -> None:
    outcomes = watch_ranks(unfreezes_alone, 2, disk, limit_s=60)
    assert all("RankError" in outcome.error for outcome in outcomes), [str(outcome) for outcome in outcomes]
    assert not [*disk.iterdir()]


class Killed(SaveOps):
    def pwritev(self, *_: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


def is_killed(folder: Path) -> None:
    weights("masters_on_disk", folder, ops=Killed())


def test_what_a_killed_run_leaves_is_gone_with_the_next_one(disk: Path) -> None:
    (outcome,) = watch_ranks(is_killed, 1, disk, limit_s=60)
    assert outcome.exit_code == -signal.SIGKILL
    assert [*disk.iterdir()]
    weights("masters_on_disk", disk, epochs=1)  # unfreezes nothing
    assert not [*disk.iterdir()]


class Later(Blocks):
    """Trains its second block from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.blocks[0].parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.blocks[1].parameters()), "lr": 3e-3})


def weights_of_parts(ranks: int, tensor: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Later()
    trainer_of(ranks, tensor, settings, max_epochs=3, gradient_clip_val=0.5).fit(module, rows_of_blocks(8))
    return weights_of(module)


@pytest.mark.parametrize(
    "home",
    [
        pytest.param({"master_home": "disk"}, marks=pytest.mark.in_turn),
        {"master_home": "disk", "parameter_home": "disk"},
    ],
)
def test_ranks_of_a_tensor_group_train_their_parts(home: dict[str, Any], disk: Path) -> None:
    expected = run_ranks(weights_of_parts, 1, 1, 1, {})[0]
    for found in run_ranks(weights_of_parts, 2, 2, 2, {**home, "disk_path": str(disk)}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert not [*disk.iterdir()]
