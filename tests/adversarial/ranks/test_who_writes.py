"""`torch.save` with two ranks: as under DDP, rank 0 calls it once a checkpoint, and nobody else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.training import make_strategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel


class Moments(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def calls(folder: Path, tier: str, writes: bool) -> int:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 2, **dict.fromkeys(quiet, False)}
    callback = ModelCheckpoint(folder, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=make_strategy(folder, tier), callbacks=callback, **options
    )
    with mock.patch("torch.save", wraps=torch.save if writes else None) as save:
        trainer.fit(Moments())
    return int(save.call_count)


@pytest.mark.parametrize(("tier", "writes"), [("ram", True), ("ram", False), ("all_on_disk", True)])
def test_rank_0_does_once_a_checkpoint(tier: str, writes: bool, tmp_path: Path) -> None:
    assert run_ranks(calls, 2, tmp_path, tier, writes, limit_s=60.0) == [2, 0]
