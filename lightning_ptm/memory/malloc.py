"""Settings of malloc for freed activations: return the memory to the system, or keep it for the next step.

PyTorch's CPU tensors come from malloc. glibc serves blocks above a threshold by mmap, and freeing them returns their
memory to the system. Smaller blocks come from a heap, whose free parts stay resident. The threshold begins at 128 KiB
and grows to the largest block freed so far (up to 32 MiB), so after the first step most activations are in the heap.
Memory returned to the system is zeroed and mapped again, 4 KiB at a time, at the next step. A run chooses one of these
settings:

**Return freed memory** (`give_freed_memory_back`), for runs short of RAM. Measured on two x86 cores, three GPT blocks
of width 512 in bf16 with alternating batch sizes, whose own tensors and code take 245 MB; resident MB after a step, at
its peak, and CPU time of the larger step (interleaved runs, noise 10 %):

    glibc's own settings          440 to 475   551 to 573   1.00
    trim() after each step        281          498 to 502   1.00
    threshold fixed at 4 MiB      342 to 371   518 to 531   0.94 to 1.05
    threshold fixed at 512 KiB    284          494          1.12 and more: every activation is zeroed by page faults

Hence the threshold is 4 MiB here, and trim() between steps returns the rest. The number of heaps (M_ARENA_MAX) made no
difference. Within one long step the heap can grow from unit to unit, since small tensors that the graph keeps split the
blocks of 1 to 4 MiB which were free: 8 blocks of width 512 with 131,072 tokens left 90 MiB each. Where RAM is short the
threshold then becomes 512 KiB.

**Keep freed memory** (`keep_freed_memory`), for runs with enough RAM: no block gets a mapping of its own and no heap
shrinks, so the next step reuses the memory of the last one. A step of GPT 124M at batch 2 x 256, in RAM, on the same
machine:

    glibc's own settings          185,000 page faults, 860 to 980 ms, peak 2.9 GB
    freed memory kept               2,000 page faults, 680 to 720 ms, peak 3.3 GB

**Keep all but large blocks** (`keep_freed_memory(but_large=True)`), for fp32 runs with all states in RAM and no choice
of the user's (in mixed precision narrower gradients make up for the heap's growth). Blocks of many sizes leave holes
that the largest blocks do not fit into, so the heap grows by more than the largest blocks. Six steps of GPT 124M in
fp32, at batch 2 x 256 (logits of 98 MiB, an embedding's gradient of 147 MiB), compared with Lightning's
SingleDeviceStrategy and glibc's own settings. Page faults and CPU time of a step then equal the single device's
(213,000; 5.3 to 5.7 s and 5.3 to 5.9 s):

    single device                       peak of the process 2,982 to 3,005 MiB
    freed memory kept                                       3,432 to 3,446
    all but blocks of 32 MiB and more                       3,008

Trimming between steps (3,254) does not remove the holes that arise within a step. Gradients cannot be freed before the
next forward, after which Lightning sets them to None: users may read them until then.

**After a run** (`end_settings`), the process continues with the values that glibc's own settings reach once a block of
32 MiB has been freed. Otherwise it would keep all memory that it frees later for a step that never comes.

With other C libraries than glibc (musl, macOS) nothing here has an effect; each function says what it returns then.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_GLIBC_TRIM_THRESHOLD_BYTES = 128 * 1024
_GLIBC_MMAP_MAX = 65536
_GLIBC_GROWN_TRIM_THRESHOLD_BYTES = 64 * 1024 * 1024
"""Twice the largest mmap threshold, as glibc itself sets it."""

MMAP_THRESHOLD_BYTES = 4 * 1024 * 1024
SMALL_MMAP_THRESHOLD_BYTES = 512 * 1024
LARGE_BYTES = 32 * 1024 * 1024
"""The largest mmap threshold that glibc accepts, and the value that its own adaptive threshold reaches."""


class _MallInfo2(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>: all counters in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def give_freed_memory_back(*, and_small: bool = False) -> bool:
    """Makes glibc return freed activations to the system; True if it accepted the settings.

    Blocks of 4 MiB and more get mappings of their own, and the threshold no longer grows. The setting applies to the
    process, and replaces that of `keep_freed_memory`. False on other C libraries.

    Args:
        and_small: blocks of 512 KiB and more get mappings of their own, too.
    """
    return _set(
        (_M_MMAP_MAX, _GLIBC_MMAP_MAX),
        (_M_MMAP_THRESHOLD, SMALL_MMAP_THRESHOLD_BYTES if and_small else MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _GLIBC_TRIM_THRESHOLD_BYTES),
    )


def keep_freed_memory(*, but_large: bool = False) -> bool:
    """Makes glibc keep freed memory for the next step; True if it accepted the settings.

    The process then holds the memory of its largest step until `trim`. The setting applies to the process, and replaces
    that of `give_freed_memory_back`. False on other C libraries.

    Args:
        but_large: blocks of `LARGE_BYTES` and more get mappings of their own, and are returned to the system.
    """
    if but_large:
        return _set((_M_MMAP_MAX, _GLIBC_MMAP_MAX), (_M_MMAP_THRESHOLD, LARGE_BYTES), (_M_TRIM_THRESHOLD, -1))
    return _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))


def end_settings() -> bool:
    """Sets the values that glibc's adaptive settings reach by themselves; True if it accepted them.

    They no longer adapt: glibc cannot return to adaptive settings. False on other C libraries.
    """
    return _set(
        (_M_MMAP_MAX, _GLIBC_MMAP_MAX),
        (_M_MMAP_THRESHOLD, LARGE_BYTES),
        (_M_TRIM_THRESHOLD, _GLIBC_GROWN_TRIM_THRESHOLD_BYTES),
    )


def _set(*options: tuple[int, int]) -> bool:
    libc = _glibc()
    if libc is None:
        return False
    taken = [bool(libc.mallopt(option, value)) for option, value in options]  # a list: sets all of them
    return all(taken)


def malloc_in_use_bytes() -> int:
    """Returns the bytes allocated by malloc and not freed, over all heaps and mapped blocks; 0 if unknown."""
    info = _counters()
    return 0 if info is None else int(info.uordblks + info.hblkhd)


def malloc_free_bytes() -> int:
    """Returns the free bytes in the heaps of malloc, whether they have RAM or were returned to the system; 0 if unknown."""
    info = _counters()
    return 0 if info is None else int(info.fordblks)


def _counters() -> _MallInfo2 | None:
    libc = _glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):  # glibc before 2.33
        return None
    libc.mallinfo2.restype = _MallInfo2
    return libc.mallinfo2()


def trim() -> bool:
    """Returns the heaps' free memory to the system (malloc_trim); True if some was returned.

    Within a step, only where RAM is short: blocks that are allocated again take page faults. False on other C libraries.
    """
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Returns the C library of this process; None if it is not glibc."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
