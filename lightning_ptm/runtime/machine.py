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
    """Bytes until the hard limit of this process's memory cgroup (v1 or v2), page cache counted as free."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _NO_LIMIT
    free = _NO_LIMIT
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            base = Path("/sys/fs/cgroup/memory") / group.lstrip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif controllers == "":
            base = Path("/sys/fs/cgroup") / group.lstrip("/")
            names = ("memory.max", "memory.current")
        else:
            continue
        limit, used = _number(base / names[0]), _number(base / names[1])
        if limit is None or used is None:
            continue
        cache = 0
        try:
            for entry in (base / "memory.stat").read_text().splitlines():
                key, _, value = entry.partition(" ")
                if key in ("inactive_file", "active_file"):
                    cache += int(value)
        except (OSError, ValueError):
            cache = 0
        free = min(free, limit - used + cache)
    return max(free, 0)


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
