"""Pipeline stages: evaluations, and what callbacks and schedulers do with their results, are one rank's."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.harness import run_ranks
from kit.ranks.pipeline_models import BATCH, LENGTH, StagedGPT
from kit.ranks.tensor_models import VOCABULARY
from kit.ranks.training import PLACES
from kit.settings import merged
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric


class Watched(StagedGPT):
    """Logs numbers and metrics in all ways, and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.train_mean = MeanMetric()
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("batch", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="max")
        loss = super().training_step(batch, batch_idx)
        self.train_mean.update(loss.detach(), batch.shape[0])
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)  # type: ignore[arg-type]
        self.log("val_plain", float(batch_idx), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


@dataclasses.dataclass(frozen=True)
class Seen:
    metrics: dict[str, float]
    tested: list[dict[str, float]]
    validated: list[dict[str, float]]
    rates: list[float]
    best: tuple[str, float]
    epochs: int


def watch(ranks: int, stages: int, tensor: int, tier: str, disk: Path, results: Path) -> Seen:
    rank = int(os.environ.setdefault("RANK", "0"))
    torch.manual_seed(0)
    module, data = Watched(), ranks // stages // tensor
    stage_settings = {"pipeline_parallel_size": stages, "micro_batches": 4} if stages > 1 else {}
    base = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": str(disk), "tensor_parallel_size": tensor}
    strategy = strategy_with(**merged(base, stage_settings, PLACES[tier]))
    rows = torch.randint(3, VOCABULARY, (6 * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))

    def loader(rows: Tensor) -> DataLoader[Any]:
        sampler = DistributedSampler(rows, data, rank // tensor % data, shuffle=False)  # type: ignore[arg-type, var-annotated]
        return DataLoader(rows, BATCH // data, sampler=sampler)  # type: ignore[arg-type]

    best = ModelCheckpoint(results / "best", monitor="val_loss", filename="{epoch}")
    stopping = EarlyStopping("val_loss", patience=2)
    trainer = quiet_trainer(
        strategy,
        devices=ranks,
        precision="64-true",
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[best, stopping],
        max_epochs=8,
        max_steps=-1,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, loader(rows[: 4 * BATCH]), loader(rows[4 * BATCH :]))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    epochs = trainer.current_epoch
    tested = [dict(each) for each in trainer.test(module, loader(rows[4 * BATCH :]), verbose=False)]
    validated = [
        dict(each)
        for each in trainer.validate(module, loader(rows[3 * BATCH :]), verbose=False, ckpt_path=best.best_model_path)
    ]
    assert best.best_model_score is not None
    name = Path(best.best_model_path).name
    return Seen(metrics, tested, validated, module.rates, (name, float(best.best_model_score)), epochs)


@pytest.mark.parametrize(
    ("ranks", "stages", "tensor", "tier"),
    [
        (2, 2, 1, "tight"),
        pytest.param(4, 2, 1, "three_tiers", marks=pytest.mark.slow),
        pytest.param(4, 2, 2, "all_on_disk", marks=pytest.mark.slow),
        pytest.param(4, 4, 1, "ram", marks=pytest.mark.slow),
    ],
)
def test_callbacks_and_schedulers_see_on_all_ranks_what_one_rank_sees(
    ranks: int, stages: int, tensor: int, tier: str, tmp_path: Path
) -> None:
    (whole,) = run_ranks(watch, 1, 1, 1, 1, "ram", tmp_path, tmp_path / "one")
    assert whole.rates[-1] < whole.rates[0] and whole.epochs < 8  # the scheduler and the stopping have acted
    for seen in run_ranks(watch, ranks, ranks, stages, tensor, tier, tmp_path, tmp_path / "several", limit_s=120):
        assert (seen.epochs, seen.rates, seen.best[0]) == (whole.epochs, whole.rates, whole.best[0])
        assert seen.best[1] == pytest.approx(whole.best[1], abs=1e-6)
        for ours, theirs in ((seen.metrics, whole.metrics), (seen.tested[0], whole.tested[0])):
            assert ours == {name: pytest.approx(value, abs=1e-5) for name, value in theirs.items()}
        assert seen.validated[0] == {name: pytest.approx(value, abs=1e-5) for name, value in whole.validated[0].items()}


class Predicts(StagedGPT):
    """Keeps what a step leaves, and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.means.append(float(self.loss(batch)))

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.tensor(self.means).mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[:, :-1])
        return logits.argmax(-1)


def evaluated(stages: int) -> tuple[float, list[Tensor]]:
    os.environ.setdefault("RANK", "0")
    torch.manual_seed(0)
    module = Predicts()
    given = {"pipeline_parallel_size": stages, "micro_batches": 2} if stages > 1 else {}
    trainer = quiet_trainer(strategy_with(**given), devices=stages, precision="64-true")
    rows = torch.randint(3, VOCABULARY, (2 * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    loader = DataLoader(rows, BATCH)  # type: ignore[arg-type]
    trainer.validate(module, loader, verbose=False)
    mean = float(trainer.callback_metrics["mean"])
    return mean, trainer.predict(module, loader)  # type: ignore[return-value]


def test_what_steps_of_evaluations_keep_and_return_is_on_all_ranks() -> None:
    ((mean, predicted),) = run_ranks(evaluated, 1, 1)
    for ours, results in run_ranks(evaluated, 2, 2):
        assert ours == pytest.approx(mean, abs=1e-12)
        assert all(map(torch.equal, results, predicted)) and len(results) == len(predicted) == 2
