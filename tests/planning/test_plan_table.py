"""Plans as text, against golden files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ptm.planning.placement_data import Budget, PlacementWishes
from lightning_ptm.planning.plan_table import render

from .models import even_layout
from .test_placement import pages
from .test_schedule import ON_DISK, ON_HOST, planned

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "world_size", "budget", "wishes"),
    [
        ("one_rank_disk", 1, pages(18, disk=1000), ON_DISK),
        ("two_ranks_host", 2, pages(36, host=1000), ON_HOST),
        ("two_ranks_device", 2, pages(1000), PlacementWishes()),
    ],
)
def test_a_plan_reads_as_its_golden_file(name: str, world_size: int, budget: Budget, wishes: PlacementWishes) -> None:
    layout = even_layout([size * world_size for size in (1, 4, 4, 4, 4)], world_size)
    text = render(planned(layout, budget, wishes), layout)
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
