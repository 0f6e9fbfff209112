"""Under context parallelism, an evaluation computes whole texts, and what is logged counts each batch, or token, once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.context_layers import VOCABULARY, Layered
from kit.ranks.harness import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from lightning_ptm import AngelPTMStrategy

KINDS = ("sum", "mean", "max", "min")


class Logging(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.total, self.mean = SumMetric(), SumMetric(), MeanMetric()
        self.lengths: list[int] = []
        self.gathered: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.trained.update(batch[0].sum())
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("ended", outputs["loss"], sync_dist=True, on_step=True, on_epoch=True)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.lengths.append(batch[0].shape[1])
        assert torch.equal(self.trainer.strategy.positions(5), torch.arange(5))  # type: ignore[attr-defined]
        tokens = batch[0].double()
        for kind in KINDS:
            self.log(f"val_{kind}", tokens.sum(), sync_dist=True, reduce_fx=kind)
        self.total.update(tokens.sum())
        self.mean.update(tokens.sum(1))
        self.log("total", self.total)
        self.log("mean", self.mean)
        self.gathered += self.all_gather(tokens.sum()).flatten().tolist()

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.tokens(batch[0]).sum((1, 2))


def loader(count: int, ranks: int, same: int) -> DataLoader[Any]:
    texts = torch.randint(2, VOCABULARY, (count, 17), generator=torch.Generator().manual_seed(count))
    rows = [(text[:-1], text[1:], torch.ones(16)) for text in texts]
    replica = int(os.environ.get("RANK", "0")) // same
    sampler = DistributedSampler(rows, ranks // same, replica, shuffle=False)  # type: ignore[arg-type, var-annotated]
    return DataLoader(rows, 2, sampler=sampler)  # type: ignore[arg-type]


def logged(ranks: int, context: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Logging()
    strategy = AngelPTMStrategy(page_size="64KiB", disk_path=str(folder), context_parallel_size=context)
    trainer: L.Trainer = quiet_trainer(
        strategy, devices=ranks, precision="64-true", max_epochs=2, use_distributed_sampler=False
    )
    trainer.fit(module, loader(8, ranks, context), loader(12, ranks, context))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found.pop("loss")  # of this rank's tokens
    predicted = trainer.predict(module, loader(4, ranks, context))
    assert predicted is not None
    return {**found, "lengths": module.lengths, "gathered": module.gathered, "predicted": torch.cat(predicted).tolist()}


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_what_is_logged_counts_each_token_once(ranks: int, replicas: int, tmp_path: Path) -> None:
    plain = run_ranks(logged, replicas, replicas, 1, tmp_path)
    divided = run_ranks(logged, ranks, ranks, 2, tmp_path, limit_s=240)
    for rank, each in enumerate(divided):
        expected = plain[rank // 2]
        assert each.keys() == expected.keys()
        for name, value in expected.items():
            assert each[name] == pytest.approx(value, rel=1e-12), name
