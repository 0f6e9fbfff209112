"""`lightning-ptm plan` against runs whose layers are cut over ranks: bytes of pages, and of what ranks exchange."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.planned_runs import LIMITS, NEAR, NEAR_IF_LATE, Rounds, make_trainer, planned
from kit.ranks.harness import run_ranks
from torch import Tensor

from lightning_ptm.data import TextBytes
from lightning_ptm.models import GPT
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange
from lightning_ptm.terms import TIERS, Link

MODEL: dict[str, Any] = {"width": 128, "layers": 4, "heads": 4, "sequence_length": 64, "warmup_steps": 1}
BATCH, LENGTH, STEPS = 2, 64, 4
RUNS: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "three tiers, recomputed": {
        "device_memory": "3MiB",
        "offload_parameters": "host",
        "offload_optimizer": "disk",
        "recompute": "all",
    },
    "lock-free, every 2nd recomputed": {"lock_free": True, "recompute": "every 2nd"},
    "parts of the sequence": {"tensor_parallel": {"sequence_parallel": True}},
    "parts of the sequence, recomputed": {"tensor_parallel": {"sequence_parallel": True}, "recompute": "all"},
}
QUICK = [(2, "three tiers, recomputed")]


@dataclass(frozen=True)
class Measured:
    """Bytes of pages at the peak, by tier; that a rank of a ring sends in a step, in how many exchanges; and rounds of it."""

    pages: dict[str, int]
    sent: float
    exchanges: int
    rounds: int


class Watch(L.Callback):
    """Counts what is added up and gathered in a step, as rings send it, and rounds."""

    def __init__(self) -> None:
        self.rounds = Rounds()
        self.sent, self.exchanges = 0.0, 0
        self.measured = Measured({}, 0.0, 0, 0)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        allocator = trainer.strategy.engine.allocator  # type: ignore[attr-defined]
        pages = {tier.name.lower(): allocator.peak_bytes(tier) for tier in TIERS}
        self.measured = Measured(pages, self.sent, self.exchanges, self.rounds.count)
        self.sent, self.exchanges, self.rounds.count = 0.0, 0, 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        issues = ActivationExchange.issue

        def issue(
            exchanges: ActivationExchange, axis: Axis, layer: str, name: str, collective: Any, value: Tensor, near: Any
        ) -> Tensor:
            self.exchanges += 1
            self.sent += value.nbytes * _SENT[name](exchanges._communicators[axis].world_size)
            return issues(exchanges, axis, layer, name, collective, value, near)

        ActivationExchange.issue = issue  # type: ignore[method-assign]
        try:
            with self.rounds.counting():
                yield
        finally:
            ActivationExchange.issue = issues  # type: ignore[method-assign]


_SENT: Mapping[str, Callable[[int], float]] = {
    "sum": lambda ranks: 2 * (ranks - 1) / ranks,
    "gather": lambda ranks: ranks - 1,
    "sum of pieces": lambda ranks: (ranks - 1) / ranks,
}
"""How often a rank of a ring sends what it gives, whichever way it goes here."""


def train(disk: str, data: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """One rank's part of several trainings, one after the other."""
    found = []
    for settings in runs:
        watch = Watch()
        chosen = {**LIMITS, **settings, "tensor_parallel_size": 2, "disk_path": disk}
        trainer = make_trainer(chosen, STEPS, watch, int(os.environ["WORLD_SIZE"]))
        torch.manual_seed(0)
        with warnings.catch_warnings(), watch.counting():
            warnings.simplefilter("ignore")
            trainer.fit(GPT(**MODEL), datamodule=TextBytes(**data))
        found.append(watch.measured)
    return found


def case(ranks: int, name: str) -> object:
    marks = () if (ranks, name) in QUICK else pytest.mark.slow
    return pytest.param(ranks, name, marks=marks, id=f"{name} on {ranks}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ranks", "name"), [case(ranks, name) for ranks in (2, 4) for name in RUNS])
def test_bytes_are_those_of_the_run(ranks: int, name: str, disk: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 256)
    data = {"path": str(text), "sequence_length": LENGTH, "batch_size": BATCH}
    described = (
        {"class_path": "lightning_ptm.models.GPT", "init_args": MODEL},
        {"class_path": "lightning_ptm.data.TextBytes", "init_args": data},
    )
    measured = run_ranks(train, ranks, str(disk), data, [RUNS[name]], limit_s=200)
    chosen = {**LIMITS, **RUNS[name], "tensor_parallel_size": 2, "disk_path": str(disk)}
    found = planned(tmp_path, chosen, STEPS, *described, ranks=ranks)
    assert found.fits and found.timing is not None
    assert found.numel == sum(each.numel() for each in whole().parameters())
    pages = {tier: plan.page_bytes for tier, plan in found.tiers.items()}
    exchanged = {use.link: use for use in found.timing.links}[Link.TENSOR_EXCHANGE]
    for (of_rank,) in measured:
        # Lock-free updates that come late have a few pages of gradients longer.
        assert pages == pytest.approx(of_rank.pages, rel=NEAR_IF_LATE if "lock_free" in RUNS[name] else NEAR)
        assert exchanged.bytes == pytest.approx(of_rank.sent, rel=NEAR) and exchanged.bytes > 0
        assert exchanged.collectives == of_rank.exchanges
        assert found.timing.rounds == of_rank.rounds


def whole() -> GPT:
    model = GPT(**MODEL)
    model.configure_model()
    return model
