"""Under tensor parallelism, what is logged, counted by metrics, gathered and decided is that of a run with as many ranks as
there are different batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import Blocks, is_whole, loader, trainer_of
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

KINDS = ("sum", "mean", "max", "min")


class Logging(Blocks):
    """Logs in all ways; keeps what it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.mean = SumMetric(), MeanMetric()
        self.gathered: list[Tensor] = []
        self.copied: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for kind in KINDS:
            self.log(f"step_{kind}", batch.sum(), sync_dist=True, reduce_fx=kind, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for kind in KINDS:
            self.log(f"val_{kind}", batch.sum(), sync_dist=True, reduce_fx=kind)
        self.total.update(batch.sum())
        self.mean.update(batch.sum(1))
        self.log("total", self.total)
        self.log("mean", self.mean)
        self.gathered.append(self.all_gather(batch.sum()))
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.copied.append(float(copy.deepcopy(self.total).compute()))


def logged(ranks: int, tensor: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Logging()
    keeps = ModelCheckpoint(
        folder / f"{ranks}x{tensor}", monitor="val_sum", filename="{epoch}-{val_sum:.4f}", mode="max"
    )
    stops = EarlyStopping("total", patience=0, mode="max", min_delta=1.0)
    trainer = trainer_of(ranks, tensor, max_epochs=3, callbacks=[keeps, stops], enable_checkpointing=True)
    trainer.fit(module, loader(8), loader(12))
    assert is_whole(module)
    assert module.total.process_group is None and "_sync_dist" not in module.total.__dict__
    return {
        **{name: float(value) for name, value in trainer.callback_metrics.items()},
        "gathered": [each.flatten().tolist() for each in module.gathered],
        "copied": module.copied,
        "epochs": trainer.current_epoch,
        "best": Path(keeps.best_model_path).name,
    }


@pytest.mark.parametrize(("ranks", "alike"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_what_is_logged_counts_each_batch_once(ranks: int, alike: int, tmp_path: Path) -> None:
    plain = run_ranks(logged, alike, alike, 1, tmp_path)
    cut = run_ranks(logged, ranks, ranks, 2, tmp_path, limit_s=240)
    assert len(plain[0]["gathered"]) == len(cut[0]["gathered"]) == 12 // 2 // alike * plain[0]["epochs"]
    for rank, each in enumerate(cut):
        expected = plain[rank // 2]
        assert each.keys() == expected.keys()
        assert {name: each[name] for name in each} == expected
