"""Overheads of a training step: hooks, tasks, Lightning's loop, and exchanges of tensor parallelism, apart from arithmetic
and copies. Measured by training tiny models, once with few units and once with many.

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

from lightning_ptm.config import TensorParallel
from lightning_ptm.memory.backend import Backend
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel
from lightning_ptm.trainer.strategy import AngelPTMStrategy

_FEW, _MANY = 2, 18
_WIDTH = 8
PAIRS = 2
"""Pairs of divided layers in a block: one for attention, one for feed-forward."""
_WARM_UP = 4
"""Steps that are traced and planned, and create the optimizer's states."""


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Seconds per step, and per forward or backward of a unit, including its share of the update."""

    step_s: float
    unit_s: float


def fixed_costs(backend: Backend, steps: int) -> FixedCosts:
    """Trains twice, for `steps` steps each, and compares medians."""
    few, many = (_step_s(backend, _Tiny(units), steps) for units in (_FEW, _MANY))
    unit_s = max(many - few, 0.0) / (2 * (_MANY - _FEW))
    return FixedCosts(step_s=max(few - 2 * (_FEW + 1) * unit_s, 1e-9), unit_s=max(unit_s, 1e-9))


def block_s(backend: Backend, steps: int, ranks: int = 1) -> float:
    """Seconds of a forward and a backward of a block with little arithmetic, one of many, with its share of the update.

    Args:
        ranks: number of ranks that divide its layers. Collective: all ranks of the launch call it.
    """
    few, many = (_step_s(backend, _Divisible(units, ranks), steps, ranks) for units in (_FEW, _MANY))
    return max(many - few, 0.0) / (_MANY - _FEW)


def _step_s(backend: Backend, module: _Tiny, steps: int, ranks: int = 1) -> float:
    watch = _Watch()
    loud = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    one = [backend.device.index or 0] if backend.has_own_memory else 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator=backend.name,
                devices=one if ranks == 1 else ranks,
                strategy=AngelPTMStrategy(
                    page_size="64KiB",
                    device_memory="auto",
                    host_memory="64MiB",
                    units=sorted({type(block).__name__ for block in module.blocks}),  # too small to be found by "auto"
                    tensor_parallel_size=ranks,
                    tensor_parallel=TensorParallel(plan=_PLAN) if ranks > 1 else TensorParallel(),
                ),
                precision="bf16-mixed",
                max_steps=steps + _WARM_UP,
                callbacks=[watch],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, DataLoader(_Rows(), batch_size=None))
    finally:
        logging.getLogger("lightning.pytorch").setLevel(loud)
    ends = watch.ends_s[_WARM_UP - 1 :]
    return median(after - before for before, after in itertools.pairwise(ends))


class _Unit(nn.Linear):
    """A unit by its class name, which the head does not have."""


class _Tiny(LightningModule):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Unit(_WIDTH, _WIDTH) for _ in range(units))
        self.head = nn.Linear(_WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


_PLAN = {"blocks.*.columns.*": ColwiseParallel(), "blocks.*.rows.*": RowwiseParallel()}


class _Pairs(nn.Module):
    """A block of pairs of layers that ranks can divide."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Linear(_WIDTH, inside) for _ in range(PAIRS))
        self.rows = nn.ModuleList(nn.Linear(inside, _WIDTH) for _ in range(PAIRS))

    def forward(self, x: Tensor) -> Tensor:
        for columns, rows in zip(self.columns, self.rows, strict=True):
            x = x + rows(columns(x))
        return x


class _Divisible(_Tiny):
    """A model of blocks that are wider with more ranks, so that each rank has the same work."""

    def __init__(self, units: int, ranks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(_Pairs(_WIDTH * ranks) for _ in range(units))


class _Rows(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.ones(4, _WIDTH)


class _Watch(Callback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Records the time at the end of each step."""
        self.ends_s.append(perf_counter())
