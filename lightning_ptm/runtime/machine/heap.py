"""The process's heap during a run on a CPU: whether freed memory is kept, and a ceiling for its growth.

Freed memory is kept for the next step, or returned to the system (memory/malloc.py). Where RAM is short, a ceiling
(memory/memory_limit.py) makes an allocation fail for which the kernel would otherwise kill the process, and the run
ends with a CapacityError. Knows no pages: this concerns activations and gradients, which PyTorch allocates from the C
library.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import AngelPTMError, CapacityError
from lightning_ptm.memory.malloc import end_settings, give_freed_memory_back, keep_freed_memory, trim
from lightning_ptm.memory.memory_limit import MemoryLimit, freed_resident_bytes, wanted_bytes
from lightning_ptm.runtime.machine.machine import free_host_bytes, free_swap_bytes

_RESERVE_BYTES = 1 << 30
"""Limit of free RAM: a run that has kept freed memory returns it as soon as less is free."""

_LOOK_S = 0.5
"""Least time between two readings of free RAM, which read a dozen system files and take 2 ms."""
_LOOK_WITHIN_S = 0.1
"""Least time between two readings of free RAM within a step, where there is a ceiling."""

_TRIMMED_SHARE = 1 / 16
"""Share of free RAM: a run that returns freed memory trims its heap within a step whose freed blocks keep more RAM.

These are blocks below malloc's threshold for mappings of their own, between blocks that are in use. From then on smaller
blocks get mappings, so that the heap, whose freed parts the ceiling counts, does not grow further.
"""

_WATCHED_BYTES = 8 << 30
"""Limit of RAM left to a rank: there is a ceiling only if a rank has less.

