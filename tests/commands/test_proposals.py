"""Changes with which a disk lasts, by a planner of a few lines, and by the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_plan import config, cpu_file

from lightning_ptm.commands.plan import Where, forecast_config
from lightning_ptm.commands.proposals import lasting
from lightning_ptm.config import Settings
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting.prediction import Prediction, Proposal, render
from lightning_ptm.memory.endurance import DAY_S, DiskLife
from lightning_ptm.planning.mesh import Mesh

GB, TB = 10**9, 10**12
STATES = {"auto": 120 * GB, "bf16": 80 * GB, "int8": 60 * GB}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine on which a step takes 10 s of disk, or 2 s for each sample, with a disk that is rated at 600 TB."""

    ram: bool = False
    """Whether RAM has room for the optimizer states."""
    gradients: int = 0
    """Bytes of gradients that each micro-batch writes."""

    def __call__(self, changes: Mapping[str, Any]) -> tuple[Prediction, int | None]:
        values = {"batch_size": 2, "accumulate_grad_batches": 1, "optimizer_state_dtype": "auto", **changes}
        in_ram = values.get("offload_optimizer") == "host"
        if in_ram and not self.ram:
            raise CapacityError("there is too little RAM")
        samples, count = values["batch_size"], values["accumulate_grad_batches"]
        written = (
            0 if in_ram else STATES[values["optimizer_state_dtype"]] + (count * self.gradients if count > 1 else 0)
        )
        seconds = max(2.0 * samples * count, written / (12 * GB))
        life = DiskLife(written, 600 * TB, given=True) if written else None
        return prediction(seconds, samples, count, life), None

    def proposals(self, days: float, **settings: Any) -> list[Proposal]:
        """Returns the proposals with which the disk lasts for a number of days."""
        found = dataclasses.replace(self(settings)[0], largest_batch=3)
        return list(lasting(self, found, Settings(**settings), days * DAY_S))


def prediction(seconds: float, samples: int, count: int, life: DiskLife | None) -> Prediction:
    return Prediction(
        config="",
        hardware="",
        device="cpu",
        precision="bf16-mixed",
        nodes=1,
        mesh=Mesh({}),
        numel=1,
        fits=True,
        reason="",
        batch_size=samples,
        accumulate=count,
        matrix_flops_per_s=1.0,
        seconds=seconds,
        disk_life=life,
    )


def changes(proposals: list[Proposal]) -> list[dict[str, Any]]:
    return [each.changes for each in proposals]


def test_states_in_ram_write_nothing() -> None:
    first, *_ = Machine(ram=True).proposals(days=1000)
    assert first == Proposal({"offload_optimizer": "host"}, 4.0, 0.5, disk_lasts_s=None)


def test_as_many_micro_batches_as_are_needed() -> None:
    """600 TB and 120 GB a step are 5000 steps; with states of 8 bits they are 10,000."""
    found = Machine().proposals(days=2)
    alone = [each.changes for each in found if each.changes.keys() == {"accumulate_grad_batches"}]
    assert alone == [{"accumulate_grad_batches": 9}]  # 5000 steps of 36 s are 2.08 days, of 32 s are 1.85
    encoded = [
        each.changes for each in found if each.changes.keys() == {"accumulate_grad_batches", "optimizer_state_dtype"}
    ]
    assert {"accumulate_grad_batches": 5, "optimizer_state_dtype": "int8"} in encoded  # 10,000 steps of 20 s
    assert all(each.disk_lasts_s is not None and each.disk_lasts_s >= 0.999 * 2 * DAY_S for each in found)


def test_what_is_proposed_is_sorted_by_changes_and_speed() -> None:
    found = Machine(ram=True).proposals(days=0.5)
    sizes = [len(each.changes) for each in found]
    assert sizes == sorted(sizes)
    assert found[0].changes == {"offload_optimizer": "host"}  # which changes no number
    for size in set(sizes):
        speeds = [each.samples_per_s for each in found[1:] if len(each.changes) == size]
        assert speeds == sorted(speeds, reverse=True)


def test_gradients_on_disk_limit_what_larger_steps_do() -> None:
    """Each micro-batch writes 100 GB: no number of them makes a step long enough for its bytes."""
    found = Machine(gradients=100 * GB).proposals(days=10)
    (longest,) = found
    assert longest.disk_lasts_s is not None and longest.disk_lasts_s < 10 * DAY_S


def test_encoded_states_are_not_encoded_again() -> None:
    found = Machine().proposals(days=2, optimizer_state_dtype="bf16")
    assert found and not any("optimizer_state_dtype" in each for each in changes(found))


def test_a_planner_that_fails_proposes_nothing() -> None:
    def fails(changes: Mapping[str, Any]) -> tuple[Prediction, int | None]:
        raise ConfigError("no")

    assert lasting(fails, Machine()({})[0], Settings(), 1000 * DAY_S) == ()


def of_a_config(folder: Path, endurance: str | None) -> Prediction:
    settings = {"page_size": "64KiB", "offload_optimizer": "disk", "disk_path": str(folder), "disk_tbw": "1TB"}
    return forecast_config(config(folder, settings), Where(cpu_file(folder)), 2, endurance=endurance)[0]


def test_the_planner_has_planned_what_it_proposes(tmp_path: Path) -> None:
    found = of_a_config(tmp_path, "1d")
    assert found.wears_out and found.proposals
    first, *others = render(found).splitlines()
    assert first.endswith(" of training, and not 24 hours")
    for each in found.proposals:
        assert each.disk_lasts_s is None or each.disk_lasts_s >= 0.999 * DAY_S
    assert "offload_optimizer" in found.proposals[0].changes and found.proposals[0].disk_lasts_s is None
    now = f"(now {found.seconds:.4g} s, {found.samples_per_s:.4g} samples/s)"
    assert any(line.startswith("would write nothing to disk with offload_optimizer='host': ") for line in others)
    assert sum(line.endswith(now) for line in others) == len(found.proposals)
    more = [each for each in found.proposals if "accumulate_grad_batches" in each.changes]
    for each in more:
        (settings,) = [{key: value for key, value in each.changes.items() if key != "accumulate_grad_batches"}]
        trainer = {"accumulate_grad_batches": each.changes["accumulate_grad_batches"]}
        samples = settings.pop("batch_size", 2)
        path = config(tmp_path, {"page_size": "64KiB", "offload_optimizer": "disk", "disk_path": str(tmp_path)})
        asked, _ = forecast_config(path, Where(cpu_file(tmp_path)), samples, {"disk_tbw": "1TB", **settings}, trainer)
        assert (asked.seconds, asked.disk_lasts_s) == (each.seconds, each.disk_lasts_s)
    assert more


def test_nothing_is_proposed_for_a_disk_that_lasts(tmp_path: Path) -> None:
    assert not of_a_config(tmp_path, None).proposals
    found = of_a_config(tmp_path, "0.0001d")
    assert not found.wears_out and not found.proposals and found.endurance_s == pytest.approx(8.64)
    assert found.to_dict()["endurance_s"] == found.endurance_s


def test_a_duration_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="endurance is 'long'; give years, weeks or days"):
        of_a_config(tmp_path, "long")
