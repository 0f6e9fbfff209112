"""Bytes of pages of a rank that has parts of layers, over one rank's, at the page size that users have. By plan, which counts
what runs take (tests/runtime/test_inventory_of_runs.py, tests/ranks/test_rank_inventory.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.planned_runs import forecast_of

from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.terms import TIERS, Tier

MODELS: dict[str, dict[str, Any]] = {
    "GPT": {
        "class_path": "lightning_ptm.models.GPT",
        "init_args": {"width": 768, "layers": 12, "heads": 12, "sequence_length": 256},
    },
    "T5": {
        "class_path": "lightning_ptm.models.T5",
        "init_args": {"width": 512, "feed_forward_width": 2048, "layers": 12, "heads": 8},
    },
}
HOMES = (What.PARAMETERS, What.MASTERS, What.STATES)
PLACES: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "masters on disk": {"offload_optimizer": "disk"},
    "all on disk": {"offload_optimizer": "disk", "offload_parameters": "disk"},
}


def homes_of(blueprint: Blueprint) -> dict[Tier, int]:
    """Bytes of pages of model states, by tier that has any."""
    found = {tier: sum(blueprint.inventory.by_what(tier).get(what, 0) for what in HOMES) for tier in TIERS}
    return {tier: size for tier, size in found.items() if size}


@pytest.mark.slow_unless("GPT-all on disk-bf16-mixed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_has_half_the_pages_where_two_have_parts(tmp_path: Path, model: str, place: str, precision: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 8)
    task = "TextBytes" if model == "GPT" else "SpanCorruption"
    data = {"class_path": f"lightning_ptm.data.{task}", "init_args": {"path": str(text), "batch_size": 1}}

    def pages(ranks: int, tensor: int) -> tuple[dict[Tier, int], int]:
        """Returns the bytes of homes, and the most bytes of pages on the device while units compute."""
        settings = {**PLACES[place], "disk_path": str(tmp_path), "tensor_parallel_size": tensor}
        found, blueprint = forecast_of(tmp_path, settings, 1, MODELS[model], data, ranks, precision=precision)
        return homes_of(blueprint), found.tiers["device"].page_bytes

    (one, most_of_one), (two, most_of_two), (four, _) = pages(1, 1), pages(2, 2), pages(4, 2)
    assert one.keys() == two.keys() == four.keys()
    for tier, size in one.items():
        assert two[tier] <= 0.52 * size and four[tier] <= 0.27 * size, tier
    if place == "in RAM":
        assert most_of_two <= 0.52 * most_of_one  # elsewhere most of them are buffers, whatever a rank has
