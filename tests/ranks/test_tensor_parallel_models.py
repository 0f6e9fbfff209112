"""Our models whose parameters are cut over ranks learn what they learn whole, wherever their states live."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_harness import run_ranks
from rank_tensor_models import Run, assert_same_learning, train

RUNS = {
    "t5": Run("t5", 2, 2),
    "t5 gated on four": Run("t5", 4, 4, sizes={"gated": True}),
    "t5 with data": Run("t5", 4, 2),
    "experts": Run("t5_moe", 2, 2),
    "a gpt with a tied head": Run("gpt", 2, 2, sizes={"tie_head": True}),
    "a vocabulary that does not divide": Run("gpt", 2, 2, sizes={"vocab_size": 65, "tie_head": True}),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_learns_what_one_rank_learns(name: str, disk: Path) -> None:
    how = RUNS[name]
    (whole,) = run_ranks(train, 1, how.on_one(), disk)
    assert_same_learning(run_ranks(train, how.ranks, how, disk), whole)
