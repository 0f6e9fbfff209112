"""`state_dict()` between steps on two ranks: what DDP has, on every rank that asks; asked for on one rank alone it ends the
run on both, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from kit.ranks.harness import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy, UsageError

HOMES: dict[str, dict[str, Any]] = {
    "ram": {},
    "all_on_disk": {"offload_optimizer": "disk", "offload_parameters": "disk"},
    "lock_free": {"lock_free": {"max_staleness": 0}},
}
Notes = list[dict[str, Tensor]]


class Net(Linears):
    """Notes its state dict behind each step and at the end, on all ranks or on the first alone."""

    def __init__(self, *, alone: bool = False, closed: bool = False) -> None:
        super().__init__(64, 2, seed=0)
        self.alone = alone
        self.closed = closed
        self.notes: Notes = []

    def note(self) -> None:
        if not self.alone or self.trainer.is_global_zero:
            self.notes.append({name: value.detach().clone() for name, value in self.state_dict().items()})
        if self.closed:
            with pytest.raises(UsageError, match=r"head.weight was read or written"):
                self.head.weight.norm()

    def on_train_batch_end(self, *args: Any) -> None:
        self.note()

    def on_train_end(self) -> None:
        self.note()


def fitted(strategy: Any, **options: Any) -> Notes:
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    module = Net(**options)
    trainer = quiet_trainer(strategy, devices=2, precision="32-true", max_epochs=1)
    trainer.fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return module.notes


def everything(folder: Path) -> tuple[Notes, dict[str, Notes], str]:
    theirs = fitted("ddp")
    ours = {
        home: fitted(
            AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, disk_path=folder, **settings), closed=True
        )
        for home, settings in HOMES.items()
    }
    try:
        fitted(AngelPTMStrategy(page_size="64KiB", disk_path=folder), alone=True)
    except Exception as error:
        return theirs, ours, str(error)
    return theirs, ours, ""


def test_state_dicts_on_two_ranks(disk: Path) -> None:
    for rank, (theirs, ours, error) in enumerate(run_ranks(everything, 2, disk)):
        assert len(theirs) == 3
        for home, notes in ours.items():
            assert len(notes) == 3, home
            for mine, plain in zip(notes, theirs, strict=True):
                assert list(mine) == list(plain)
                assert all(torch.equal(mine[name], plain[name]) for name in plain), home
        assert "reads, edits or saves weights" in error and "wait for each other for ever" in error, (rank, error)
