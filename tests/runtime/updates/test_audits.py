"""Counts of gradients by what happened to them, and ages of parameters."""

from __future__ import annotations

import pytest

from lightning_ptm.runtime.updates.audits import StalenessStats, UpdateAudit


@pytest.mark.parametrize(
    ("applied", "pending", "skipped", "balanced"),
    [(5, 0, 0, True), (2, 2, 1, True), (4, 0, 0, False), (5, 1, 0, False), (4, 1, 1, False)],
    ids=["applied", "each once", "lost", "applied twice", "skipped and applied"],
)
def test_each_gradient_has_become_one_thing(applied: int, pending: int, skipped: int, balanced: bool) -> None:
    assert UpdateAudit("layers.0", 5, applied, pending, skipped).balanced is balanced


def test_mean_staleness_is_over_reads() -> None:
    assert StalenessStats().mean == 0.0
    assert StalenessStats(reads=4, total=6, maximum=3, steps=100).mean == 1.5
