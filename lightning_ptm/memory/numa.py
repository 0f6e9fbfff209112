"""Which CPU cores are beside a device: on a machine with several NUMA nodes, RAM of the device's own node is what it copies
from and to without the link between processors, and cores of that node are what update there at full speed.

Linux tells both in /sys. RAM belongs to the node of the core that first touches it, so a thread that keeps to cores has its
memory there, too. Only threads of the engine's own are bound, and whoever commits the RAM of pages for as long as that takes:
the process's other threads are its user's (`torchrun --numa-binding=node` binds them all, and leaves nothing to do here).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/sys")


def cores_near(address: str, system: Path = SYSTEM) -> frozenset[int] | None:
    """Those of the NUMA node of a device on the PCI bus that this thread may run on.

    Args:
        address: as /sys names it: "0000:dc:00.0".
    Returns:
        None where there is nothing to choose: one node; a device of which the system says no node; a thread that keeps to
        that node already. And where somebody has chosen otherwise: fewer than an even share of this thread's cores are there.
    """
    nodes = _nodes(system)
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        allowed = frozenset(os.sched_getaffinity(0))
    except (OSError, ValueError, AttributeError):  # no such device there, or no such system
        return None
    near = nodes.get(node, frozenset()) & allowed
    used = sum(1 for cores in nodes.values() if cores & allowed)
    return near if used > 1 and len(near) * used >= len(allowed) else None


def keep_to(cores: frozenset[int] | None) -> None:
    """From now on this thread, and those it starts, run there only; None: as before. Where the system refuses, it runs
    where it may."""
    if cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def kept_to(cores: frozenset[int] | None) -> Iterator[None]:
    """This thread runs there only, inside."""
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
    """Cores of each."""
    found = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(folder.name.removeprefix("node"))] = cores_listed((folder / "cpulist").read_text())
    return found


def cores_listed(text: str) -> frozenset[int]:
    """Numbers of a list such as "0-3,8,10-11"."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
