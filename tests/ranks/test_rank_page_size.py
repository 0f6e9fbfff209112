"""`page_size="auto"` on several ranks: rank 0 measures, all have its number; and its failure."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens


def pages(training: Training, folder: Path) -> int:
    """One rank's part: trains and tells its bytes of a page."""
    strategy = make_strategy(
        folder, "masters_on_disk", page_size="auto", tuning={"staging_memory": "64MiB"}, debug={"poison": False}
    )
    seen: list[int] = []

    class Seen(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            seen.append(strategy.engine.blueprint.layout.page_size)

    trainer = make_trainer(training, strategy, 2, callbacks=[Seen()])
    trainer.fit(training.build(), loader(tokens(training, 2), 2))
    return seen[0]


def test_all_ranks_have_the_pages_of_rank_0(disk: Path) -> None:
    first, second = run_ranks(pages, 2, Training(Tower, batches=1), disk)
    assert first == second


def test_all_ranks_end_where_a_path_cannot_be_made(tmp_path: Path) -> None:
    outcomes = watch_ranks(pages, 2, Training(Tower, batches=1), tmp_path / "no" / "such")
    assert [outcome.end for outcome in outcomes] == [End.RAISED, End.RAISED]
    assert all("is in a folder that does not exist" in outcome.error for outcome in outcomes)
