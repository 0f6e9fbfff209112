"""Cores that control groups leave, read from files as Linux has them in a folder; and in a group of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machine_of_files import MakeMachine

from lightning_ptm.runtime.machine import cgroup, machine
from lightning_ptm.trainer.lightning_hooks import warn_of_threads

V1, V2 = "/sys/fs/cgroup/cpu", "/sys/fs/cgroup"
GROUPS = {1: "5:cpuset:/mine\n4:cpu,cpuacct:/mine\n0::/other\n", 2: "0::/job/task\n"}


@pytest.mark.parametrize(
    ("version", "files", "cores"),
    [
        (2, {f"{V2}/job/task/cpu.max": "400000 100000\n"}, 4),
        (2, {f"{V2}/job/task/cpu.max": "350000 100000\n"}, 3),
        (2, {f"{V2}/job/task/cpu.max": "20000 100000\n"}, 1),
        (2, {f"{V2}/job/task/cpu.max": "max 100000\n", f"{V2}/job/cpu.max": "200000 100000\n"}, 2),
        (2, {f"{V2}/job/task/cpu.max": "max 100000\n", f"{V2}/job/task/cpuset.cpus.effective": "0-2,8,10-11\n"}, 6),
        (2, {f"{V2}/job/task/cpu.max": "800000 100000\n", f"{V2}/job/task/cpuset.cpus.effective": "5\n"}, 1),
        (2, {f"{V2}/job/task/cpu.max": "as many as you like\n"}, cgroup.NO_LIMIT),
        (2, {}, cgroup.NO_LIMIT),
        (1, {f"{V1}/mine/cpu.cfs_quota_us": "300000\n", f"{V1}/mine/cpu.cfs_period_us": "100000\n"}, 3),
        (1, {f"{V1}/mine/cpu.cfs_quota_us": "-1\n", f"{V1}/mine/cpu.cfs_period_us": "100000\n"}, cgroup.NO_LIMIT),
        (1, {"/sys/fs/cgroup/cpuset/mine/cpuset.effective_cpus": "0-1\n"}, 2),
    ],
)
def test_cores_of_groups(machine_of_files: MakeMachine, version: int, files: dict[str, str], cores: int) -> None:
    machine_of_files({"/proc/self/cgroup": GROUPS[version], **files})
    assert cgroup.cores() == cores


def test_without_groups_there_is_no_limit(machine_of_files: MakeMachine) -> None:
    assert cgroup.cores() == cgroup.free_bytes() == cgroup.NO_LIMIT


@pytest.fixture
def group_of_one_core() -> Iterator[Path]:
    """The file that takes a process into a group with the time of one core."""
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folder = Path(f"/sys/fs/cgroup/{'' if second else 'cpu/'}lightning_ptm_test_{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if second:
            (folder / "cpu.max").write_text("100000 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"groups cannot bound cores here: {error}")
    yield folder / "cgroup.procs"
    folder.rmdir()


def test_a_process_in_a_group_has_the_cores_of_the_group(group_of_one_core: Path) -> None:
    program = f"""
import os
open({str(group_of_one_core)!r}, "w").write(str(os.getpid()))
from lightning_ptm.runtime.machine.cgroup import cores
assert cores() == 1, cores()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(("bound_to", "ranks", "cores"), [(8, 1, 6), (2, 1, 2), (2, 2, 4), (2, 4, 6)])
def test_what_a_process_is_bound_to_bounds_its_ranks(
    monkeypatch: pytest.MonkeyPatch, bound_to: int, ranks: int, cores: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(cgroup, "cores", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound_to)))
    assert machine.node_cores(ranks) == cores


@pytest.mark.parametrize(
    ("threads", "ranks", "told"),
    [
        (4, 1, None),
        (
            5,
            1,
            "PyTorch computes with 5 threads, and this process may use 4 of this machine's cores; set OMP_NUM_THREADS=4",
        ),
        (2, 2, None),
        (3, 2, "a rank may use 2 of this machine's cores; set OMP_NUM_THREADS=2"),
        (1, 8, None),
    ],
)
def test_more_threads_than_cores_are_told(
    monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int, told: str | None
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cgroup, "cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_threads(ranks)
    assert bool(heard) == (told is not None)
    assert told is None or told in str(heard[0].message)
