"""`sync_batchnorm=True` with ranks on CPUs ends before anything is trained, as under DDP: torch synchronizes on GPUs only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import loader, module_of, trainer_of
from kit.ranks.training import make_strategy
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import ConfigError


class Normed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.norm(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def told(strategy: Any) -> tuple[str, str, bool]:
    """The error, the norm's class behind it, and whether the weights are as they were."""
    module = Normed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = quiet_trainer(strategy, devices=2, sync_batchnorm=True)
    text = ""
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    unchanged = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return text, type(module.norm).__name__, unchanged


def both(folder: Path) -> list[tuple[str, str, bool]]:
    return [told(DDPStrategy()), told(make_strategy(folder, "ram"))]


def test_it_is_refused_as_under_ddp(tmp_path: Path) -> None:
    for theirs, ours in run_ranks(both, 2, tmp_path, limit_s=120.0):
        assert theirs[0] == "ValueError: SyncBatchNorm layers only work with GPU modules"
        assert ours[0].startswith("ConfigError: sync_batchnorm=True: torch's SyncBatchNorm works on GPUs only")
        assert ours[1] != "SyncBatchNorm"
        assert ours[2]


class Groups(L.Callback):
    """The ranks among which a norm that is there when a run begins would be synchronised."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        # A CPU has to refuse what it has made of them.
        norms, strategy = nn.Sequential(nn.BatchNorm1d(8)), trainer.strategy
        with pytest.raises(ConfigError, match="works on GPUs only"):
            strategy._synchronize_batch_norms(norms, TorchSyncBatchNorm())  # type: ignore[attr-defined]
        norm = next(each for each in norms.modules() if isinstance(each, nn.SyncBatchNorm))
        self.found = torch.distributed.get_process_group_ranks(norm.process_group)


def groups(ranks: int, tensor: int) -> list[int]:
    callback = Groups()
    trainer_of(ranks, tensor, callbacks=[callback], max_steps=1).fit(module_of(), loader(2 * ranks))
    return callback.found


@pytest.mark.parametrize(
    ("tensor", "expected"), [(2, [[0, 2], [1, 3], [0, 2], [1, 3]]), pytest.param(1, 4 * [[0, 1, 2, 3]], id="whole")]
)
def test_ranks_that_compute_the_same_batch_count_once(tensor: int, expected: list[list[int]]) -> None:
    assert run_ranks(groups, 4, 4, tensor, limit_s=120.0) == expected
