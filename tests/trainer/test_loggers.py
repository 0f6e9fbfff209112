"""Loggers of Lightning record the losses of a plain Trainer, and the hyper-parameters."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


class Net(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch[0]).square().mean()
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: str, logger: Logger | bool, watch: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net(8)
    if watch and isinstance(logger, WandbLogger):
        logger.watch(model, log="all", log_freq=1)
    Trainer(
        strategy=strategy,
        logger=logger,
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, DataLoader(TensorDataset(torch.randn(4 * STEPS, 8)), batch_size=4))
    return model


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Losses of a plain Trainer."""
    return fit("auto", False).losses


def test_csv(plain: list[float], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit("angel_ptm", logger)
    folder = Path(logger.log_dir)
    with open(folder / "metrics.csv", newline="") as file:
        assert [float(row["train_loss"]) for row in csv.DictReader(file)] == plain
    assert (folder / "hparams.yaml").read_text() == "width: 8\n"


def test_mlflow(plain: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is in the extra `test`")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # of a database it needs more than mlflow-skinny brings
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")  # which mlflow sets itself, and leaves
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    fit("angel_ptm", logger)
    history = logger.experiment.get_metric_history(logger.run_id, "train_loss")
    assert [(each.step, each.value) for each in history] == list(enumerate(plain))
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params == {"width": "8"} and run.info.status == "FINISHED"


def test_wandb_offline_which_watches_the_gradients(
    plain: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`watch` has hooks on all parameters: their gradients are in pages by then, and a histogram of each is logged."""
    wandb = pytest.importorskip("wandb", reason="wandb is in the extra `test`")
    for name, value in {
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(tmp_path),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_MODE": "offline",
    }.items():
        monkeypatch.setenv(name, value)
    logger = WandbLogger(offline=True, save_dir=tmp_path)
    watched = fit("angel_ptm", logger, watch=True)
    summary = logger.experiment.summary
    assert summary["train_loss"] == plain[-1] and summary["trainer/global_step"] == STEPS - 1
    assert dict(logger.experiment.config) == {"width": 8}
    histograms = {key.removeprefix("gradients/").removeprefix("graph_0") for key in dict(summary) if "gradients" in key}
    assert histograms == {name for name, _ in watched.named_parameters()}
    logger.experiment.finish()
    wandb.teardown()  # its service process and the threads that speak to it
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0