With more RAM, the ceiling would hit libraries that map much memory and use little of it.
"""
_BESIDE_HEAP_BYTES = 24 << 20
"""Bytes below the ceiling for memory that it does not count: page tables, sockets, shared memory, fragmentation."""
_BESIDE_HEAP_SHARE = 1 / 64
"""Share of the free bytes below the ceiling for the same memory; the larger of the two counts."""


SETTING_UP = "setting up the run"
_IN_SET_UP = (
    "build the model in configure_model, where it takes no memory before its pages do, keep less of it in RAM (a disk_path, "
    "offload_parameters='disk'), or raise the limit of the control group (a container's memory)"
)
_IN_A_STEP = (
    "lower the batch size, use recompute='all' or offload_activations='disk', keep less of the model in RAM (a disk_path, "
    "offload_parameters='disk', a lower "
    "host_memory), or raise the limit of the control group (a container's memory)"
)


class Freed(enum.Enum):
    """Policies for freed memory."""

    STAYS = "stays for the next step"
    SMALL_STAYS = "stays for the next step, but for large blocks, into whose holes nothing as large may fit"
    LEAVES = "goes back to the system"


class Heap:
    """The process's heap during one run on a CPU.

    The settings are global to the process: those of the newest run apply until it ends.

    Args:
        ranks_here: number of ranks that share the machine's RAM.
        pending_page_bytes: returns the bytes of RAM that the run's pages will take and have not taken yet.
        follows: pages of a previous run still exist, and their RAM is freed while new ones are allocated: no ceiling
            during that.
    """

    def __init__(
        self,
        freed: Freed,
        *,
        ranks_here: int = 1,
        pending_page_bytes: Callable[[], int] = lambda: 0,
        follows: bool = False,
    ) -> None:
        self._keep = freed is not Freed.LEAVES
        self._ranks_here = ranks_here
        self._pending_page_bytes = self._unused_page_bytes = pending_page_bytes
        self._ceiling = MemoryLimit()
        self._watched = False
        self._looked_s = -math.inf
        if self._keep:
            keep_freed_memory(but_large=freed is Freed.SMALL_STAYS)
        else:
            give_freed_memory_back()
        if not follows:
            self._put_ceiling(free_host_bytes())

    def between_steps(self) -> None:
        """Returns freed activations of the last step to the system, unless they are kept, and updates the ceiling."""
        looks = monotonic() - self._looked_s >= _LOOK_S
        free = 0
        if looks:
            self._looked_s = monotonic()
            free = free_host_bytes()
            if self._keep and free < _RESERVE_BYTES:
                self._keep = False
                give_freed_memory_back()
        if not self._keep:
            trim()
        if looks:
            self._put_ceiling(free)

    def within_step(self, *tick: object) -> None:
        """Called at each tick. Updates the ceiling within a step, and trims the heap where freed blocks keep much RAM; cheap.

        Memory that threads and libraries have mapped since the last update and do not use must not count.
        """
        if self._watched and monotonic() - self._looked_s >= _LOOK_WITHIN_S:
            self._looked_s = monotonic()
            free = free_host_bytes()
            if not self._keep and freed_resident_bytes(self._unused_page_bytes()) > free * _TRIMMED_SHARE:
                give_freed_memory_back(and_small=True)
                trim()
                free = free_host_bytes()
            self._put_ceiling(free)

    def steps_end(self) -> None:
        """Returns freed memory to the system: no step follows that would use it again, and pages take no more than
        they have."""
        trim()
        self._pending_page_bytes = lambda: 0
        if self._watched:
            self._put_ceiling(free_host_bytes())

    def weights_are_written(self) -> None:
        """Lifts the ceiling, which must not prevent the trained weights from being written to disk.

        The writer's threads map stacks of 8 MiB and use a few KiB of them.
        """
        self._ceiling.lift()
        self._watched = False

    def free_bytes(self) -> int:
        """Returns the RAM that the ranks of this machine may still take beside their pages: free RAM, as far as the ceiling
        allows."""
        free = free_host_bytes() - self._pending_page_bytes() * self._ranks_here
        left = self._ceiling.left_bytes()
        return free if left is None else min(free, left * self._ranks_here)

    def left_bytes(self) -> int | None:
        """Returns what this process may map until the ceiling; None without one. Cheap: call it within a step."""
        return self._ceiling.left_bytes() if self._watched else None

    def close(self) -> None:
        """Ends the run's settings, which would otherwise apply to everything that the process does next."""
        self._ceiling.lift()
        end_settings()
        trim()

    @contextmanager
    def explain_failures(self, doing: str) -> Iterator[None]:
        """Context that turns an allocation failure caused by the ceiling into a CapacityError.

        Args:
            doing: the activity that the error names, such as "the backward pass".
        """
        try:
            yield
        except (MemoryError, RuntimeError, OSError, ValueError) as error:
            refused = self.refused(error, doing)
            if refused is None:
                raise
            raise refused from error

    def refused(self, error: BaseException, doing: str) -> CapacityError | None:
        """Returns the CapacityError that takes the place of an error: that of an allocation which the ceiling has refused.

        Args:
            doing: the activity that the error names, such as "the backward pass".
        """
        first = error.__cause__ if isinstance(error, AngelPTMError) else error
        known = isinstance(error, (MemoryError, RuntimeError, OSError, ValueError))
        if not known or isinstance(error, CapacityError) or first is None or not self._ceiling.refused(first):
            return None
        return CapacityError(self._lacking(doing, first))

    def _put_ceiling(self, free: int) -> None:
        left = (free + free_swap_bytes()) // self._ranks_here - self._pending_page_bytes()
        left -= max(_BESIDE_HEAP_BYTES, int(left * _BESIDE_HEAP_SHARE))
        self._watched = left < _WATCHED_BYTES
        if self._watched:
            self._ceiling.put(left, unused_page_bytes=self._unused_page_bytes())
        else:
            self._ceiling.lift()

    def _lacking(self, doing: str, error: BaseException) -> str:
        wanted, pages = wanted_bytes(error), self._pending_page_bytes()
        what = "more memory" if wanted is None else f"{format_bytes(wanted)} at once"
        kept = f", of which pages of this run will take {format_bytes(pages)}" if pages else ""
        remedy = _IN_SET_UP if doing == SETTING_UP else _IN_A_STEP
        shared = f" for {self._ranks_here} ranks" if self._ranks_here > 1 else ""
        free = f"{format_bytes(free_host_bytes())} free{shared}"
        return (
            f"{doing} asked for {what}, and RAM has {free} within the limits of this process's control groups{kept}; "
            f"the allocation was refused, since the system would have killed the process; {remedy}"
        )
