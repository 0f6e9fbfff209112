"""The callbacks on two ranks: rank 0 alone writes, all take part in what is collective, and the training is the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import run_ranks
from rank_models import Tower
from rank_training import Outcome, PlainRanks, Training, loader, make_strategy, make_trainer, outcome_of, tokens

from lightning_ptm.callbacks import (
    GradNormMonitor,
    MemoryTimeline,
    PageMonitor,
    PageTracer,
    PerfettoTrace,
    PlanPrinter,
    Throughput,
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
    written = {path.name for path in root.iterdir()}
    assert written == {"page_trace.csv", "memory_timeline.csv", "memory_timeline.png", "perfetto_trace.json"}
    text = (root / "perfetto_trace.json").read_text()
    shown = {"compute", "update", "collective", *(["copy"] if tier == "three_tiers" else [])}
    assert {title for title in TITLES.values() if f'"{title} ' in text} - {"stall"} == shown
    assert "all_gather" in text and "reduce_scatter" in text
