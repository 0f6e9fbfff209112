"""RAM and cores that control groups leave to this process, as a container or a cluster's scheduler sets them.

Linux, versions 1 and 2. Reads only.
"""

from __future__ import annotations

from pathlib import Path

from lightning_ptm.memory.numa import cores_listed

NO_LIMIT = 1 << 60

_FOLDERS = "/sys/fs/cgroup"


def free_bytes() -> int:
    """Returns the bytes until the nearest limit of this process's memory group and its ancestors.

    Page cache counts as free. `memory.high` counts as a limit: above it the system throttles a group and reclaims its
    memory.
    """
    free = NO_LIMIT
    for folder, version in _groups("memory"):
        if version == 1:
            limits, used = ["memory.limit_in_bytes"], "memory.usage_in_bytes"
        else:
            limits, used = ["memory.max", "memory.high"], "memory.current"
        for name in limits:
            limit = _number(folder / name)
            if (
                limit is not None and limit < NO_LIMIT
            ):  # few groups; usage is read for these alone, because that is slow
                free = min(free, _group_free_bytes(folder, limit, used))
    return max(free, 0)


def free_swap_bytes() -> int:
    """Returns the bytes that this process's memory groups let the system swap out."""
    free = NO_LIMIT
    for folder, version in _groups("memory"):
        if version == 2:
            limit, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
        else:  # version 1 counts RAM and swap together
            limit, used = (
                _number(folder / "memory.memsw.limit_in_bytes"),
                _number(folder / "memory.memsw.usage_in_bytes"),
            )
            ram = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
            if None not in ram and limit is not None and used is not None and limit < NO_LIMIT:
                limit, used = limit - (ram[0] or 0), max(0, used - (ram[1] or 0))
        if limit is not None and used is not None and limit < NO_LIMIT:
            free = min(free, limit - used)
    return max(free, 0)


def cores() -> int:
    """Returns the whole cores that this process's groups and their ancestors allow; at least 1.

    Both quotas and cpusets count.
    """
    count = NO_LIMIT
    for folder, version in _groups("cpu"):
        if version == 1:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        else:
            quota, period = _pair(folder / "cpu.max")
        if quota is not None and period and quota > 0:
            count = min(count, quota // period)
    for folder, version in _groups("cpuset"):
        named = _named(folder / ("cpuset.effective_cpus" if version == 1 else "cpuset.cpus.effective"))
        count = min(count, named or NO_LIMIT)
    return max(count, 1)


def _groups(controller: str) -> list[tuple[Path, int]]:
    """Returns the folders of the groups that bound this process for `controller`, and the version of their files."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, int]] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            mount, version = Path(f"{_FOLDERS}/{controller}"), 1
        elif not controllers:
            mount, version = Path(_FOLDERS), 2
        else:
            continue
        # Ancestors, because a job's limit bounds the tasks inside of it. In a container the mount may be the own group, and
        # the path may not exist.
        own = mount / group.lstrip("/")
        for folder in (own, *own.parents):
            found.append((folder, version))
            if folder == mount:
                break
    return found


def _group_free_bytes(folder: Path, limit: int, used_name: str) -> int:
    used = _number(folder / used_name)
    if used is None:
        return NO_LIMIT
    cache = 0
    try:
        for entry in (folder / "memory.stat").read_text().splitlines():
            key, _, value = entry.partition(" ")
            if key in ("inactive_file", "active_file"):
                cache += int(value)
    except (OSError, ValueError):
        cache = 0
    return limit - used + cache


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Returns the number in a file; None where there is no file, or no number in it ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _pair(path: Path) -> tuple[int | None, int | None]:
    words = _text(path).split()
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return None, None
    return quota, period


def _named(path: Path) -> int:
    """Returns how many cores a cpuset file lists; 0 where there is none."""
    try:
        return len(cores_listed(_text(path)))
    except ValueError:
        return 0
