"""The throughput callback: what it counts as tokens, and that it logs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ptm.callbacks import Throughput
from lightning_ptm.callbacks.throughput import _first_tensor, measured_matrix_flops_per_s


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
    found = _first_tensor(batch)
    assert (None if found is None else found.numel()) == numel


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


def test_samples_and_utilisation(strategy_at, board_trainer, model, data, board) -> None:
    board_trainer(strategy_at("three_tiers"), [Throughput(matrix_flops_per_s=1e9)]).fit(model, data)
    (tokens,), (samples,), (flops,), (share,) = (
        [event.value for event in board().Scalars(f"speed/{name}")][-1:]
        for name in ("tokens_per_s", "samples_per_s", "model_TFLOP_per_s", "utilisation")
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert tokens == pytest.approx(64 * samples, rel=1e-5)  # rows of 64 elements
    assert flops == pytest.approx(6 * parameters * tokens / 1e12, rel=1e-5)
    assert share == pytest.approx(flops * 1e12 / 1e9, rel=1e-5)


def test_the_measured_rate_is_that_of_a_product() -> None:
    rate = measured_matrix_flops_per_s(torch.device("cpu"), torch.float32, size=64, for_s=0.01)
    assert 1e7 < rate < 1e14


def test_what_cannot_be_averaged_or_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="window=0"):
        Throughput(window=0)
    with pytest.raises(ValueError, match="matrix_flops_per_s=0"):
        Throughput(matrix_flops_per_s=0.0)
