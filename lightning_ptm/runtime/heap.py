"""What becomes of memory that a step has freed: kept for the next step, or given back to the system (memory/malloc.py).

Knows no pages: this is about activations and gradients, which PyTorch takes from the C library on a CPU.
"""

from __future__ import annotations

import enum
import math
from time import monotonic

from lightning_ptm.memory.malloc import end_settings, give_freed_memory_back, keep_freed_memory, trim
from lightning_ptm.runtime.machine import free_host_bytes

_RESERVE_BYTES = 1 << 30
"""With less RAM than this free, a run that has kept freed memory gives it back from then on."""

_LOOK_S = 0.5
"""Free RAM is looked for in a dozen of the system's files, which takes 2 ms."""


class Freed(enum.Enum):
    """What becomes of it."""

    STAYS = "stays for the next step"
    SMALL_STAYS = "stays for the next step, but for large blocks, into whose holes nothing as large may fit"
    LEAVES = "goes back to the system"


class Heap:
    """The process's heap during one run on a CPU. The settings are the process's: the newest run decides, until it ends."""

    def __init__(self, freed: Freed) -> None:
        self._keep = freed is not Freed.LEAVES
        self._looked_s = -math.inf
        if self._keep:
            keep_freed_memory(but_large=freed is Freed.SMALL_STAYS)
        else:
            give_freed_memory_back()

    def between_steps(self) -> None:
        """Freed activations of the last step leave the process, unless they may stay."""
        if self._keep and monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = monotonic()
            if free_host_bytes() < _RESERVE_BYTES:
                self._keep = False
                give_freed_memory_back()
        if not self._keep:
            trim()

    def steps_end(self) -> None:
        """No step follows: nothing comes back for what they have freed."""
        trim()

    def close(self) -> None:
        """The run has ended: its settings would be those of whatever the process does next."""
        end_settings()
        trim()
