"""Optimizers that update whole parameters (Muon, Adafactor, LAMB...) on several ranks, each of which owns some parameters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rank_harness import run_ranks
from rank_training import TIERS, Outcome, Training, fit_in_all_tiers, plain
from rank_whole_parameters import KINDS


@cache
def expected(training: Training, world_size: int) -> list[Outcome]:
    return plain(training, world_size)


@pytest.mark.covering(1)
@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_tier_is_plain_data_parallelism(world_size: int, build: Any, disk: Path) -> None:
    training = Training(build)
    for rank, of_rank in enumerate(
        run_ranks(fit_in_all_tiers, world_size, training, world_size, disk, {}, list(TIERS))
    ):
        for ours in of_rank.values():
            ours.assert_equal(expected(training, world_size)[rank])
