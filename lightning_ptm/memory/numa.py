"""NUMA placement: the CPU cores on a device's NUMA node, and threads bound to them.

On a machine with several NUMA nodes, a device copies from and to RAM of its own node without crossing the link between
processors, and cores of that node update that RAM at full speed. Linux reports the nodes in /sys. RAM is placed on the
node of the core that first touches it, so the memory of a bound thread is on the thread's node too. Only the engine's
own threads are bound, and any thread while it commits the RAM of pages: the process's other threads belong to the user
(`torchrun --numa-binding=node` binds them all, and leaves nothing to do here).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/sys")


def cores_near(address: str, system: Path = SYSTEM) -> frozenset[int] | None:
    """Returns the cores on the NUMA node of a PCI device on which this thread may run.

    Args:
        address: PCI address as in /sys: "0000:dc:00.0".
        system: root of the sysfs tree.
    Returns:
        None if there is no choice: one node; a device without a known node; a thread bound to that node already. None
        also if the user has bound the thread otherwise: less than an even share of its cores are on that node.
    """
    nodes = _nodes(system)
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        allowed = frozenset(os.sched_getaffinity(0))
    except (OSError, ValueError, AttributeError):  # a device that /sys does not list, or another operating system
        return None
    near = nodes.get(node, frozenset()) & allowed
    used = sum(1 for cores in nodes.values() if cores & allowed)
    return near if used > 1 and len(near) * used >= len(allowed) else None


def keep_to(cores: frozenset[int] | None) -> None:
    """Binds this thread, and threads that it starts, to some cores; None changes nothing. A refusal is ignored."""
    if cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def kept_to(cores: frozenset[int] | None) -> Iterator[None]:
    """Binds this thread to some cores inside the context."""
    if cores is None:
        yield
        return
    before = frozenset(os.sched_getaffinity(0))
    keep_to(cores)
    try:
        yield
    finally:
        keep_to(before)


def _nodes(system: Path) -> dict[int, frozenset[int]]:
    """Returns the cores of each NUMA node."""
    found = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(folder.name.removeprefix("node"))] = cores_listed((folder / "cpulist").read_text())
    return found


def cores_listed(text: str) -> frozenset[int]:
    """Parses a list of cores such as "0-3,8,10-11"."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
