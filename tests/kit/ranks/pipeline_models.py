"""A GPT trained by ranks that have its blocks in stages, and by one rank that has all of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.tensor_models import STEPS, VOCABULARY, Evictions, PreciseGPT
from kit.ranks.training import PLACES
from kit.settings import merged
from lightning_ptm.trainer.pipelined import PipelinedSteps
from lightning_ptm.trainer.precision import AngelPTMPrecision

BATCH, LENGTH = 8, 17


class StagedGPT(PreciseGPT):
    """Takes down the losses of whole batches, which every stage gets."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"layers": 4, **sizes})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("losses", []).append(float(outputs["loss"]))


@dataclasses.dataclass(frozen=True)
class StagedRun:
    """How ranks train the model; `micro_batches` of one stage are accumulated."""

    ranks: int = 1
    stages: int = 1
    tensor: int = 1
    micro_batches: int = 4
    schedule: str = "1f1b"
    tier: str = "ram"
    precision: str = "64-true"
    steps: int = STEPS
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evictions: int | None = None
    saved_to: str | None = None
    resumed_from: str | None = None


@dataclasses.dataclass(frozen=True)
class StagedOutcome:
    """Result of a training on one rank.

    Attributes:
        bytes: of states at home on this rank, by kind of states.
        most_graphs: the most micro-batches of which it kept graphs.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    bytes: dict[str, int]
    most_graphs: int
    metrics: dict[str, float]


class _Watch(L.Callback):
    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.most_graphs = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.bytes = {}
        for each in strategy.states_at_home():
            self.bytes[each.states] = self.bytes.get(each.states, 0) + each.bytes
        if isinstance(strategy._run.steps, PipelinedSteps):
            self.most_graphs = strategy._run.steps.most_graphs


def train(
    how: StagedRun, disk: Path, *callbacks: L.Callback, model: type[L.LightningModule] = StagedGPT
) -> StagedOutcome:
    """One rank's part."""
    rank = int(os.environ.setdefault("RANK", "0"))
    torch.manual_seed(0)
    module = model(**how.sizes)
    base = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": str(disk), "timeout": timedelta(seconds=60)}
    divided: dict[str, Any] = {"tensor_parallel_size": how.tensor}
    if how.stages > 1:
        divided["pipeline_parallel_size"] = how.stages
        divided |= {"micro_batches": how.micro_batches, "pipeline_schedule": how.schedule}
    strategy = strategy_with(**merged(base, divided, PLACES[how.tier], how.settings))
    data = how.ranks // how.stages // how.tensor
    rows = torch.randint(3, VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    sampler = DistributedSampler(rows, data, rank // how.tensor % data, shuffle=False)  # type: ignore[arg-type, var-annotated]
    watch = _Watch()
    precision: dict[str, Any] = {"precision": how.precision}
    if how.precision == "16-mixed":  # which Lightning replaces by bf16-mixed on a CPU
        precision = {"plugins": [AngelPTMPrecision("16-mixed")]}
    trainer = quiet_trainer(
        strategy,
        devices=how.ranks,
        **precision,
        use_distributed_sampler=False,  # it would shuffle
        callbacks=[watch, *callbacks, *([] if how.evictions is None else [Evictions(how.evictions)])],
        **{"max_steps": how.steps, **how.trainer},
    )
    trainer.fit(module, DataLoader(rows, BATCH // data, sampler=sampler), ckpt_path=how.resumed_from)  # type: ignore[arg-type]
    if how.saved_to is not None:
        trainer.save_checkpoint(disk / how.saved_to)
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return StagedOutcome(vars(module)["losses"], weights, watch.bytes, watch.most_graphs, metrics)


def assert_same(
    outcomes: list[StagedOutcome], whole: StagedOutcome, losses: float = 1e-12, weights: float = 1e-9
) -> None:
    """Ranks' losses, averaged over data, and their weights are one rank's."""
    mean = torch.tensor([each.losses for each in outcomes], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(whole.losses, dtype=torch.float64), rtol=0, atol=losses)
    for each in outcomes:
        assert each.weights.keys() == whole.weights.keys()
        for name, value in whole.weights.items():
            torch.testing.assert_close(each.weights[name], value, rtol=0, atol=weights, msg=name)
