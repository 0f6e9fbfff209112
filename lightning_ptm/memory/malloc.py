"""The C library's allocator: how much it has handed out, and settings under which freed activations leave the process.

PyTorch's CPU tensors come from malloc. glibc serves blocks above a threshold by mmap, which give their memory back when
freed, and the others from a heap, whose holes stay resident. The threshold begins at 128 KiB and grows to the largest
block freed so far (up to 32 MiB), so after the first step most activations live in the heap. What the system gets back
it zeroes and maps again, 4 KiB at a time, at the next step. A run wants one of two things:

**Give freed memory back** (`give_freed_memory_back`), where RAM is short. Measured on two x86 cores, three GPT blocks of
width 512 in bf16 with alternating batch sizes, whose own tensors and code take 245 MB; resident MB after a step, at its
peak, and CPU time of the larger step (interleaved runs, noise 10 %):

    glibc's own settings          440 to 475   551 to 573   1.00
    trim() after each step        281          498 to 502   1.00
    threshold fixed at 4 MiB      342 to 371   518 to 531   0.94 to 1.05
    threshold fixed at 512 KiB    284          494          1.12 and more: every activation is zeroed by page faults

Hence 4 MiB here, and trim() between steps for who needs the rest. The number of heaps (M_ARENA_MAX) made no difference.

**Keep freed memory** (`keep_freed_memory`), where there is enough: no block is mapped by itself and no heap shrinks, so the
next step finds the memory of the last. A step of GPT 124M at batch 2 x 256, in RAM, on the same machine:

    glibc's own settings          185,000 page faults, 860 to 980 ms, peak 2.9 GB
    freed memory kept               2,000 page faults, 680 to 720 ms, peak 3.3 GB

**Keep all but large blocks** (`keep_freed_memory(but_large=True)`), where all is in RAM, nobody asked for either, and nothing
makes up for holes (in mixed precision narrower gradients do). Blocks
of many sizes leave holes that the largest do not fit into, so the heap grows by more than these. Six steps of GPT 124M in
fp32, at batch 2 x 256 (logits of 98 MiB, an embedding's gradient of 147), beside Lightning's single device with glibc's own
settings; page faults and CPU time of a step are then the single device's (213,000; 5.3 to 5.7 s and 5.3 to 5.9):

    single device                       peak of the process 2,982 to 3,005 MiB
    freed memory kept                                       3,432 to 3,446
    all but blocks of 32 MiB and more                       3,008

Trimming between steps (3,254) leaves the holes that arise within one. Gradients cannot go before the next forward, behind
which Lightning forgets them: somebody may read them until then.

**When a run has ended** (`end_settings`), the process goes on with what glibc's own settings come to once a block of 32 MiB
has been freed. Else it would keep whatever it frees from then on for a step that never comes.

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
"""Twice the threshold that it has come to."""

MMAP_THRESHOLD_BYTES = 4 * 1024 * 1024
LARGE_BYTES = 32 * 1024 * 1024
"""The most that glibc takes for a threshold, and the one that its own comes to."""


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


def give_freed_memory_back() -> bool:
    """Make glibc give freed activations back to the system; True when it took the settings.

    Blocks of 4 MiB and more get memory of their own, and the threshold no longer grows. The setting is the process's, and
    replaces that of `keep_freed_memory`. False on other C libraries.
    """
    return _set(
        (_M_MMAP_MAX, _GLIBC_MMAP_MAX),
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _GLIBC_TRIM_THRESHOLD_BYTES),
    )


def keep_freed_memory(*, but_large: bool = False) -> bool:
    """Make glibc keep what is freed for the next step; True when it took the settings.

    The process then holds the memory of its largest step until `trim`. The setting is the process's, and replaces that
    of `give_freed_memory_back`. False on other C libraries.

    Args:
        but_large: blocks of `LARGE_BYTES` and more have memory of their own, and give it back.
    """
    if but_large:
        return _set((_M_MMAP_MAX, _GLIBC_MMAP_MAX), (_M_MMAP_THRESHOLD, LARGE_BYTES), (_M_TRIM_THRESHOLD, -1))
    return _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))


def end_settings() -> bool:
    """Make glibc treat what is freed as it does by itself; True when it took the settings.

    They no longer adapt: nothing makes them do so again. False on other C libraries.
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
    taken = [bool(libc.mallopt(option, value)) for option, value in options]  # each of them, whatever becomes of others
    return all(taken)


def malloc_in_use_bytes() -> int:
    """Bytes that malloc has handed out and not got back, over all heaps and mapped blocks; 0 when it cannot tell."""
    libc = _glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):  # glibc before 2.33
        return 0
    libc.mallinfo2.restype = _MallInfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def trim() -> bool:
    """Give the heaps' free memory back to the system (malloc_trim); True when some was given back.

    Call between steps, not within one. False on other C libraries.
    """
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, None when it is not glibc."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
