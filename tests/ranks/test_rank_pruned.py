"""ModelPruning on two ranks: each prunes the weights that one rank with both ranks' batches would, and masks are rank 0's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from kit.ranks.harness import run_ranks
from kit.ranks.training import loader, make_strategy
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor

WIDTH = 64


def _amount(epoch: int) -> float:
    return 0.2 if epoch < 3 else 0.0  # masks are rank 0's when the next step begins


def pruned(home: str | None, folder: Path, ranks: int, how: str) -> dict[str, Tensor]:
    rows = torch.randn(32, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = Linears(WIDTH, 2, seed=0)
    trainer = quiet_trainer(
        "auto" if home is None else make_strategy(folder, home),
        devices=ranks,
        precision="64-true",
        max_epochs=4,
        use_distributed_sampler=False,
        callbacks=[
            ModelPruning(how, amount=_amount, use_lottery_ticket_hypothesis=False, make_pruning_permanent=False)
        ],
    )
    torch.manual_seed(trainer.global_rank)  # which random pruning must not follow
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(rows, ranks, 8 // ranks))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.diagonal
@pytest.mark.parametrize("how", ["l1_unstructured", "random_unstructured"])
@pytest.mark.parametrize("home", ["ram", "three_tiers"])
def test_ranks_prune_alike(home: str, how: str, disk: Path) -> None:
    ours = run_ranks(pruned, 2, home, disk, 2, how)
    plain: dict[str, Any] = pruned(None, disk, 1, how)
    assert sum(name.endswith("_mask") for name in plain) == 6
    for of_rank in ours:
        assert of_rank.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(of_rank[name], value, rtol=0, atol=1e-9, msg=f"{name} on a rank")
