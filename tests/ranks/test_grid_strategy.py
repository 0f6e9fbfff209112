"""GridStrategy: squares and cubes of ranks learn what one rank learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.ranks.grid_models import GridOutcome, GridRun, train, wholes
from kit.ranks.harness import run_ranks

from lightning_ptm.planning.mesh import GridShape


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> GridOutcome:
    """Returns the outcome of one rank."""
    return run_ranks(train, 1, GridRun(), tmp_path_factory.mktemp("disk"))[0]


RECOMPUTED = {"recompute": "all"}
CASES = {
    "2d in ram": GridRun("2d", 4),
    "2d in the least memory": GridRun("2d", 4, tier="tight"),
    "2d on disk, recomputed": GridRun("2d", 4, tier="all_on_disk", settings=RECOMPUTED),
    "2d lock free": GridRun("2d", 4, tier="lock_free"),
    "2d from meta": GridRun("2d", 4, tier="masters_on_disk", meta=True),
    "2.5d in ram": GridRun("2d", 8),
    "2.5d in the least memory": GridRun("2d", 8, tier="tight"),
    "3d in ram": GridRun("3d", 8),
    "3d in the least memory, recomputed": GridRun("3d", 8, tier="tight", settings=RECOMPUTED),
}


@pytest.mark.parametrize("case", CASES)
def test_it_learns_what_one_rank_learns(case: str, one: GridOutcome, disk: Path) -> None:
    how = CASES[case]
    if how.meta:  # units are initialised in another order
        (one,) = run_ranks(train, 1, GridRun(meta=True), disk)
    shape = GridShape(2, cube=how.mode == "3d")
    outcomes = run_ranks(train, how.ranks, how, disk, limit_s=240)
    for first in range(0, how.ranks, shape.size):
        found = wholes(shape, [each.weights for each in outcomes[first : first + shape.size]])
        assert found.keys() == one.weights.keys()
        for name, value in one.weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)
    mean = torch.tensor([each.losses for each in outcomes], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(one.losses, dtype=torch.float64), rtol=0, atol=1e-13)
