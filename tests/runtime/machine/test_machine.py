"""Free memory of a machine, read from files as Linux has them; here they are in a folder."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from machine_of_files import MakeMachine

from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.runtime.machine.machine import Machine, free_disk_bytes, free_host_bytes, this_machine

MIB = 1 << 20
MEMINFO = "MemTotal:       65536 kB\nMemFree:         1024 kB\nMemAvailable:   32768 kB\n"
V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


def v1(group: str, limit: object, used: object, stat: str = "") -> dict[str, str]:
    return {
        "/proc/self/cgroup": f"12:cpu,cpuacct:/elsewhere\n4:memory:{group}\n0::/other\n",
        f"{V1}{group}/memory.limit_in_bytes": f"{limit}\n",
        f"{V1}{group}/memory.usage_in_bytes": f"{used}\n",
        f"{V1}{group}/memory.stat": stat,
    }


def v2(group: str, limit: object, used: object, stat: str = "", *, file: str = "memory.max") -> dict[str, str]:
    return {
        "/proc/self/cgroup": f"0::{group}\n",
        f"{V2}{group}/{file}": f"{limit}\n",
        f"{V2}{group}/memory.current": f"{used}\n",
        f"{V2}{group}/memory.stat": stat,
    }


@pytest.mark.parametrize("version", [v1, v2, partial(v2, file="memory.high")])
@pytest.mark.parametrize("group", ["/", "/user.slice/mine"])
@pytest.mark.parametrize(
    ("limit", "used", "stat", "free"),
    [
        (8 * MIB, 3 * MIB, "", 5 * MIB),
        (
            8 * MIB,
            3 * MIB,
            f"anon 5\ninactive_file {MIB}\nactive_file {2 * MIB}\nslab 7\n",
            8 * MIB,
        ),  # as with no cache
        (8 * MIB, 9 * MIB, "", 0),
        (48 * MIB, 3 * MIB, "", 32 * MIB),  # the machine has less
        ("max", 3 * MIB, "", 32 * MIB),
        (8 * MIB, 3 * MIB, "inactive_file\n", 5 * MIB),
        (MIB << 30, (MIB << 30) - 7 * MIB, "", 7 * MIB),  # of the largest nodes
        ((1 << 63) - 4096, 3 * MIB, "", 32 * MIB),  # as version 1 says that there is none
    ],
)
def test_ram_within_the_group(
    machine_of_files: MakeMachine,
    version: Callable[..., dict[str, str]],
    group: str,
    limit: object,
    used: int,
    stat: str,
    free: int,
) -> None:
    machine_of_files({"/proc/meminfo": MEMINFO, **version(group, limit, used, stat)})
    assert free_host_bytes() == free


@pytest.mark.parametrize(("first", "second"), [(7 * MIB, 9 * MIB), (9 * MIB, 7 * MIB)])
def test_of_two_groups_the_fuller_one_counts(machine_of_files: MakeMachine, first: int, second: int) -> None:
    machine_of_files({"/proc/meminfo": MEMINFO, **v2("/other", first, MIB), **v1("/mine", second, MIB)})
    assert free_host_bytes() == 6 * MIB


def test_a_limit_of_the_group_around_counts(machine_of_files: MakeMachine) -> None:
    """Slurm sets limits in this way: for the job, and none for the task inside of it."""
    machine_of_files({"/proc/meminfo": MEMINFO, **v2("/job", 8 * MIB, MIB), **v2("/job/task", "max", MIB)})
    assert free_host_bytes() == 7 * MIB


def test_without_groups(machine_of_files: MakeMachine) -> None:
    machine_of_files({"/proc/meminfo": MEMINFO})
    assert free_host_bytes() == 32 * MIB


def test_a_group_without_files_bounds_nothing(machine_of_files: MakeMachine) -> None:
    machine_of_files({"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/gone\n"})
    assert free_host_bytes() == 32 * MIB


@pytest.mark.parametrize("files", [{}, {"/proc/meminfo": "MemAvailable: many kB\n"}])
def test_without_meminfo_it_is_all_of_the_ram(machine_of_files: MakeMachine, files: dict[str, str]) -> None:
    machine_of_files(files)
    assert free_host_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_stripes_fill_the_fullest_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    spaces = {}
    for name, free in (("a", 50), ("b", 20), ("c", 90)):
        (tmp_path / name).mkdir()
        spaces[tmp_path / name] = usage(free)
    monkeypatch.setattr(shutil, "disk_usage", spaces.__getitem__)
    assert free_disk_bytes(list(spaces)) == 3 * 20
    assert free_disk_bytes([tmp_path / "c"]) == 90
    assert free_disk_bytes([tmp_path / "a", tmp_path / "missing"]) == 50
    assert free_disk_bytes([tmp_path / "missing"]) == free_disk_bytes([]) == 0


class Apart(CpuBackend):
    """A device with memory of its own."""

    has_own_memory = True

    def free_bytes(self) -> int:
        return 11 * MIB

    def bytes_outside_region(self, region_bytes: int) -> int:
        return 3 * MIB - region_bytes


def test_this_machine(machine_of_files: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of_files({"/proc/meminfo": MEMINFO})
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert this_machine(CpuBackend(), [], 3) == Machine(False, 0, 32 * MIB, 0, 6, 3)
    assert this_machine(Apart(), [tmp_path / "missing"], 1) == Machine(True, 11 * MIB, 32 * MIB, 0, 6, 1, 3 * MIB)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert this_machine(CpuBackend(), [], 1).cores == 1
