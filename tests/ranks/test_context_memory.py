"""Context parallelism: what autograd keeps of a training step's forward on a rank, of long texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.models import GPT

LONG, SHORT = 4096, 2048
LONGER = 3688
"""A text 1.8 times as long as `SHORT`."""


class Kept(L.Callback):
    """Bytes that autograd keeps of the last step's forward: storages once, without parameters."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self._hooks: Any = None
        self._parameters: set[int] = set()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        self.kept.clear()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        self._hooks.__exit__()
        self._parameters = {each.untyped_storage().data_ptr() for each in module.parameters()}

    def _keep(self, tensor: Tensor) -> Tensor:
        self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        held = {key: each for key, each in self.kept.items() if key not in self._parameters}
        return sum(each.untyped_storage().nbytes() for each in held.values())


def kept(disk: Path, lengths: tuple[int, ...], way: str) -> list[int]:
    """One rank's part: the bytes for texts of each length."""
    found = []
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for length in lengths:
        torch.manual_seed(0)
        module = GPT(width=32, heads=4, layers=2, sequence_length=length)
        texts = torch.randint(0, 256, (2, length + 1), generator=torch.Generator().manual_seed(1))
        watch = Kept()
        context: dict[str, Any] = {} if ranks == 1 else {"context_parallel_size": ranks, "context_parallel": way}
        trainer = quiet_trainer(
            AngelPTMStrategy(page_size="64KiB", disk_path=str(disk), **context),
            devices=ranks,
            max_steps=2,
            use_distributed_sampler=False,
            callbacks=[watch],
        )
        trainer.fit(module, DataLoader([(text[:-1], text[1:]) for text in texts], batch_size=1))  # type: ignore[arg-type]
        found.append(watch.bytes)
    return found


def test_a_rank_of_two_keeps_half_and_has_room_for_nearly_twice_the_text(disk: Path) -> None:
    ((of_long, of_short),) = run_ranks(kept, 1, disk, (LONG, SHORT), "auto")
    assert of_short >= 2048 * 32 * 4 * 2 * 5  # at least five hidden states of each block
    for way in ("gather", "ring"):
        for half, of_longer in run_ranks(kept, 2, disk, (LONG, LONGER), way):
            assert 0.45 * of_long <= half <= 0.55 * of_long, (way, half / of_long)
            assert LONGER >= 1.8 * SHORT and of_longer <= of_short, (way, of_longer / of_short)
