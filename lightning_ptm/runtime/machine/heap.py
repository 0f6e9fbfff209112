"""The process's heap during a run on a CPU: what becomes of memory that a step has freed, and how far it may grow.

Freed memory is kept for the next step, or given back to the system (memory/malloc.py). Where RAM is short, a ceiling
(memory/memory_limit.py) has an allocation fail that would have the kernel kill the process, and the run ends with a sentence.
Knows no pages: this is about activations and gradients, which PyTorch takes from the C library.
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
from lightning_ptm.memory.memory_limit import MemoryLimit, wanted_bytes
from lightning_ptm.runtime.machine.machine import free_host_bytes, free_swap_bytes

_RESERVE_BYTES = 1 << 30
"""With less RAM than this free, a run that has kept freed memory gives it back from then on."""

_LOOK_S = 0.5
"""Free RAM is looked for in a dozen of the system's files, which takes 2 ms."""
_LOOK_WITHIN_S = 0.1
"""The same within a step, where there is a ceiling."""


_WATCHED_BYTES = 8 << 30
"""With less RAM left to a rank than this there is a ceiling: elsewhere a library that maps much and uses little of it would
meet one."""
_BESIDE_HEAP_BYTES = 24 << 20
"""That a ceiling leaves to what it does not count: page tables, sockets, memory that processes share, holes of the heap."""
_BESIDE_HEAP_SHARE = 1 / 64
"""The same, as a share of what is left."""


SETTING_UP = "setting up the run"
_IN_SET_UP = (
    "build the model in configure_model, where it takes no memory before its pages do, keep less of it in RAM (a disk_path, "
    "offload_parameters='disk'), or raise the limit"
)
_IN_A_STEP = (
    "lower the batch size, use recompute='all', keep less of the model in RAM (a disk_path, "
    "offload_parameters='disk', a lower "
    "host_memory), or raise the limit"
)


class Freed(enum.Enum):
    """What becomes of it."""

    STAYS = "stays for the next step"
    SMALL_STAYS = "stays for the next step, but for large blocks, into whose holes nothing as large may fit"
    LEAVES = "goes back to the system"


class Heap:
    """The process's heap during one run on a CPU. The settings are the process's: the newest run decides, until it ends.

    Args:
        ranks_here: that share the machine's RAM.
        pages_take: bytes of RAM that the run's pages will take and have not taken yet.
        follows: there are pages of a run before, whose RAM comes back as new ones are laid: no ceiling meanwhile.
    """

    def __init__(
        self, freed: Freed, *, ranks_here: int = 1, pages_take: Callable[[], int] = lambda: 0, follows: bool = False
    ) -> None:
        self._keep = freed is not Freed.LEAVES
        self._ranks_here = ranks_here
        self._pages_take = pages_take
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
        """Freed activations of the last step leave the process, unless they may stay."""
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

    def within_step(self) -> None:
        """What threads and libraries have mapped meanwhile and do not use counts no longer. Cheap."""
        if self._watched and monotonic() - self._looked_s >= _LOOK_WITHIN_S:
            self._looked_s = monotonic()
            self._put_ceiling(free_host_bytes())

    def steps_end(self) -> None:
        """No step follows: nothing comes back for what they have freed, and pages take no more than they have."""
        trim()
        self._pages_take = lambda: 0
        if self._watched:
            self._put_ceiling(free_host_bytes())

    def weights_are_written(self) -> None:
        """What was trained goes to disk now: no ceiling may keep it from there. The writer's threads map stacks of 8 MiB and
        touch a few KiB of them."""
        self._ceiling.lift()
        self._watched = False

    def free_bytes(self) -> int:
        """RAM that the ranks of this machine may still take: what is free, as far as the ceiling lets them."""
        free, left = free_host_bytes(), self._ceiling.left_bytes()
        return free if left is None else min(free, left * self._ranks_here)

    def close(self) -> None:
        """The run has ended: its settings would be those of whatever the process does next."""
        self._ceiling.lift()
        end_settings()
        trim()

    @contextmanager
    def refusals_in_words(self, doing: str) -> Iterator[None]:
        """Inside, what the ceiling refuses is a CapacityError that says what was lacking for what.

        Args:
            doing: such as "the backward pass".
        """
        try:
            yield
        except CapacityError:
            raise
        except (MemoryError, RuntimeError, OSError, ValueError) as error:
            first = error.__cause__ if isinstance(error, AngelPTMError) else error
            if first is None or not self._ceiling.refused(first):
                raise
            raise CapacityError(self._lacking(doing, first)) from error

    def _put_ceiling(self, free: int) -> None:
        left = (free + free_swap_bytes()) // self._ranks_here - self._pages_take()
        left -= max(_BESIDE_HEAP_BYTES, int(left * _BESIDE_HEAP_SHARE))
        self._watched = left < _WATCHED_BYTES
        if self._watched:
            self._ceiling.put(left)
        else:
            self._ceiling.lift()

    def _lacking(self, doing: str, error: BaseException) -> str:
        wanted, pages = wanted_bytes(error), self._pages_take()
        what = "more memory" if wanted is None else f"{format_bytes(wanted)} at once"
        kept = f", of which pages of this run will take {format_bytes(pages)}" if pages else ""
        remedy = _IN_SET_UP if doing == SETTING_UP else _IN_A_STEP
        free = format_bytes(free_host_bytes())
        return (
            f"{doing} asked for {what}, and RAM has {free} free within the limits of this process's control groups{kept}; it "
            f"was refused, since the system would have killed the process; {remedy}"
        )
