"""The throughput callback: what it counts as tokens, and that it logs them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ptm import ConfigError
from lightning_ptm.callbacks import Throughput, ThroughputMonitor, throughput
from lightning_ptm.callbacks.throughput import _duration, _first_tensor, measured_matrix_flops_per_s


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


def test_early_on_it_says_how_long_training_takes(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(throughput, "WORTH_TELLING_S", 0.0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=10,
        limit_val_batches=0,
        callbacks=[Throughput()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with caplog.at_level(logging.INFO):
        trainer.fit(BoringModel())
    told = [record.getMessage() for record in caplog.records if "more steps" in record.getMessage()]
    assert len(told) == 1
    assert re.fullmatch(r"4 more steps take about 0 s at \S+ s a batch, validation not counted", told[0]), told


def test_how_durations_read() -> None:
    texts = [_duration(seconds) for seconds in (34, 95, 599, 3600, 7300, 90000)]
    assert texts == ["30 s", "1 min 40 s", "10 min 0 s", "1 h 0 min", "2 h 1 min", "25 h 0 min"]


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


def test_utilisation_needs_no_arguments(strategy_at, board_trainer, model, data, board) -> None:
    monitor = ThroughputMonitor()
    trainer = board_trainer(strategy_at("ram"), [monitor])
    trainer.fit(model, data)
    measured = monitor._rate
    trainer.test(model, data, verbose=False)
    assert measured is not None and monitor._rate == measured  # once is enough
    for loop, operations in (("", 6), ("/test", 2)):
        tokens, share = (board().Scalars(f"speed/{name}{loop}")[-1].value for name in ("tokens_per_s", "utilisation"))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert share == pytest.approx(operations * parameters * tokens / measured, rel=1e-5)


def hardware(folder: Path, text: str) -> str:
    path = folder / "my.yaml"
    path.write_text(text)
    return str(path)


def test_the_rate_of_a_hardware_file_is_that_of_the_precision(
    strategy_at, board_trainer, model, data, tmp_path
) -> None:
    path = hardware(tmp_path, "compute_flops_per_s:\n  bfloat16: 4e12\n  float32: 1.0e+12\n")
    for precision, rate in (("bf16-mixed", 4e12), ("32-true", 1e12)):
        monitor = Throughput(matrix_flops_per_s=path)
        board_trainer(strategy_at("ram"), [monitor], precision=precision, max_steps=1).fit(model, data)
        assert monitor._rate == rate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device: cpu", r"my\.yaml has no number compute_flops_per_s: bfloat16"),
        ("- 1", r"my\.yaml has no number compute_flops_per_s: bfloat16"),
        (
            "compute_flops_per_s: {float32: 1}",
            r"has no number compute_flops_per_s: bfloat16, in which this run computes",
        ),
        ("compute_flops_per_s: {bfloat16: much}", r"has no number compute_flops_per_s: bfloat16"),
        ("compute_flops_per_s: {bfloat16: -1}", r"bfloat16: -1\.0, and utilisation is a share of it; give one above 0"),
    ],
)
def test_a_hardware_file_without_the_rate_is_refused(
    strategy_at, board_trainer, model, data, tmp_path, text, words
) -> None:
    with pytest.raises(ConfigError, match=words):
        board_trainer(strategy_at("ram"), [Throughput(matrix_flops_per_s=hardware(tmp_path, text))]).fit(model, data)


def test_a_hardware_file_that_is_not_there_is_refused(strategy_at, board_trainer, model, data) -> None:
    with pytest.raises(ConfigError, match=r"matrix_flops_per_s='nowhere\.yaml' is no hardware file .* probe"):
        board_trainer(strategy_at("ram"), [Throughput(matrix_flops_per_s="nowhere.yaml")]).fit(model, data)


def test_the_measured_rate_is_that_of_a_product() -> None:
    rate = measured_matrix_flops_per_s(torch.device("cpu"), torch.float32, size=64, for_s=0.01)
    assert 1e7 < rate < 1e14


def test_what_cannot_be_averaged_or_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="window=0"):
        Throughput(window=0)
    with pytest.raises(ValueError, match="matrix_flops_per_s=0"):
        Throughput(matrix_flops_per_s=0.0)
