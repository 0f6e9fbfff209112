"""Every way in which settings meet: a run trains, saves, is resumed, and ends with whole weights, with the same numbers
wherever model states live.

A case is a choice of each of `AXES`; `few` (covering.py) takes some of them. What is compared:
losses and weights with the same training in RAM (for 32-true with a plain Trainer, too, or DDP on several ranks), and the
resumed run with the one that was not cut short. On several ranks each rank sees batches of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from covering import Case
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy

WIDTH = 66
BATCHES = 2
MEMORY: dict[str, dict[str, Any]] = {"ram": {}, "tiers": {"device_memory": "2MiB", "host_memory": "8MiB"}}
HOMES = ("auto", "host", "disk")
UPDATES: dict[str, dict[str, Any]] = {"synchronous": {}, "lock-free": {"lock_free": True, "max_staleness": 0}}
Parameters = Sequence[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], list[torch.optim.Optimizer]]] = {
    "SGD": lambda them: [torch.optim.SGD(them, lr=1e-2)],
    "SGD with momentum": lambda them: [torch.optim.SGD(them, lr=1e-2, momentum=0.9, nesterov=True)],
    "Adam": lambda them: [torch.optim.Adam(them, lr=1e-2, fused=True)],
    "AdamW amsgrad": lambda them: [torch.optim.AdamW(them, lr=1e-2, amsgrad=True, fused=True)],
    "RMSprop": lambda them: [torch.optim.RMSprop(them, lr=1e-2, centered=True, momentum=0.5)],
    "two": lambda them: [torch.optim.SGD(them[:3], lr=1e-2), torch.optim.Adam(them[3:], lr=1e-2, fused=True)],
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")
SAVES: dict[str, dict[str, Any]] = {
    "full": {"state_dict_type": "full"},
    "sharded": {"state_dict_type": "sharded"},
    "behind": {"state_dict_type": "sharded", "async_save": True},
}
AXES = (tuple(MEMORY), HOMES, HOMES, tuple(UPDATES), tuple(OPTIMIZERS), PRECISIONS, tuple(SAVES))
"""Tiers, offload_parameters, offload_optimizer, updates, optimizers, precision, saves."""


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def settings_of(case: Case) -> dict[str, Any]:
    memory, parameters, masters, updates, _, _, saves = case
    homes = {"offload_parameters": parameters, "offload_optimizer": masters}
    return {**MEMORY[memory], **homes, **UPDATES[updates], **SAVES[saves]}


def can_be(case: Case) -> bool:
    """Lock-free updates keep parameters in RAM, and refuse to do otherwise."""
    return case[3] != "lock-free" or case[1] != "disk"


class Net(L.LightningModule):
    """A unit of its own for each block, and a buffer."""

    def __init__(self, optimizers: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(2))
        self.losses: list[Tensor] = []
        self._chosen = optimizers
        self.automatic_optimization = optimizers != "two"

    def loss(self, batch: Tensor) -> Tensor:
        self.seen += 1
        batch = batch.to(self.scale.dtype) * self.scale
        for block in self.blocks:
            batch = torch.relu(block(batch)) + batch
        loss = batch.double().square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self._chosen](list(self.parameters()))


class Saves(L.Callback):
    """A checkpoint after the first epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self._path)


def train(strategy: Any, optimizer: str, precision: str, resume: Path | None = None, *callbacks: L.Callback) -> Net:
    torch.manual_seed(0)
    module = Net(optimizer)
    items = list(torch.randn(BATCHES * world_size(), 4, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks) or None,
    )
    trainer.fit(module, DataLoader(items, batch_size=1, collate_fn=lambda rows: rows[0]), ckpt_path=resume)  # type: ignore[arg-type]
    return module


def same(ours: Net, theirs: Net, epochs: int) -> None:
    """The losses of the last epochs, and all weights and buffers, bit for bit."""
    count = epochs * BATCHES * (1 if ours.automatic_optimization else 2)
    assert len(ours.losses) == count
    assert all(map(torch.equal, ours.losses[-count:], theirs.losses[-count:])), (ours.losses, theirs.losses)
    state = theirs.state_dict()
    assert all(value.isfinite().all() for value in state.values())
    different = [name for name, value in ours.state_dict().items() if not torch.equal(value, state[name])]
    assert not different


@lru_cache
def expected(optimizer: str, precision: str) -> Net:
    """In RAM."""
    ours = train(AngelPTMStrategy(page_size="64KiB"), optimizer, precision)
    if precision == "32-true":
        same(ours, train("auto" if world_size() == 1 else "ddp", optimizer, precision), 2)
    return ours


def check(case: Case, folder: Path) -> None:
    optimizer, precision = case[4:6]
    disk, path = folder / "disk", folder / "half.ckpt"
    disk.mkdir(exist_ok=True, parents=True)

    def strategy() -> AngelPTMStrategy:
        return AngelPTMStrategy(page_size="64KiB", poison=True, disk_path=disk, **settings_of(case))

    whole = train(strategy(), optimizer, precision, None, Saves(path))
    same(whole, expected(optimizer, precision), 2)
    same(train(strategy(), optimizer, precision, path), whole, 1)
    assert not list(disk.iterdir())


ALL = list(filter(can_be, itertools.product(*AXES)))
