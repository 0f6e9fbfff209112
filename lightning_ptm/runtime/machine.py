"""What a machine has free: RAM within its memory cgroup, device memory, disk space. Reads only.

`Machine` is all that decisions may know of one (blueprint.py), so that they can be made for a machine that is not here.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning_ptm.memory.backend import Backend

_NO_LIMIT = 1 << 60


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What one node offers to the ranks on it.

    Attributes:
        device_apart: ranks compute on devices with memory of their own; else device memory is RAM.
        free_device_bytes: of one rank's device; 0 where that is RAM.
        free_host_bytes: RAM of the node.
        free_disk_bytes: of the node.
        cores: CPU cores of the node.
        ranks: that share all but the devices.
    """

    device_apart: bool
    free_device_bytes: int
    free_host_bytes: int
    free_disk_bytes: int
    cores: int
    ranks: int


def this_machine(backend: Backend, disk_paths: Sequence[Path], ranks: int) -> Machine:
    """The machine that this process runs on."""
    return Machine(
        device_apart=backend.apart,
        free_device_bytes=backend.free_bytes(),
        free_host_bytes=free_host_bytes(),
        free_disk_bytes=free_disk_bytes(disk_paths),
        cores=os.cpu_count() or 1,
        ranks=ranks,
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _cgroup_free_bytes() -> int:
    """Bytes until the nearest hard limit of this process's memory cgroup and those around it (v1, v2); page cache is free."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _NO_LIMIT
    free = _NO_LIMIT
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            mount, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif controllers == "":
            mount, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        else:
            continue
        # A job's limit stands for the tasks inside of it. A container may see its own group as the mount, and no such path.
        own = mount / group.lstrip("/")
        for folder in (own, *own.parents):
            if folder == mount or mount in folder.parents:
                free = min(free, _group_free_bytes(folder, *names))
    return max(free, 0)


def _group_free_bytes(folder: Path, limit_name: str, used_name: str) -> int:
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or used is None:
        return _NO_LIMIT
    cache = 0
    try:
        for entry in (folder / "memory.stat").read_text().splitlines():
            key, _, value = entry.partition(" ")
            if key in ("inactive_file", "active_file"):
                cache += int(value)
    except (OSError, ValueError):
        cache = 0
    return limit - used + cache


def free_host_bytes() -> int:
    """RAM that this process may still take."""
    available = _NO_LIMIT
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(available, _cgroup_free_bytes())


def free_disk_bytes(paths: Sequence[Path]) -> int:
    """Disk space for pages striped over `paths`: the fullest file system bounds each stripe. Missing paths count as
    none; the disk tier itself raises for them."""
    spaces = [shutil.disk_usage(path).free for path in paths if path.is_dir()]
    return min(spaces) * len(spaces) if spaces else 0
