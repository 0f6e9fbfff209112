"""`lightning-ptm plan` against runs on several ranks: bytes of pages in each tier, and of tokens that travel, where ranks
divide experts and where they do not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from rank_harness import run_ranks

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.commands.forecast import Forecast
from lightning_ptm.commands.plan import forecast
from lightning_ptm.data import SpanCorruption
from lightning_ptm.models import T5MoE
from lightning_ptm.planning import Link
from lightning_ptm.terms import Tier

WIDTH = 128
MODEL: dict[str, Any] = {"vocab_size": 300, "width": WIDTH, "layers": 4, "heads": 4, "feed_forward_width": 256}
MODEL |= {"experts": 4, "dropout": 0.0, "jitter": 0.0, "warmup_steps": 1}
BATCH, LENGTH, STEPS = 8, 64, 2
NEAR = 0.03
BASE = {"page_size": "64KiB", "host_memory": "64MiB", "disk_memory": "64MiB", "units": ["Block", "Expert"]}
THREE = {"device_memory": "3MiB", "parameter_home": "host", "master_home": "disk"}
CLIPPED = {"gradient_clip_val": 1.0}


@dataclass(frozen=True)
class Run:
    """What is planned and then trained."""

    settings: dict[str, Any]
    trainer: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Bytes of pages at the peak, by tier; of rows that left this rank in a step, gradients' way back included."""

    pages: dict[str, int]
    sent: float


DIVIDED = {"expert_parallel_size": 2}
RUNS: dict[int, dict[str, Run]] = {
    2: {
        "in RAM": Run(DIVIDED, {}),
        "in RAM, clipped": Run(DIVIDED, CLIPPED),
        "lock-free": Run(DIVIDED | {"lock_free": True}, {}),
        "three tiers, recomputed": Run(DIVIDED | THREE | {"recompute": "all"}, {}),
        "reduced once": Run(DIVIDED | {"reduce_gradients": "each_step"}, {"accumulate_grad_batches": 2}),
        "undivided, clipped": Run({}, CLIPPED),
    },
    4: {"three tiers": Run(DIVIDED | THREE, {})},
}
"""By number of ranks."""


class Watch(L.Callback):
    measured: Measured

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        allocator = trainer.strategy.engine.allocator  # type: ignore[attr-defined]
        tokens = trainer.strategy.statistics().tokens  # type: ignore[attr-defined]
        rows = 0.0 if tokens is None else tokens.sent_away / (trainer.fit_loop.epoch_loop.batch_idx + 1)
        rows *= trainer.accumulate_grad_batches
        pages = {tier.name.lower(): allocator.peak_bytes(tier) for tier in Tier}
        self.measured = Measured(pages, rows * WIDTH * torch.bfloat16.itemsize)


def train(folder: str, text: str, runs: Sequence[Run]) -> list[Measured]:
    """One rank's part of several trainings, one after the other."""
    found = []
    for run in runs:
        torch.manual_seed(0)
        watch = Watch()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            precision="bf16-mixed",
            strategy=AngelPTMStrategy(**BASE | run.settings, disk_path=folder),
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch],
            limit_val_batches=0,
            **run.trainer,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(T5MoE(**MODEL), datamodule=SpanCorruption(path=text, sequence_length=LENGTH, batch_size=BATCH))
        found.append(watch.measured)
    return found


def planned(folder: Path, text: str, ranks: int, run: Run) -> Forecast:
    strategy = {
        "class_path": "lightning_ptm.AngelPTMStrategy",
        "init_args": {**BASE, **run.settings, "disk_path": str(folder)},
    }
    data = {"path": text, "sequence_length": LENGTH, "batch_size": BATCH}
    document = {
        "trainer": {"precision": "bf16-mixed", "strategy": strategy, "max_steps": STEPS, **run.trainer},
        "model": {"class_path": "lightning_ptm.models.T5MoE", "init_args": MODEL | {"meta": True}},
        "data": {"class_path": "lightning_ptm.data.SpanCorruption", "init_args": data},
    }
    rates = ("host_memory", "disk_read", "disk_write", "intra_node")
    absent = ("device_memory", "host_to_device", "device_to_host", "inter_node")
    machine = {
        "device": "cpu",
        "ranks_per_node": ranks,
        "device_memory": 0,
        "host_memory": "64GiB",
        "disk_memory": "1TiB",
        "cpu_cores": os.cpu_count(),
        "compute_flops_per_s": {"bfloat16": 1e11},
        "compute_efficiency": 1,
        **dict.fromkeys((f"{name}_bytes_per_s" for name in absent), None),
        **dict.fromkeys((f"{name}_bytes_per_s" for name in rates), 1e9),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(document))
    (folder / "machine.yaml").write_text(yaml.safe_dump(machine))
    return forecast(folder / "config.yaml", str(folder / "machine.yaml"))[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", RUNS)
def test_bytes_are_those_of_the_run(disk: Path, tmp_path: Path, ranks: int) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 256)
    runs = RUNS[ranks]
    measured = run_ranks(train, ranks, str(disk), str(text), list(runs.values()), limit_s=200)
    for place, (name, run) in enumerate(runs.items()):
        found = planned(tmp_path, str(text), ranks, run)
        assert found.fits and found.timing is not None
        pages = {tier: plan.page_bytes for tier, plan in found.tiers.items()}
        for of_rank in measured[:2]:  # of a group
            assert pages == pytest.approx(of_rank[place].pages, rel=NEAR), name
        exchanged = {use.link: use.bytes for use in found.timing.links}[Link.EXCHANGE]
        # Rows there and gradients back are this rank's; results back and gradients there the other's.
        both = 2 * sum(of_rank[place].sent for of_rank in measured[:2])
        again = both / 2 if "recompute" in run.settings else 0.0
        assert exchanged == pytest.approx(both + again, rel=NEAR), name
