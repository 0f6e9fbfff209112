"""A small model, a Trainer that logs to TensorBoard, and what it has logged, read back from its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.deciding import decide

WIDTH = 64


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Blocks(L.LightningModule):
    """Three blocks of a page or more each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).float().square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self(batch).float().square().mean(), batch_size=1)

    test_step = validation_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows(count: int = 16) -> DataLoader[Any]:
    """`count` rows in batches of 4."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.randn(count, WIDTH, generator=generator), batch_size=4, generator=generator)  # type: ignore[arg-type]


@pytest.fixture
def model() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


@pytest.fixture
def data() -> DataLoader[Any]:
    return rows()


MakeTrainer = Callable[..., L.Trainer]


@pytest.fixture
def board_trainer(tmp_path: Path) -> MakeTrainer:
    """`board_trainer(strategy, callbacks)`: a quiet Trainer that logs each step under `<tmp_path>/logs`."""

    def make(strategy: Any, callbacks: list[Any], **options: Any) -> L.Trainer:
        quiet: dict[str, Any] = {
            "logger": TensorBoardLogger(tmp_path / "logs", name="", version=""),
            "log_every_n_steps": 1,
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "precision": "bf16-mixed",
        }
        return quiet_trainer(strategy, callbacks=callbacks, **{**quiet, **options})

    return make


@pytest.fixture
def activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """`activations="host"` is let run on a CPU, and with what these few layers save."""
    monkeypatch.setattr(decide, "_check_device_of_its_own", lambda machine: None)
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)


@pytest.fixture
def board(tmp_path: Path) -> Callable[[], EventAccumulator]:
    """Returns a reader of what TensorBoard would show."""

    def read() -> EventAccumulator:
        found = EventAccumulator(os.fspath(tmp_path / "logs"), {"tensors": 0, "images": 0, "scalars": 0})
        found.Reload()
        return found

    return read


@pytest.fixture
def page(board: Callable[[], EventAccumulator]) -> Callable[[str], list[str]]:
    """`page("pages/plan")`: the texts of a page, oldest first."""

    def read(tag: str) -> list[str]:
        events = board().Tensors(f"{tag}/text_summary")
        return [event.tensor_proto.string_val[0].decode() for event in events]

    return read
