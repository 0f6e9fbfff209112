"""A rank that rearranges its parameters alone, or otherwise than the others, ends the run on all, with what it has done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from kit.ranks.harness import watch_ranks
from kit.ranks.training import loader, make_strategy
from torch import Tensor, nn

WIDTH = 64


class Net(Linears):
    """Module whose first layer and last block are frozen."""

    when = "on_train_epoch_start"

    def __init__(self) -> None:
        super().__init__(WIDTH, stem=WIDTH, seed=0)
        self.stem.requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.training_step(batch, index)


def unfreezes_stem(module: Net) -> None:
    module.stem.requires_grad_(True)


def unfreezes_block(module: Net) -> None:
    module.blocks[2].requires_grad_(True)


def adds(module: Net) -> None:
    module.extra = nn.Parameter(torch.zeros(3))


def replaces(module: Net) -> None:
    module.head.bias = nn.Parameter(torch.zeros(8))


def removes(module: Net) -> None:
    module.head.bias = None  # type: ignore[assignment]


def groups(module: Net) -> None:
    module.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(3))]})  # type: ignore[union-attr]


def nothing(module: Net) -> None:
    pass


Change = Callable[[Net], None]

CASES: dict[str, tuple[str, Change, Change, str]] = {
    "rank 0 unfreezes": ("on_train_epoch_start", unfreezes_stem, nothing, "rank 0 has unfrozen stem.weight, stem.bias"),
    "rank 1 unfreezes": ("on_train_epoch_start", nothing, unfreezes_stem, "rank 1 has unfrozen stem.weight, stem.bias"),
    "before a batch": ("on_train_batch_start", unfreezes_block, nothing, "rank 0 has unfrozen blocks.2.weight"),
    "behind a batch": ("on_train_batch_end", nothing, unfreezes_block, "rank 1 has unfrozen blocks.2.weight"),
    "before an evaluation": ("on_validation_start", adds, nothing, "rank 0 has new parameters: extra"),
    "behind an evaluation": ("on_validation_end", nothing, unfreezes_stem, "rank 1 has unfrozen stem.weight"),
    "different ones": ("on_train_epoch_start", unfreezes_stem, unfreezes_block, "rank 1 has unfrozen blocks.2.weight"),
    "adds": ("on_train_epoch_start", adds, nothing, "rank 0 has new parameters: extra"),
    "replaces": ("on_train_epoch_start", nothing, replaces, "rank 1 has new parameters: head.bias, and has no longer"),
    "removes": ("on_train_epoch_start", removes, nothing, "rank 0 has no longer the parameters head.bias"),
    "groups": ("on_train_epoch_start", groups, nothing, "rank 0 has changed groups of AdamW"),
}


def rearranged(case: str, folder: Path, home: str) -> None:
    hook, *changes, _ = CASES[case]
    module = Net()

    def act(*args: Any) -> None:
        if module.current_epoch == 1:
            changes[module.trainer.global_rank](module)

    setattr(module, hook, act)
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(
        make_strategy(folder, home), devices=2, max_epochs=3, num_sanity_val_steps=0, use_distributed_sampler=False
    )
    trainer.fit(module, loader(rows, 2, 4), loader(rows, 2, 4))


@pytest.mark.slow_unless(
    "masters_on_disk-behind a batch", "groups", "ram-replaces", "all_on_disk-adds", "all_on_disk-replaces"
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("home", ["masters_on_disk", "ram", "all_on_disk"])
def test_all_ranks_are_told_who_has_done_what(case: str, home: str, disk: Path) -> None:
    for outcome in watch_ranks(rearranged, 2, case, disk, home, limit_s=60):
        assert "RankError" in outcome.error, str(outcome)
        assert CASES[case][-1] in outcome.error and "on all ranks alike" in outcome.error, str(outcome)
