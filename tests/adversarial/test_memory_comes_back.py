"""When a run has ended, its memory and its files are gone, also while nobody collects garbage
and the user holds the strategy, the trainer and the module. A second run has the memory of the first."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.memory import region

WIDTH = 66
TIERS = {"device_memory": "2MiB", "host_memory": "8MiB"}
SETTINGS: dict[str, dict[str, Any]] = {
    "ram": {},
    "masters on disk": {"offload_optimizer": "disk"},
    "all on disk": {"offload_parameters": "disk", "offload_optimizer": "disk"},
    "tiers": TIERS,
    "three tiers": {**TIERS, "offload_parameters": "host", "offload_optimizer": "disk"},
    "recompute": {**TIERS, "recompute": "all"},
    "lock-free": {"lock_free": True},
    "lock-free, three tiers": {**TIERS, "lock_free": True},
}


class Net(Linears):
    """Three blocks. `trouble` is called in the second training step."""

    def __init__(self, trouble: Callable[[], None] | None = None) -> None:
        super().__init__(WIDTH, head=0, activation=torch.relu)
        self._trouble = trouble

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self(batch).square().mean()
        if index == 1 and self._trouble is not None:
            self._trouble()
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self(batch)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Mapped:
    """The memory that engines have mapped and that somebody still has."""

    def __init__(self) -> None:
        self._all: list[tuple[weakref.ref[Any], int]] = []

    def map(self, *args: Any, **options: Any) -> mmap.mmap:
        mapping = mmap.mmap(*args, **options)
        self._all.append((weakref.ref(mapping), len(mapping)))
        return mapping

    @property
    def bytes(self) -> int:
        return sum(size for mapping, size in self._all if mapping() is not None)

    @property
    def ever(self) -> int:
        return sum(size for _, size in self._all)


class Peak(L.Callback):
    """Records the memory that is mapped while a run is in progress."""

    def __init__(self, mapped: Mapped) -> None:
        self._mapped = mapped
        self.bytes: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        self.bytes.append(self._mapped.bytes)


class _Mmap:
    """The module `mmap`, but for the one that maps."""

    def __init__(self, mapped: Mapped) -> None:
        self.mmap = mapped.map

    def __getattr__(self, name: str) -> Any:
        return getattr(mmap, name)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapped]:
    """Inside, no garbage is collected."""
    counted = Mapped()
    monkeypatch.setattr(region, "mmap", _Mmap(counted))
    environment = dict(os.environ)
    gc.collect()
    gc.disable()
    yield counted
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)


def files() -> list[str]:
    """Open files that have no name any more: those of the disk tier."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    return [name for name in found if name.endswith("(deleted)") and not name.startswith("/memfd")]


def batches() -> DataLoader[Any]:
    items = list(torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(1)))
    return DataLoader(items, batch_size=1, collate_fn=lambda rows: rows[0])  # type: ignore[arg-type]


def make(folder: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    strategy = AngelPTMStrategy(page_size="64KiB", disk_path=disk, **settings)
    return quiet_trainer(strategy, max_epochs=1, default_root_dir=folder, callbacks=list(callbacks) or None)


@pytest.mark.slow_unless("ram", "tiers", "three tiers", "lock-free, three tiers")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_after_fit(settings: dict[str, Any], tmp_path: Path, mapped: Mapped) -> None:
    open_before = files()
    peak = Peak(mapped)
    trainer, module = make(tmp_path, peak, **settings), Net()
    for run in (1, 2, 3):  # with the strategy, the trainer and the module of the first
        trainer.fit_loop.max_epochs = run
        trainer.fit(module, batches())
        assert mapped.bytes == 0 and mapped.ever > 0
        assert files() == open_before
    assert len(peak.bytes) == 3 and len(set(peak.bytes)) == 1
    assert trainer.strategy is not None
