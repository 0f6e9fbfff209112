"""A small model whose blocks tensor parallelism cuts, for tests of what is around the model: data, logs, random numbers,
checkpoints."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kit.fits import quiet_trainer
from kit.settings import merged
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel

PLAN = {"blocks.*.expand": ColwiseParallel(), "blocks.*.project": RowwiseParallel()}
WIDTH = 16


class Notes(list[Tensor]):
    """A list that a recomputed forward writes to, too: what it does to its module's own lists is forgotten."""


class Noted(nn.Module):
    """Dropout whose masks are kept, with whether they were drawn in a backward pass."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.masks = Notes()
        self.again = Notes()

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.share):
            return x
        mask = torch.rand_like(x) >= self.share
        (self.again if torch._C._current_graph_task_id() != -1 else self.masks).append(mask)
        return x * mask / (1 - self.share)


class Block(nn.Module):
    def __init__(self, inside: float, outside: float) -> None:
        super().__init__()
        self.expand, self.project = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inside, self.outside = Noted(inside), Noted(outside)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outside(self.project(self.inside(torch.tanh(self.expand(x)))))


class Blocks(L.LightningModule):
    """Learns to give back zeros.

    Args:
        inside, outside: shares that dropout leaves out, of what ranks divide, and of what is whole.
    """

    def __init__(self, inside: float = 0.0, outside: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(Block(inside, outside) for _ in range(2))
        self.losses: list[float] = []
        self.seen: list[Any] = []

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class SaveAfterOneEpoch(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def module_of(seed: int = 0, **shares: float) -> Blocks:
    torch.manual_seed(seed)
    return Blocks(**shares)


def trainer_of(
    ranks: int, tensor: int, settings: Any = (), strategy: type[AngelPTMStrategy] = AngelPTMStrategy, **given: Any
) -> L.Trainer:
    """A quiet one, in float64."""
    os.environ.setdefault("RANK", "0")
    own: dict[str, Any] = {
        "page_size": "64KiB",
        "debug": {"poison": True},
        "units": ["Block"],
        "tensor_parallel_size": tensor,
        "tensor_parallel": {"plan": PLAN if tensor > 1 else "auto"},
        "timeout": timedelta(seconds=60),
    }
    options: dict[str, Any] = {"devices": ranks, "precision": "64-true", "max_epochs": 1, "num_sanity_val_steps": 0}
    return quiet_trainer(strategy(**merged(own, dict(settings))), **{**options, **given})


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def loader(count: int, batch: int = 2, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(rows(count), batch, **options)  # type: ignore[arg-type]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def is_whole(module: Blocks) -> bool:
    """Whether the module is uncut: original shapes, no replaced forward."""
    shapes = {name: each.shape for name, each in Blocks().named_parameters()}
    return {name: each.shape for name, each in module.named_parameters()} == shapes and not any(
        "forward" in each.__dict__ or "_call_impl" in each.__dict__ for each in module.modules()
    )


__all__ = [
    "PLAN",
    "WIDTH",
    "Block",
    "Blocks",
    "Noted",
    "SaveAfterOneEpoch",
    "is_whole",
    "loader",
    "module_of",
    "rows",
    "trainer_of",
    "weights_of",
]
