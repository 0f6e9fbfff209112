"""A tier that the package does not know: a second memory, slower than RAM, with a budget of its own, made of a row alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from decided_by_hand import PAGE, WORKSTATION, asked
from kit.checkpoint_runs import HALF, fit
from kit.outcomes import Outcome

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.commands.plan import forecast
from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.prediction import render
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.terms import Link, Tier

STREAMED = Tier(
    "SLOW",
    "in the second memory",
    distance=1.5,
    setting="the pages of the second memory",
    toward=Tier.HOST,
    link_toward=Link.HOST_TO_DEVICE,
    link_back=Link.DEVICE_TO_HOST,
)
"""Tier next to the host, nearer than the disk. Updates stream its pages through RAM."""
UPDATED = dataclasses.replace(STREAMED, update_link=Link.UPDATE_HOST)
"""Such a memory in which updates run."""


class WithStreamed(AngelPTMStrategy):
    tier, pages = STREAMED, 16

    def further_tiers(self) -> Mapping[Tier, int]:
        return {self.tier: self.pages * PAGE}


class WithUpdated(WithStreamed):
    tier = UPDATED


SIZES: dict[str, dict[str, Any]] = {
    "RAM is the device": {"host_memory": 17 * PAGE},
    "a device of its own": {"device_memory": 7 * PAGE, "host_memory": 16 * PAGE},
}
"""Too small for the model, each together with the further tier."""


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    """Returns the outcome of the same training with everything in RAM, by the micro-batches of a step."""
    return {
        many: fit(AngelPTMStrategy(page_size="64KiB"), tmp_path_factory.mktemp("ram"), accumulate_grad_batches=many)[0]
        for many in (1, 2)
    }


@pytest.mark.diagonal
@pytest.mark.parametrize(("accumulate", "kind"), [(1, "sharded"), (2, "full")])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cls", [WithStreamed, WithUpdated])
def test_a_run_trains_saves_and_goes_on_with_the_same_numbers(
    cls: type[WithStreamed],
    sizes: str,
    accumulate: int,
    kind: str,
    disk: Path,
    tmp_path: Path,
    in_ram: dict[int, Outcome],
) -> None:
    seen: list[set[str]] = []
    sums_in_ram = accumulate > 1 and sizes == "RAM is the device"
    least = {"host_memory": 18 * PAGE} if sums_in_ram else {}

    class Seen(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, cls)
            seen.append({row.states for row in strategy.states_at_home() if row.tier == "slow"})
            (room,) = (room for room in strategy.tier_rooms() if room.tier == "slow")
            assert room.used_bytes > 0
            assert sum(use.bytes for use in strategy.inventory() if use.tier == "slow") == room.bytes
            assert any("slow" in link for link in strategy.statistics().links)

    def train(folder: str, resume: Path | None = None) -> Outcome:
        strategy = cls(
            page_size="64KiB",
            debug={"poison": True},
            disk_path=disk,
            checkpoints={"state_dict_type": kind},
            **(SIZES[sizes] | least),
        )
        found, _ = fit(strategy, tmp_path / folder, resume, callbacks=[Seen()], accumulate_grad_batches=accumulate)
        return found

    expected = in_ram[accumulate]
    train("never").assert_equal(expected)
    again = train("again", tmp_path / "never" / "epoch=0.ckpt")
    again.assert_equal(Outcome(expected.losses[HALF:], expected.weights))
    at_home = {"parameters"} | ({"gradients"} if accumulate > 1 else set())
    if not sums_in_ram:
        at_home |= {"master parameters", "optimizer states"}
    assert len(seen) == 2 and all(at_home <= states for states in seen)


def test_the_plan_prints_it(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 8)
    settings = {
        "page_size": "64KiB",
        "device_memory": 24 * PAGE,
        "host_memory": 20 * PAGE,
        "disk_memory": 200 * PAGE,
        "disk_path": str(tmp_path),
    }
    model = {"width": 64, "layers": 3, "heads": 2, "sequence_length": 16, "meta": True}
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "trainer": {
                    "precision": "bf16-mixed",
                    "strategy": {"class_path": f"{__name__}.WithStreamed", "init_args": settings},
                    "max_steps": 1,
                },
                "model": {"class_path": "lightning_ptm.models.GPT", "init_args": model},
                "data": {
                    "class_path": "lightning_ptm.data.TextBytes",
                    "init_args": {"path": str(text), "sequence_length": 16, "batch_size": 2},
                },
            }
        )
    )
    found, blueprint = forecast(config, "h200")
    assert list(blueprint.budget) == [Tier.DEVICE, Tier.HOST, STREAMED, Tier.DISK]
    assert found.homes["master"]["slow"] == sum(
        flat.shard_numel * blueprint.master_bytes_per_element[flat.index]
        for flat in blueprint.layout.flats
        if blueprint.placement.homes[flat.unit].master is STREAMED
    )
    rows = {line.split()[0]: line.split()[1:] for line in render(found).splitlines() if line}
    assert rows["stored"] == ["in", "device", "host", "slow", "disk"]
    assert rows["slow"][-2:] == ["1", "MiB"]  # there is, of 16 pages
    assert found.homes["master"]["slow"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "HOST"}, "has the name HOST, which another tier has"),
        ({"computes": True}, "further tier SLOW computes"),
        ({"toward": None}, "SLOW leads to no tier that computes"),
    ],
)
def test_rows_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    request = dataclasses.replace(asked(), further={dataclasses.replace(STREAMED, **changes): PAGE})
    with pytest.raises(ConfigError, match=message):
        decide(request, WORKSTATION, 1)
