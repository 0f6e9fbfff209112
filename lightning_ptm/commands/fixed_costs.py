"""What a step of training takes beside arithmetic and copies: hooks, tasks, Lightning's loop. Measured by training models
of next to no size, once with few units and once with many.

Owns a training run in RAM, with a module of its own.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ptm.memory.backend import Backend
from lightning_ptm.trainer.strategy import AngelPTMStrategy

_FEW, _MANY = 2, 18
_WIDTH = 8
_WARM_UP = 4
"""Steps that are traced and planned, and make the optimizer's states."""


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Seconds of each step, and of each forward or backward of a unit, its share of the update included."""

    step_s: float
    unit_s: float


def fixed_costs(backend: Backend, steps: int) -> FixedCosts:
    """Trains twice, so many steps each; medians."""
    few, many = (_step_s(backend, units, steps) for units in (_FEW, _MANY))
    unit_s = max(many - few, 0.0) / (2 * (_MANY - _FEW))
    return FixedCosts(step_s=max(few - 2 * (_FEW + 1) * unit_s, 1e-9), unit_s=max(unit_s, 1e-9))


def _step_s(backend: Backend, units: int, steps: int) -> float:
    watch = _Watch()
    loud = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator=backend.name,
                devices=[backend.device.index or 0] if backend.apart else 1,
                strategy=AngelPTMStrategy(page_size="64KiB", device_memory="auto", host_memory="64MiB"),
                precision="bf16-mixed",
                max_steps=steps + _WARM_UP,
                callbacks=[watch],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(_Tiny(units), DataLoader(_Rows(), batch_size=None))
    finally:
        logging.getLogger("lightning.pytorch").setLevel(loud)
    ends = watch.ends_s[_WARM_UP - 1 :]
    return median(after - before for before, after in itertools.pairwise(ends))


class _Tiny(LightningModule):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(units))
        self.head = nn.Linear(_WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class _Rows(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.ones(4, _WIDTH)


class _Watch(Callback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """A step is over."""
        self.ends_s.append(perf_counter())
