"""Runs that save a checkpoint, and runs that resume from it, for the tests of checkpoints."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kit.outcomes import Outcome
from kit.plain_loop import TrainModule, make_trainer, tokens
from kit.settings import merged
from kit.stacks import ScheduledStack
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.storage.writer import SaveOps

BATCHES = tokens(8)
HALF = 4


class Full(ScheduledStack):
    """Model with a buffer, a frozen part and dropout, so that a checkpoint has every kind of state."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(2))

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        self.seen += 1.0
        return super().loss(batch, index)


def fit(
    strategy: AngelPTMStrategy,
    folder: Path,
    resume: Path | None = None,
    build: Callable[[], TrainModule] = Full,
    precision: str = "bf16-mixed",
    *,
    callbacks: Sequence[L.Callback] = (),
    loader: DataLoader[Any] | None = None,
    max_epochs: int = 2,
    save_last: bool | str = True,
    seed: int = 0,
    **options: Any,
) -> tuple[Outcome, L.Trainer]:
    """Trains two epochs of four batches each, with a checkpoint after each."""
    torch.manual_seed(seed)
    module = build()
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1, save_last=save_last)
    trainer = make_trainer(
        strategy,
        precision,
        max_epochs=max_epochs,
        limit_train_batches=HALF,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[keep, *callbacks],
        **options,
    )
    trainer.fit(module, loader or BATCHES.loader(), ckpt_path=None if resume is None else str(resume))
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Outcome(list(module.losses), weights), trainer


def sharded(strategy_at: Any, tier: str, **settings: Any) -> AngelPTMStrategy:
    return strategy_at(tier, **merged(settings, checkpoints={"state_dict_type": "sharded"}))


def names_in(folder: Path) -> list[str]:
    """Lists a test's folder, without the working directory that each test has."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "here")


class FullDisk(SaveOps):
    """A disk that has no room after some writes."""

    def __init__(self, writes: int, number: int) -> None:
        self.left = writes
        self._number = number

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(self._number, os.strerror(self._number))
        return super().pwritev(fd, buffers, offset)


@contextmanager
def small_files(size_bytes: int) -> Iterator[None]:
    """Inside, the system refuses to make files longer than that, as a full disk would."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints' dictionaries hold the same, bit for bit; paths in callbacks' states aside."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "callbacks")
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
