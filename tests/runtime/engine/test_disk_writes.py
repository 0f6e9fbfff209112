"""Bytes that steps write to each disk: those that `plan` predicts are those that a run counts, byte for byte."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.planned_runs import forecast_of, make_trainer
from kit.ranks.harness import run_ranks
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.data import TextBytes

WIDTH, BATCH, LENGTH, STEPS = 96, 4, 32, 4
SETTINGS = {"page_size": "64KiB", "host_memory": "64MiB", "disk_memory": "64MiB"}


class Small(L.LightningModule):
    """Blocks of odd sizes, a frozen one among them, and a root of its own."""

    def __init__(self, optimizer: str = "adam", meta: bool = False) -> None:
        super().__init__()
        self._optimizer = optimizer
        with torch.device("meta" if meta else "cpu"):
            self.words = nn.Embedding(256, WIDTH)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 211), nn.Tanh(), nn.Linear(211, WIDTH)) for _ in range(4)
            )
            self.head = nn.Linear(WIDTH, 256)
        self.blocks[1].requires_grad_(False)
        for each in self.parameters() if optimizer == "muon" else ():
            each.requires_grad_(each.requires_grad and each.ndim == 2 and each is not self.words.weight)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x = self.words(batch[0])
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        if self._optimizer == "muon":
            return torch.optim.Muon(trained, lr=1e-3)
        if self._optimizer == "sgd":
            return torch.optim.SGD(trained, lr=1e-3)
        return torch.optim.AdamW(trained, lr=1e-3)


class Counts(L.Callback):
    """The bytes that the steps between the first and the last have written, by folder."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, ...]] = []

    def _mark(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AngelPTMStrategy)
        strategy.engine.updates.finish_all()  # gradients reach the disk before their update does
        self.marks.append(strategy.statistics().disk_written_bytes)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index % trainer.accumulate_grad_batches == 0:
            self._mark(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._mark(trainer)

    @property
    def steps(self) -> list[list[int]]:
        """By step, the bytes written to each folder."""
        return [
            [now - before for before, now in zip(first, second, strict=True)]
            for first, second in zip(self.marks, self.marks[1:], strict=False)
        ]


@dataclass(frozen=True)
class Case:
    """A run that is planned and then trained."""

    settings: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    folders: int = 1


MASTERS = {"offload_optimizer": "disk"}
ALL = {"offload_parameters": "disk", "offload_optimizer": "disk"}
THREE = {"device_memory": "1MiB", "offload_parameters": "host", "offload_optimizer": "disk"}
THREE_ALL = {"device_memory": "1MiB", **ALL}
ACCUMULATED = {"accumulate_grad_batches": 3}
CLIPPED = {"gradient_clip_val": 0.5}
SYNCHRONOUS = {"lock_free": {"warmup_steps": 100}}
CASES = {
    "nothing on disk": Case({}),
    "masters": Case(MASTERS),
    "masters on three disks": Case(MASTERS, folders=3),
    "all": Case(ALL, folders=2),
    "all, accumulated": Case(ALL, ACCUMULATED, folders=2),
    "all, accumulated, clipped": Case(ALL, {**ACCUMULATED, **CLIPPED}),
    "three tiers, clipped": Case(THREE, CLIPPED, folders=2),
    "three tiers, all on disk": Case(THREE_ALL, folders=2),
    "three tiers, all on disk, accumulated and clipped": Case(THREE_ALL, {**ACCUMULATED, **CLIPPED}, folders=2),
    "states of 8 bits": Case({**MASTERS, "optimizer_state_dtype": "int8"}, folders=2),
    "SGD": Case(ALL, optimizer="sgd", folders=2),
    "SGD in a true precision": Case(ALL, {"precision": "bf16-true"}, optimizer="sgd"),
    "Muon": Case(MASTERS, optimizer="muon", folders=2),
    "Muon, three tiers": Case(THREE_ALL, ACCUMULATED, optimizer="muon", folders=2),
    "lock-free": Case({**MASTERS, **SYNCHRONOUS}, folders=2),
    "lock-free, three tiers": Case({"device_memory": "1MiB", **SYNCHRONOUS}, ACCUMULATED, folders=2),
}


def settings_of(case: Case, folder: Path) -> dict[str, Any]:
    """The settings of a case, with its folders below `folder`."""
    found = {**SETTINGS, **case.settings}
    if case.settings:
        found["disk_path"] = [str(folder / f"disk{each}") for each in range(case.folders)]
    else:
        del found["disk_memory"]
    return found


def predicted(case: Case, folder: Path, data: Mapping[str, Any], ranks: int) -> list[int]:
    """Bytes of a step by folder, as `plan` has them."""
    found, _ = forecast_of(
        folder,
        settings_of(case, folder),
        STEPS,
        {"class_path": f"{Small.__module__}.Small", "init_args": {"optimizer": case.optimizer}},
        {"class_path": "lightning_ptm.data.TextBytes", "init_args": dict(data)},
        ranks=ranks,
        **case.trainer,
    )
    assert found.fits, found.reason
    return list(found.disk_written_bytes)


def train(folder: str, data: Mapping[str, Any], case: Case) -> list[list[int]]:
    """One rank's training; returns the bytes written in each step."""
    torch.manual_seed(0)
    counts = Counts()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make_trainer(settings_of(case, Path(folder)), STEPS, counts, ranks, **case.trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Small(case.optimizer), datamodule=TextBytes(**data))
    return counts.steps


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 64)
    return {"path": str(text), "sequence_length": LENGTH, "batch_size": BATCH}


def check(case: Case, folder: Path, data: Mapping[str, Any], counted: Sequence[Sequence[int]], ranks: int) -> None:
    wanted = predicted(case, folder, data, ranks)
    assert bool(wanted) == bool(case.settings)
    assert [list(step) for step in counted] == [wanted] * STEPS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_predicted_bytes_are_those_of_the_run(disk: Path, tmp_path: Path, data: dict[str, Any], name: str) -> None:
    check(CASES[name], tmp_path, data, train(str(tmp_path), data, CASES[name]), 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["three tiers, all on disk, accumulated and clipped", "lock-free"])
def test_on_two_ranks(tmp_path: Path, data: dict[str, Any], name: str) -> None:
    for counted in run_ranks(train, 2, str(tmp_path), data, CASES[name], limit_s=100):
        check(CASES[name], tmp_path, data, counted, 2)


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_own_whole_parameters(tmp_path: Path, data: dict[str, Any]) -> None:
    """Their shares differ; a plan is that of rank 0."""
    case = CASES["Muon, three tiers"]
    first, second = run_ranks(train, 2, str(tmp_path), data, case, limit_s=100)
    check(case, tmp_path, data, first, 2)
    assert first != second


@pytest.mark.filterwarnings("ignore")
def test_lock_free_updates_write_no_more_than_predicted(disk: Path, tmp_path: Path, data: dict[str, Any]) -> None:
    """An update may apply the gradients of several steps."""
    case = Case({**MASTERS, "lock_free": {"max_staleness": 3}})
    counted = train(str(tmp_path), data, case)
    (most,) = predicted(case, tmp_path, data, 1)
    assert 0 < sum(size for (size,) in counted) <= STEPS * most
