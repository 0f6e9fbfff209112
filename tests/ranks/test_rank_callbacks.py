"""The callbacks on two ranks: rank 0 alone writes, all take part in what is collective, and the training is the same."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import PlainRanks, Training, loader, make_strategy, make_trainer, outcome_of, tokens
from lightning.pytorch.loggers import CSVLogger

from lightning_ptm.callbacks import (
    GradNormMonitor,
    HyperParameters,
    MemoryTimeline,
    PageMonitor,
    PageTracer,
    PerfettoTrace,
    PlanPrinter,
    Throughput,
    ThroughputMonitor,
)
from lightning_ptm.callbacks.perfetto_trace import TITLES

TRAINING = Training(Tower)


class LoggedNorms(GradNormMonitor):
    """Remembers what has been logged."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, *rest) -> None:  # type: ignore[no-untyped-def]
        self.norms.append(trainer.callback_metrics["gradients/norm"].clone())


class PlainNorms(PlainRanks):
    """Notes the norm of the gradients of each step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.norms: list[torch.Tensor] = []

    def _update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self.norms.append(torch.nn.utils.get_total_norm([each for each in gradients if each is not None]))
        super()._update(gradients)


def fit_watched(folder: Path, tier: str, root: Path) -> tuple[Outcome, list[torch.Tensor], int]:
    torch.manual_seed(0)
    module = TRAINING.build()
    norms = LoggedNorms()
    others = [
        PlanPrinter(),
        PageTracer(),
        MemoryTimeline(),
        PageMonitor(),
        PerfettoTrace(start=1, count=2),
        Throughput(),
    ]
    trainer = make_trainer(
        TRAINING, make_strategy(folder, tier), 2, callbacks=[norms, *others], default_root_dir=root, log_every_n_steps=1
    )
    trainer.fit(module, loader(tokens(TRAINING, 2), 2))
    return outcome_of(module), norms.norms, len(others[2].curves)  # type: ignore[attr-defined]


@pytest.mark.parametrize("tier", ["ram", "three_tiers"])
def test_two_ranks(tier: str, disk: Path, tmp_path: Path) -> None:
    root = tmp_path / "logs"
    several = run_ranks(fit_watched, 2, disk, tier, root)
    ranks = PlainNorms(TRAINING, 2)
    for (ours, _, _), theirs in zip(several, ranks.run(tokens(TRAINING, 2)), strict=True):
        ours.assert_equal(theirs)
    # Close, not equal: each rank adds up its own pieces first.
    torch.testing.assert_close(torch.stack(several[0][1]), torch.stack(ranks.norms), rtol=1e-5, atol=0)
    assert torch.equal(torch.stack(several[0][1]), torch.stack(several[1][1]))
    assert [curves > 0 for _, _, curves in several] == [True, False]
    root /= "lightning_ptm_logs"
    written = {path.name for path in root.iterdir()}
    assert written == {
        "page_trace.csv",
        "memory_inventory.csv",
        "memory_timeline.csv",
        "memory_timeline.png",
        "perfetto_trace.json",
    }
    text = (root / "perfetto_trace.json").read_text()
    shown = {"compute", "update", "collective", *(["copy"] if tier == "three_tiers" else [])}
    assert {title for title in TITLES.values() if f'"{title} ' in text} - {"stall"} == shown
    assert "all_gather" in text and "reduce_scatter" in text


class InAllLoops(Tower):
    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.validation_step(batch, index)

    def predict_step(self, batch: torch.Tensor, index: int) -> None:
        self.validation_step(batch, index)


def all_loops_watched(folder: Path, root: Path) -> list[str]:
    """Each rank's own folder: what it has written, and (rank 0) the names of what it has logged."""
    torch.manual_seed(0)
    mine = root / os.environ["RANK"]
    callbacks = [
        PlanPrinter(),
        PageTracer(),
        MemoryTimeline(batch=0),
        PageMonitor(),
        PerfettoTrace(start=0, count=1),
        PerfettoTrace(start=1, count=1),
        ThroughputMonitor(matrix_flops_per_s=1e9),
        GradNormMonitor(),
        HyperParameters(),
    ]
    training = Training(InAllLoops, accumulate=2)
    strategy = make_strategy(folder, "three_tiers", lock_free={"max_staleness": 1})
    logger = CSVLogger(mine, name="", version="logs")
    trainer = make_trainer(training, strategy, 2, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    rows = loader(tokens(training, 2), 2)
    module = training.build()
    trainer.validate(module, rows, verbose=False)
    trainer.fit(module, rows, rows)
    trainer.test(module, rows, verbose=False)
    trainer.predict(module, rows)
    return sorted(path.name for path in mine.rglob("*") if path.is_file())


def test_all_loops_with_late_updates(disk: Path, tmp_path: Path) -> None:
    written, nothing = run_ranks(all_loops_watched, 2, disk, tmp_path)
    assert nothing == []
    stems = {"memory_inventory": ("csv",), "memory_timeline": ("csv", "png"), "page_trace": ("csv",)}
    stems |= dict.fromkeys(("perfetto_trace", "perfetto_trace_2"), ("json",))
    each = [
        f"{stem}{loop}.{ending}"
        for stem, endings in stems.items()
        for ending in endings
        for loop in ("", "_validate", "_test", "_predict")
    ]
    assert written == sorted([*each, "metrics.csv"])
    with (tmp_path / "0" / "logs" / "metrics.csv").open(newline="") as file:
        logged = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    for loop in ("", "/validate", "/test", "/predict"):
        assert {f"links/overlap{loop}", f"memory/host_MB{loop}", f"speed/utilisation{loop}"} <= logged
    assert {"gradients/norm", "update/staleness_max", "stall/update_s_per_step"} <= logged
