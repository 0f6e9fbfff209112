"""What a plan chooses for activations where settings leave it to the run: no slower than any choice for all units alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_ptm.commands.plan import forecast
from lightning_ptm.commands.room import Sizes
from lightning_ptm.forecasting.prediction import Prediction, render

CONFIGS = Path(__file__).parents[2] / "configs"
FIXED = [
    {"recompute": recompute, "offload_activations": to}
    for recompute, to in itertools.product(("none", "all", "every 2nd", "every 3rd"), ("none", "host", "disk"))
]
AUTO = {"recompute": "auto", "offload_activations": "auto"}
PAGES = {
    "a100_40gb": "18GiB",
    "a100_40gb_x8": "18GiB",
    "rtx4090": "11GiB",
    "l4": "11GiB",
    "h100": "38GiB",
    "gh200": "46GiB",
    "laptop": "2GiB",
}
"""By hardware, the memory of pages, about half of the device's: what it leaves is for activations."""


def planned(config: str, hardware: str, batch: int, settings: dict[str, Any]) -> Prediction:
    settings = {"disk_path": "/nvme", "device_memory": PAGES[hardware], **settings}
    return forecast(str(CONFIGS / f"{config}.yaml"), hardware, batch_size=batch, strategy=settings)[0]


@pytest.mark.parametrize("room", [10, 99, 100, 101, 150, 999, 1000, 1234, 5000])
@pytest.mark.parametrize(
    "size_at",
    [
        lambda samples: 100 * samples,
        lambda samples: 7 + 3 * samples,
        lambda samples: 5 * samples + 90 * min(samples, 4),  # a sliced loss
        lambda samples: 20 * samples + (300 if samples > 6 else 0),
        lambda samples: samples * samples,
        lambda samples: 40 if samples < 5 else 90 + samples,
    ],
)
def test_the_largest_batch_that_fits_is_found_though_activations_do_not_grow_linearly(
    size_at: Callable[[int], int], room: int
) -> None:
    fitting = [samples for samples in range(1, 6000) if size_at(samples) <= room]
    assert Sizes._largest(room, size_at) == max(fitting, default=0)
    for most in (1, 2, 3, 20):
        assert Sizes._largest(room, size_at, most) == min(max(fitting, default=0), most)


@pytest.mark.slow_unless("gpt3_1.7b-rtx4090-4", "gpt-laptop-2048")
@pytest.mark.parametrize(
    ("config", "hardware", "batch"),
    [
        ("gpt3_1.7b", "a100_40gb_x8", 8),
        ("gpt3_1.7b", "rtx4090", 4),
        ("gpt3_1.7b", "l4", 4),
        ("gpt3_1.7b", "h100", 32),
        ("gpt3_1.7b", "gh200", 32),
        ("gpt3_13b", "a100_40gb_x8", 4),
        ("t5_1.4b", "a100_40gb", 64),
        ("gpt", "laptop", 2048),
    ],
)
def test_auto_is_as_fast_as_the_best_of_twelve_settings(config: str, hardware: str, batch: int) -> None:
    found = [planned(config, hardware, batch, each) for each in FIXED]
    auto = planned(config, hardware, batch, AUTO)
    assert auto.fits and auto.seconds <= 1.03 * min(each.seconds for each in found if each.fits)


def test_a_plan_says_what_it_chose_for_each_unit_and_why() -> None:
    kept = planned("gpt3_1.7b", "rtx4090", 1, AUTO)
    assert kept.handlings == {} and "activations by unit" not in render(kept)
    chosen = planned("gpt3_1.7b", "rtx4090", 4, AUTO)
    assert len(chosen.handlings) == 24 and set(chosen.handlings.values()) == {"kept", "in RAM"}
    text = render(chosen)
    assert (
        "activations by unit, the fastest choice whose peak (" in text and "blocks.23 (" in text and ": in RAM" in text
    )


def test_what_settings_recompute_is_recomputed_where_its_inputs_may_be_offloaded() -> None:
    """`auto` chooses where inputs of recomputed units wait, not whether they are recomputed."""
    settings = {"recompute": "all"}
    fixed = planned("gpt3_1.7b", "rtx4090", 1, settings | {"offload_activations": "none"})
    auto = planned("gpt3_1.7b", "rtx4090", 1, settings)
    assert auto.handlings == {}
    assert fixed.timing is not None and auto.timing is not None
    assert auto.timing.compute_s == pytest.approx(fixed.timing.compute_s)
