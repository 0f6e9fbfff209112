"""Decisions about chunks of two ranks are those of their forecast, entry by entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.policy_log import INSTANT, SLOW, Disk, Entry, Log, between, planned
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens

STEPS, BEFORE = 8, 3
CASES: list[tuple[str, float | None, bool]] = [
    ("ram", None, False),
    ("masters_on_disk", None, False),
    ("masters_on_disk", None, True),
    ("masters_on_disk", 1.0, True),
]
"""Where model states live, by which norm gradients are clipped, and whether the disk is slow."""


def logs(folder: Path) -> list[tuple[list[Entry], list[Entry]]]:
    """Returns the logs of each case: of this rank's run and of its forecast."""
    return [_logs(folder, *case) for case in CASES]


def _logs(folder: Path, tier: str, clip: float | None, slow: bool) -> tuple[list[Entry], list[Entry]]:
    training, log = Training(Tower, "bf16-mixed", STEPS, clip=clip), Log()
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, slow=slow)
        trainer: Any = make_trainer(training, make_strategy(folder, tier), 2, callbacks=[log])
        trainer.fit(training.build(), loader(tokens(training, 2), 2))
    hardware = SLOW if slow else INSTANT
    return between(log.entries, STEPS, BEFORE), between(planned(log, hardware, STEPS), STEPS, BEFORE)


def test_what_two_ranks_decide_is_what_their_forecast_does(disk: Path) -> None:
    for rank in run_ranks(logs, 2, disk):
        for case, (run, forecast) in zip(CASES, rank, strict=True):
            assert run == forecast, case
            assert len(run) >= 3 * 4 * (STEPS - BEFORE - 1), case
