"""`lightning-ptm probe` on several ranks: collectives are measured, one rank speaks, and none waits for one that failed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
from pathlib import Path

import pytest
import yaml
from kit.ranks.harness import End, run_ranks, watch_ranks

from lightning_ptm.cli import main
from lightning_ptm.commands import probe
from lightning_ptm.commands.collectives import Launch, Ranks, Rate, launched
from lightning_ptm.commands.compute_rates import Effort
from lightning_ptm.commands.plan import forecast
from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting import hardware

TINY = Effort(matrix=32, copy_bytes=1 << 22, disk_bytes=1 << 20, seconds=0.0, steps=2)
PROMPT_S = 20.0
ROOT = Path(__file__).parents[2]


def probed(disk: str) -> str:
    """Returns the output of a rank."""
    probe.QUICK = TINY
    probe._BLOCKS = (1 << 16, 1 << 18)
    probe._DEPTHS = (1, 2)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["probe", "--quick", "--disk", disk])
    assert os.environ["WORLD_SIZE"] == "2"
    return printed.getvalue()


def test_two_ranks_measure_what_lies_between_them(tmp_path: Path) -> None:
    text, nothing = run_ranks(probed, 2, str(tmp_path), limit_s=PROMPT_S)
    assert nothing == "" and list(tmp_path.iterdir()) == []
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert set(yaml.safe_load(text)) == set(hardware.FIELDS)
    node = hardware.read(path)
    assert node.ranks_per_node == 2 and node.cpu_cores == os.cpu_count() and node.inter_node_bytes_per_s is None
    assert node.intra_node_bytes_per_s is not None and 1e6 < node.intra_node_bytes_per_s < 1e11
    assert "of 2 ranks" in text and "a copy by 2 threads" in text
    found, _ = forecast(ROOT / "configs" / "gpt.yaml", str(path))
    assert found.fits and found.ranks == 2
    assert node.rates(nodes=1).collective_bytes_per_s == node.intra_node_bytes_per_s
    assert node.tensor_exchange_bytes_per_s is not None and 1e6 < node.tensor_exchange_bytes_per_s < 1e11
    assert node.collective_bytes_per_core_s is not None and 1e6 < node.collective_bytes_per_core_s < 1e11
    for name in ("collective_s", "tensor_exchange_s", "round_s"):
        assert 1e-6 < getattr(node, name) < 1.0, name
    _, blueprint = forecast(ROOT / "configs" / "gpt.yaml", str(path), strategy={"tensor_parallel_size": 2})
    divided = node.rates(1, blueprint.holders)
    assert divided.tensor_exchange_bytes_per_s == node.tensor_exchange_bytes_per_s
    assert (divided.lockstep_ranks, node.rates(1).lockstep_ranks) == (2, 1)


def measured_on_two_nodes() -> tuple[int, int, int, int]:
    """Ranks of both rates and their pages; the environment says that two ranks are on each node."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    launch = launched()
    assert launch is not None and launch.nodes == 2
    with Ranks(launch) as ranks:
        if launch.rank == 0:
            rates = ranks.measure(1 << 16, 1 << 18, 0.0, 2)
        else:
            ranks.follow()
            return 0, 0, 0, 0
    assert rates.in_node is not None and rates.of_all is not None
    assert min(rates.in_node.bytes_per_s, rates.of_all.bytes_per_s) > 1e5
    return rates.in_node.ranks, rates.of_all.ranks, rates.in_node.page_bytes, rates.of_all.page_bytes


def test_links_between_nodes_are_measured_by_all_ranks() -> None:
    assert run_ranks(measured_on_two_nodes, 4, limit_s=PROMPT_S)[0] == (2, 4, 1 << 16, 1 << 16)


def at_once() -> tuple[list[tuple[int, float, float]], list[str]]:
    """Who has measured, from when to when, as told to this rank; what it has begun."""
    launch = launched()
    assert launch is not None
    begun: list[str] = []

    def measure(effort: Effort) -> tuple[int, float, float]:
        effort.begins("a part")
        began_s = time.monotonic()
        effort.begins("another part")
        return launch.rank, began_s, time.monotonic()

    with Ranks(launch) as ranks:
        return ranks.at_once(measure, dataclasses.replace(TINY, begins=begun.append)), begun


def test_ranks_measure_what_each_has_at_the_same_time() -> None:
    first, second = run_ranks(at_once, 2, limit_s=PROMPT_S)
    assert first == second
    (found, begun) = first
    assert [rank for rank, *_ in found] == [0, 1] and begun == ["a part", "another part"]
    assert max(began_s for _, began_s, _ in found) <= min(ended_s for *_, ended_s in found)


def failing() -> None:
    launch = launched()
    assert launch is not None

    def measure(effort: Effort) -> None:
        if launch.rank == 1:
            raise ConfigError("this rank's disk is full")
        effort.begins("a part")

    with Ranks(launch) as ranks:
        ranks.at_once(measure, TINY)


def test_nobody_waits_for_a_rank_that_cannot_measure() -> None:
    first, second = watch_ranks(failing, 2, limit_s=PROMPT_S)
    assert first.end is second.end is End.RAISED
    assert "this rank's disk is full" in first.error and "this rank's disk is full" in second.error


def refused(disk: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--quick", "--disk", disk])
    return str(ended.value.code)


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = watch_ranks(refused, 2, str(tmp_path / "none"), limit_s=PROMPT_S)
    assert first.end is End.RETURNED and "does not exist" in first.value
    assert second.end is End.RETURNED and "a collective" in second.value, str(second)


def test_a_step_gathers_twice_and_reduces_once() -> None:
    rate = Rate(2, 1 << 16, gather_bytes_per_s=4.0, reduce_bytes_per_s=1.0, least_s=0.0, bytes_per_core_s=1.0)
    assert rate.bytes_per_s == 2.0


def test_an_environment_that_is_no_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, and RANK, LOCAL_RANK, .* launch with torchrun"):
        launched()
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": 6}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    launch = launched()
    assert launch == Launch(rank=5, local_rank=1, world_size=6, ranks_per_node=2) and launch.nodes == 3
