"""Weights from and to `torch.distributed.checkpoint` on two ranks: DTensors, as FSDP2 has them, and sharded checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.fits import fit
from kit.models import Linears
from kit.ranks.harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy, sharded
from lightning_ptm.config import Checkpoints, Weights


class First(L.Callback):
    """The weights with which training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = {name: value.clone() for name, value in module.state_dict().items()}


def rank(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = Linears(seed=3).state_dict()
    dcp.save(
        {"state_dict": {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}},
        checkpoint_id=folder / "theirs",
    )
    first = First()
    strategy = AngelPTMStrategy(
        page_size="64KiB",
        disk_path=folder,
        offload_optimizer="disk",
        weights=Weights(path=folder / "theirs"),
        checkpoints=Checkpoints(state_dict_type="sharded"),
    )
    data = DataLoader(torch.randn(8, 64), batch_size=2)
    trainer = fit(Linears(seed=4), data, strategy, max_steps=2, devices=2, callbacks=[first, Saves(folder / "ours")])
    assert first.weights.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(value, first.weights[name]), name

    into = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in whole.items()}
    dcp.load(into, storage_reader=sharded.DCPReader(folder / "ours"))
    for name, value in trainer.lightning_module.state_dict().items():
        assert isinstance(into[name], DTensor) and torch.equal(into[name].full_tensor(), value), name


class Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_dtensors_of_two_ranks_come_and_go(tmp_path: Path) -> None:
    run_ranks(rank, 2, tmp_path)
