"""A memory limit for processes: a memory control group inside the one that this process is in, removed at the end.

Knows version 1 (a `memory` hierarchy of its own) and version 2 (one hierarchy, controllers switched on by the parent).
I1: the new group is a child, so that no limit above it is escaped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.race import SkipCase

CGROUPS = Path("/sys/fs/cgroup")
REMOVAL_TRIES = 50


@contextlib.contextmanager
def memory_cap(cap_bytes: int, name: str = "") -> Iterator[str]:
    """Yields the folder of a group whose processes, together, get `cap_bytes` of memory (page cache included) and no
    swap; a process enters by writing its id to `cgroup.procs` there. All of them must have ended when the block does.

    Args:
        name: tells the groups of one case apart.

    Raises:
        SkipCase: there is no memory controller, or no right to make a group.
    """
    version, parent = _own_group()
    group = parent / f"lightning_ptm_benchmark_{os.getpid()}{name}"
    try:
        group.mkdir()
    except OSError as error:
        raise SkipCase(f"no memory cap: {group} cannot be made ({error.strerror})") from error
    try:
        _limit(group, version, cap_bytes)
        yield str(group)
    finally:
        _remove(group)


def _own_group() -> tuple[int, Path]:
    """(version of the control groups, folder of the memory group that this process is in)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return 1, CGROUPS / "memory" / path.lstrip("/")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::") and (CGROUPS / "cgroup.controllers").exists():
            return 2, CGROUPS / line[3:].lstrip("/")
    raise SkipCase("no memory cap: this machine has no memory control groups")


def _limit(group: Path, version: int, cap_bytes: int) -> None:
    try:
        if version == 1:
            (group / "memory.limit_in_bytes").write_text(str(cap_bytes))
            with contextlib.suppress(OSError):  # absent where the kernel does not account swap
                (group / "memory.memsw.limit_in_bytes").write_text(str(cap_bytes))
            return
        if "memory" not in (group / "cgroup.controllers").read_text().split():
            (group.parent / "cgroup.subtree_control").write_text("+memory")
        (group / "memory.max").write_text(str(cap_bytes))
        with contextlib.suppress(OSError):
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        raise SkipCase(
            f"no memory cap: {error.filename} cannot be written ({error.strerror}); start the case in a "
            f"group of its own, e.g. systemd-run --scope -p MemoryMax={cap_bytes}, or as root"
        ) from error


def _remove(group: Path) -> None:
    for attempt in range(REMOVAL_TRIES):
        try:
            group.rmdir()
        except OSError:  # a process that has just ended is still leaving
            if attempt == REMOVAL_TRIES - 1:
                raise
            time.sleep(0.1)
        else:
            return
