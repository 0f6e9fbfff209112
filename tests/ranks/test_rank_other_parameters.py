"""Parameters are added, replaced and resized between two batches on two ranks: the weights are those of one rank with both
ranks' batches, what is new begins with rank 0's values, and a rank that does so alone ends the run on both."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from kit.ranks.harness import run_ranks, watch_ranks
from kit.ranks.tensor_blocks import Blocks, trainer_of
from kit.ranks.tensor_blocks import loader as rows_of_blocks
from kit.ranks.training import loader, make_strategy
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy

WIDTH = 64


class Net(Linears):
    """Gets a block and a wider head in its second epoch, and loses a block and states in its third.

    Args:
        alone: on rank 0 only.
        whole: by an optimizer that updates whole parameters.
    """

    def __init__(self, *, alone: bool = False, whole: bool = False) -> None:
        super().__init__(WIDTH, 2, seed=0)
        self.alone = alone
        self.whole = whole
        self.nothing = nn.Parameter(torch.zeros(0, 3), requires_grad=False)  # a flat without elements

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.whole:
            return torch.optim.Adafactor(self.parameters(), lr=1e-2)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch and (self.trainer.is_global_zero or not self.alone):
            strategy: Any = self.trainer.strategy
            paged = isinstance(strategy, AngelPTMStrategy) and not self.alone
            with strategy.gathered(self) if paged else nullcontext(), torch.no_grad():
                self.change()

    def change(self) -> None:
        optimizer: Any = self.optimizers()
        torch.manual_seed(self.trainer.global_rank)  # rank 0's values count
        if self.current_epoch == 1:
            self.blocks.append(nn.Linear(WIDTH, WIDTH).double())
            optimizer.add_param_group({"params": list(self.blocks[2].parameters())})
        if self.current_epoch == 1 and not self.alone:
            for each in self.head.parameters():
                each.data = torch.cat([each.data, each.data[:3] / 2 + self.trainer.global_rank])
                del optimizer.state[each]
        if self.current_epoch == 2:
            gone = {id(each) for each in self.blocks[0].parameters()}
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if id(each) not in gone]
            del self.blocks[0]
            for each in self.blocks[0].parameters():
                del optimizer.state[each]


def weights(home: str | None, folder: Path, ranks: int = 1, epochs: int = 3, **options: Any) -> dict[str, Tensor]:
    rows = torch.randn(32, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = Net(**options)
    trainer = quiet_trainer(
        "auto" if home is None else make_strategy(folder, home),
        devices=ranks,
        precision="64-true",
        max_epochs=epochs,
        gradient_clip_val=0.1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader(rows, ranks, 8 // ranks))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def weights_here(home: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    return weights(home, folder, 2, **options)


@pytest.mark.slow_unless("lock_free-False")
@pytest.mark.parametrize(
    ("home", "whole"),
    [
        ("masters_on_disk", True),
        ("lock_free", False),
        *(pytest.param(home, False, marks=pytest.mark.slow) for home in ("ram", "masters_on_disk", "all_on_disk")),
        *(pytest.param(home, True, marks=pytest.mark.slow) for home in ("ram", "all_on_disk", "lock_free")),
    ],
)
def test_ranks_train_the_parameters_that_there_are(home: str, whole: bool, disk: Path) -> None:
    expected = weights(None, disk, whole=whole)
    for found in run_ranks(partial(weights_here, whole=whole), 2, home, disk):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert not [*disk.iterdir()]


def changes_alone(folder: Path) -> None:
    weights("masters_on_disk", folder, 2, alone=True)


def test_a_rank_that_gets_a_block_alone_ends_the_run_on_both(disk: Path) -> None:
    outcomes = watch_ranks(changes_alone, 2, disk, limit_s=60)
    assert all("RankError" in outcome.error for outcome in outcomes), [str(outcome) for outcome in outcomes]
    assert not [*disk.iterdir()]


class Wider(Blocks):
    """Gets another block in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks.append(Blocks().blocks[0])


def widens(settings: dict[str, Any]) -> None:
    trainer_of(2, 2, settings, max_epochs=2).fit(Wider(), rows_of_blocks(8))


def test_of_what_ranks_divide_there_are_no_others(disk: Path) -> None:
    outcomes = watch_ranks(widens, 2, {"offload_optimizer": "disk", "disk_path": str(disk)}, limit_s=60)
    for outcome in outcomes:
        assert "were added, replaced or resized (blocks.2." in outcome.error, str(outcome)
        assert "in which ranks divide parameters or experts" in outcome.error, str(outcome)
