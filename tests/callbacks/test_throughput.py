"""The throughput callback: what it counts as tokens, and that it logs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ptm.callbacks import Throughput
from lightning_ptm.callbacks.throughput import _first_tensor_numel


@pytest.mark.parametrize(
    ("batch", "numel"),
    [
        (torch.zeros(2, 3), 6),
        ((torch.zeros(4), torch.zeros(9)), 4),
        ({"name": "text", "tokens": [torch.zeros(2, 5)]}, 10),
        ([], None),
        (object(), None),
    ],
)
def test_tokens_are_the_elements_of_the_first_tensor(batch: object, numel: int | None) -> None:
    assert _first_tensor_numel(batch) == numel


def test_the_speed_is_logged_and_shown(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        limit_val_batches=0,
        callbacks=[Throughput()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(BoringModel())
    assert trainer.callback_metrics["speed/tokens_per_s"] > 0
    assert "ktokens/s" in trainer.progress_bar_metrics


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window=0"):
        Throughput(window=0)
