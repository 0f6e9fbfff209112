"""`lightning-ptm probe`: what it writes, `plan` takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from lightning_ptm.cli import main
from lightning_ptm.commands import probe
from lightning_ptm.commands.compute_rates import Effort
from lightning_ptm.commands.fixed_costs import FixedCosts
from lightning_ptm.commands.rank_rates import DeviceCopies, RankRates, slowest
from lightning_ptm.commands.update_rates import UpdateRates
from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting import hardware
from lightning_ptm.update.state_encoding import ENCODINGS

TINY = Effort(matrix=32, copy_bytes=1 << 16, disk_bytes=1 << 20, seconds=0.0, steps=2)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "QUICK", TINY)
    monkeypatch.setattr(probe, "_BLOCKS", (1 << 16, 1 << 20))
    monkeypatch.setattr(probe, "_DEPTHS", (1, 2))


def test_a_probe_is_a_hardware_file(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    main(["probe", "--quick", "--disk", str(disk)])
    text = capsys.readouterr().out
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    node = hardware.read(path)
    assert set(yaml.safe_load(text)) == set(hardware.FIELDS)
    assert set(node.compute_flops_per_s) == set(hardware.DTYPES)
    assert node.disk_memory > 0 and node.host_memory > 0
    assert node.page_size in (1 << 16, 1 << 20)
    assert node.attention_flops_per_s is not None and node.curved_numel_per_s is not None
    for name in ("disk_both_bytes_per_s", "disk_bytes_per_core_s", "unit_s", "step_s", "chunk_s", "beside_loss"):
        assert getattr(node, name) > 0, name
    for name in ("update", "disk_update", "beside_update"):
        assert 1e6 < getattr(node, f"{name}_bytes_per_s") < 1e12, name
    assert 1e4 < node.prediction_numel_per_s < 1e12 and node.learn_numel_per_s > 1e4
    assert node.states_numel_per_s is not None and set(node.states_numel_per_s) == set(ENCODINGS)
    assert all(1e4 < rate < 1e15 for rate in node.states_numel_per_s.values())
    assert 0 < node.compute_efficiency <= 1
    trials = [line for line in text.splitlines() if line.startswith(f"# {disk}: ")]
    assert len(trials) == 4
    assert list(disk.iterdir()) == []
    main(["plan", "gpt", "--hardware", str(path)])
    assert capsys.readouterr().out.startswith("fits: ")


@pytest.mark.parametrize("paths", [*(pytest.param(paths, marks=pytest.mark.slow) for paths in (0, 1)), 2])
def test_every_part_is_told_as_it_begins(paths: int, tiny: None, tmp_path: Path) -> None:
    begun: list[str] = []
    folders = [tmp_path / str(number) for number in range(paths)]
    for folder in folders:
        folder.mkdir()
    probe.measure(folders, dataclasses.replace(TINY, begins=begun.append))
    assert len(begun) == len(set(begun)) == probe._parts(folders, None)
    assert all(any(str(folder) in part for part in begun) for folder in folders)


def test_two_paths_are_as_fast_as_twice_the_slower_one() -> None:
    trials = [
        probe.DiskTrial(Path("a"), 1, 1, 5.0, 1.0),
        probe.DiskTrial(Path("a"), 1, 2, 7.0, 2.0),
        probe.DiskTrial(Path("b"), 1, 1, 100.0, 1.5),
    ]
    assert probe._together(trials, "read_bytes_per_s") == 14.0
    assert probe._together(trials, "write_bytes_per_s") == 3.0
    assert probe._together([], "read_bytes_per_s") is None


def test_rates_are_of_bytes_and_not_of_pages(tiny: None, tmp_path: Path) -> None:
    """No disk moves 100 GB a second, and 256 pages of it would be more."""
    trials = probe.disk_trials(tmp_path, dataclasses.replace(TINY, disk_bytes=16 << 20))
    rates = [rate for trial in trials for rate in (trial.read_bytes_per_s, trial.write_bytes_per_s)]
    assert all(1e6 < rate < 1e11 for rate in rates), rates
    assert probe.core_rate(tmp_path, trials, dataclasses.replace(TINY, disk_bytes=16 << 20)) > 1e6


def test_without_a_disk_there_is_none(tiny: None) -> None:
    found = yaml.safe_load(probe.measure((), TINY))
    assert found["disk_memory"] == 0 and found["disk_read_bytes_per_s"] is None
    assert found["page_size"] is None and found["disk_both_bytes_per_s"] is None
    assert found["disk_update_bytes_per_s"] is None and found["beside_update_bytes_per_s"] > 0


def test_the_default_dtype_of_the_process_changes_nothing(tiny: None) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        found = hardware.parsed(probe.quick_measure(()), Path("mine"), None)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(found.compute_flops_per_s) == set(hardware.DTYPES)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        probe.measure((tmp_path / "none",), TINY)
    with pytest.raises(SystemExit, match="does not exist"):
        main(["probe", "--disk", str(tmp_path / "none")])


def test_what_counts_is_the_slowest_rank() -> None:
    fast, slow = (
        RankRates(
            int(1000 * rate),
            int(2000 * rate),
            FixedCosts(step_s=seconds, unit_s=seconds),
            DeviceCopies(rate, rate, rate),
            *({"bfloat16": rate} for _ in range(4)),
            sample_s=seconds,
            updates=UpdateRates(rate, None, None, seconds, rate, seconds, rate, rate, {"int8": rate}),
        )
        for rate, seconds in ((2.0, 1.0), (1.0, 2.0))
    )
    assert slowest([fast, slow]) == slowest([slow, fast]) == slow and slowest([fast]) == fast
    mixed = dataclasses.replace(
        fast, fixed=FixedCosts(step_s=9.0, unit_s=0.5), curved_numel={"bfloat16": 0.5}, free_device_bytes=10
    )
    found = slowest([mixed, slow])
    assert (found.free_device_bytes, found.free_host_bytes) == (10, 2000)
    assert found.fixed == FixedCosts(step_s=9.0, unit_s=2.0)
    assert found.curved_numel == {"bfloat16": 0.5} and found.matrix_flops == {"bfloat16": 1.0}
