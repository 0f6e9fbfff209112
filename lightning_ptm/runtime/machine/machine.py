"""Free resources of a machine: RAM and cores within its control groups, device memory, disk space. Reads only.

`Machine` is all that decisions may know of a machine (blueprint.py), so that they can be made for another machine than
this.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning_ptm.memory.backend import Backend
from lightning_ptm.runtime.machine import cgroup

SHORT_RAM_BYTES = 4 << 30
"""If a rank has less RAM than this, a step's activations may not fit, so pages take no more than they need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Resources that one node offers to the ranks on it.

    Attributes:
        device_has_own_memory: ranks compute on devices with their own memory; otherwise device memory is RAM.
        free_device_bytes: free bytes of one rank's device; 0 where device memory is RAM.
        free_host_bytes: free RAM of the node.
        free_disk_bytes: free disk space of the node.
        cores: CPU cores of the node, within the limits of its control groups.
        ranks: number of ranks that share everything but the devices.
        taken_device_bytes: bytes of the device that this process's tensors take now, outside pages.
    """

    device_has_own_memory: bool
    free_device_bytes: int
    free_host_bytes: int
    free_disk_bytes: int
    cores: int
    ranks: int
    taken_device_bytes: int = 0

    def with_more(self, in_memory: int, on_disk: int, on_device: int = 0) -> Machine:
        """Returns the machine with so many bytes more of RAM, disk and the device for each rank: those of present pages."""
        return dataclasses.replace(
            self,
            free_device_bytes=self.free_device_bytes + on_device,
            taken_device_bytes=self.taken_device_bytes - on_device,
            free_host_bytes=self.free_host_bytes + in_memory * self.ranks,
            free_disk_bytes=self.free_disk_bytes + on_disk * self.ranks,
        )


def this_machine(backend: Backend, disk_paths: Sequence[Path], ranks: int) -> Machine:
    """Returns the resources of the machine that this process runs on."""
    if backend.has_own_memory:
        # Pages of a run that has ended are freed with its engine, which is in reference cycles. Of a run that an error has
        # ended, a graph of autograd may hold parts, which are found only after what holds the graph was freed.
        for _ in range(4):
            if not gc.collect():
                break
    return Machine(
        device_has_own_memory=backend.has_own_memory,
        free_device_bytes=backend.free_bytes(),
        free_host_bytes=free_host_bytes(),
        free_disk_bytes=free_disk_bytes(disk_paths),
        cores=node_cores(ranks),
        ranks=ranks,
        taken_device_bytes=backend.bytes_outside_region(0) if backend.has_own_memory else 0,
    )


def node_cores(ranks: int) -> int:
    """Returns the cores of the node that its ranks may use.

    A rank that is bound to some of the cores (`taskset`, `numactl`, a scheduler's tasks) assumes that the others are
    bound in the same way.
    """
    cores = min(os.cpu_count() or 1, cgroup.cores())
    return min(cores, len(os.sched_getaffinity(0)) * ranks)


def free_host_bytes() -> int:
    """Returns the RAM that this process may still take."""
    try:
        available = _memory_info("MemAvailable:", default=cgroup.NO_LIMIT)
    except (OSError, ValueError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(available, cgroup.free_bytes())


def free_swap_bytes() -> int:
    """Returns the bytes that the system may swap out before it kills a process.

    The limits of this process's control groups count.
    """
    try:
        # Steps call this where RAM is short, and reading the groups takes longer than all else in it.
        free = _memory_info("SwapFree:", default=0)
        return min(free, cgroup.free_swap_bytes()) if free else 0
    except (OSError, ValueError):
        return 0


def _memory_info(name: str, *, default: int) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return default


def free_disk_bytes(paths: Sequence[Path]) -> int:
    """Returns the disk space for pages striped over `paths`: the fullest file system bounds each stripe.

    Missing paths count as 0; the disk tier itself raises for them.
    """
    spaces = [shutil.disk_usage(path).free for path in paths if path.is_dir()]
    return min(spaces) * len(spaces) if spaces else 0
