"""`lightning-ptm plan` against runs on several ranks: bytes of pages in each tier, and of tokens that travel, where ranks
divide experts and where they do not."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from kit.planned_runs import LIMITS, NEAR, NEAR_IF_LATE, make_trainer, planned
from kit.ranks.harness import run_ranks
from torch import Tensor

from lightning_ptm.data import SpanCorruption
from lightning_ptm.models import T5MoE
from lightning_ptm.terms import TIERS, Link

WIDTH = 128
MODEL: dict[str, Any] = {"vocab_size": 300, "width": WIDTH, "layers": 4, "heads": 4, "feed_forward_width": 256}
MODEL |= {"experts": 4, "dropout": 0.0, "jitter": 0.0, "warmup_steps": 1}
BATCH, LENGTH, STEPS = 8, 64, 2
BASE = {**LIMITS, "units": ["Block", "Expert"]}
THREE = {"device_memory": "3MiB", "offload_parameters": "host", "offload_optimizer": "disk"}
CLIPPED = {"gradient_clip_val": 1.0}


@dataclass(frozen=True)
class Run:
    """A run that is planned and then trained."""

    settings: dict[str, Any]
    trainer: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Bytes of pages at the peak, by tier; of rows, results and their gradients that left this rank in a step."""

    pages: dict[str, int]
    sent: float


DIVIDED = {"expert_parallel_size": 2}
RUNS: dict[int, dict[str, Run]] = {
    2: {
        "in RAM": Run(DIVIDED, {}),
        "in RAM, clipped": Run(DIVIDED, CLIPPED),
        "lock-free": Run(DIVIDED | {"lock_free": True}, {}),
        "three tiers, recomputed": Run(DIVIDED | THREE | {"recompute": "all"}, {}),
        "reduced once": Run(DIVIDED | {"tuning": {"reduce_gradients": "each_step"}}, {"accumulate_grad_batches": 2}),
        "undivided, clipped": Run({}, CLIPPED),
    },
    4: {"three tiers": Run(DIVIDED | THREE, {})},
}
"""By number of ranks."""
QUICK = ("three tiers, recomputed", "reduced once")


class Watch(L.Callback):
    """Looks at the tensors that torch is given to exchange; integers are the counts of rows that go before them, and what
    comes in equal parts is gradients that are reduced."""

    measured: Measured

    def __init__(self) -> None:
        self.sent_bytes = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        exchange = dist.all_to_all_single

        def counted(out: Tensor, rows: Tensor, received: Any = None, sent: Any = None, **options: Any) -> Any:
            if sent is not None and rows.is_floating_point():
                away = sum(sent) - sent[dist.get_rank(options["group"])]
                self.sent_bytes += away * rows[:1].numel() * rows.itemsize
            return exchange(out, rows, received, sent, **options)

        dist.all_to_all_single = counted
        try:
            yield
        finally:
            dist.all_to_all_single = exchange

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        allocator = trainer.strategy.engine.allocator  # type: ignore[attr-defined]
        batches = trainer.fit_loop.epoch_loop.batch_idx + 1
        pages = {tier.name.lower(): allocator.peak_bytes(tier) for tier in TIERS}
        self.measured = Measured(pages, self.sent_bytes / batches * trainer.accumulate_grad_batches)


def train(folder: str, data: Mapping[str, Any], runs: Sequence[Run]) -> list[Measured]:
    """One rank's part of several trainings, one after the other."""
    found = []
    for run in runs:
        torch.manual_seed(0)
        watch = Watch()
        settings = BASE | run.settings | {"disk_path": folder}
        trainer = make_trainer(settings, STEPS, watch, int(os.environ["WORLD_SIZE"]), **run.trainer)
        with warnings.catch_warnings(), watch.counting():
            warnings.simplefilter("ignore")
            trainer.fit(T5MoE(**MODEL), datamodule=SpanCorruption(**data))
        found.append(watch.measured)
    return found


def case(ranks: int, name: str) -> object:
    marks = [] if name in QUICK else [pytest.mark.slow]
    return pytest.param(ranks, name, marks=marks, id=f"{name} on {ranks}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ranks", "name"), [case(ranks, name) for ranks, runs in RUNS.items() for name in runs])
def test_bytes_are_those_of_the_run(disk: Path, tmp_path: Path, ranks: int, name: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 256)
    data = {"path": str(text), "sequence_length": LENGTH, "batch_size": BATCH}
    described = (
        {"class_path": "lightning_ptm.models.T5MoE", "init_args": MODEL},
        {"class_path": "lightning_ptm.data.SpanCorruption", "init_args": data},
    )
    run = RUNS[ranks][name]
    measured = run_ranks(train, ranks, str(disk), data, [run], limit_s=200)
    settings = BASE | run.settings | {"disk_path": str(disk)}
    found = planned(tmp_path, settings, STEPS, *described, ranks=ranks, **run.trainer)
    assert found.fits and found.timing is not None
    pages = {tier: plan.page_bytes for tier, plan in found.tiers.items()}
    exchanged = {use.link: use.bytes for use in found.timing.links}[Link.EXCHANGE]
    assert (exchanged > 0) == ("expert_parallel_size" in run.settings)
    for (of_rank,) in measured[:2]:  # of a group
        assert pages == pytest.approx(of_rank.pages, rel=NEAR_IF_LATE if "lock_free" in settings else NEAR)
        assert exchanged == pytest.approx(of_rank.sent, rel=NEAR)
