"""`lightning-ptm plan` against runs whose ranks have blocks in stages: bytes of pages, graphs, and what stages send."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.planned_runs import LIMITS, NEAR, make_trainer, planned
from kit.ranks.harness import run_ranks
from torch import Tensor

from lightning_ptm.comm.stage_link import StageLink
from lightning_ptm.data import TextBytes
from lightning_ptm.models import GPT
from lightning_ptm.terms import Tier

MODEL: dict[str, Any] = {"width": 128, "layers": 4, "heads": 4, "sequence_length": 64, "warmup_steps": 1}
BATCH, STEPS = 8, 4  # before the last step, stages are not compared
STAGES = {"pipeline_parallel_size": 2, "micro_batches": 4}
RUNS: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "three tiers, recomputed": {
        "device_memory": "3MiB",
        "offload_parameters": "host",
        "offload_optimizer": "disk",
        "recompute": "all",
    },
}


@dataclass(frozen=True)
class Measured:
    """Of one rank: device bytes of pages at the peak, graphs kept at most, and bytes sent to other stages in a step."""

    pages: int
    graphs: int
    sent: int


class Watch(L.Callback):
    measured: Measured

    def __init__(self) -> None:
        self.sent = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        pages = strategy.engine.allocator.peak_bytes(Tier.DEVICE)
        self.measured = Measured(pages, strategy._run.steps.most_graphs, self.sent)
        self.sent = 0


def train(folder: str, data: Mapping[str, Any], settings: Mapping[str, Any]) -> Measured:
    """One rank's part."""
    torch.manual_seed(0)
    watch = Watch()
    send = StageLink.send

    def counted(link: StageLink, value: Tensor) -> None:
        watch.sent += value.nbytes
        send(link, value)

    StageLink.send = counted  # type: ignore[method-assign]
    trainer = make_trainer({**settings, "disk_path": folder}, STEPS, watch, int(os.environ["WORLD_SIZE"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(GPT(**MODEL), datamodule=TextBytes(**data))
    return watch.measured


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", [pytest.param("in RAM", marks=pytest.mark.slow), "three tiers, recomputed"])
def test_stages_are_those_of_the_run(disk: Path, tmp_path: Path, name: str, schedule: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 256)
    data = {"path": str(text), "sequence_length": MODEL["sequence_length"], "batch_size": BATCH}
    described = (
        {"class_path": "lightning_ptm.models.GPT", "init_args": MODEL},
        {"class_path": "lightning_ptm.data.TextBytes", "init_args": data},
    )
    settings = {**LIMITS, **STAGES, "pipeline_schedule": schedule, **RUNS[name]}
    last, first = run_ranks(train, 2, str(disk), data, settings, limit_s=200)
    found = planned(tmp_path, settings | {"disk_path": str(disk)}, STEPS, *described, ranks=2)
    assert found.fits and found.pipeline is not None
    for stage, measured in zip(found.pipeline.stages, (first, last), strict=True):
        assert stage.graphs == measured.graphs
        assert stage.sent_bytes == measured.sent
        assert stage.page_bytes == pytest.approx(measured.pages, rel=NEAR)
