"""The C library's allocator: how much it has handed out, and settings under which freed activations leave the process.

PyTorch's CPU tensors come from malloc. glibc serves blocks above a threshold by mmap, which give their memory back when
freed, and the others from a heap, whose holes stay resident. The threshold begins at 128 KiB and grows to the largest
block freed so far (up to 32 MiB), so after the first step most activations live in the heap.

Measured on two x86 cores, three GPT blocks of width 512 in bf16 with alternating batch sizes, whose own tensors and code
take 245 MB; resident MB after a step, at its peak, and CPU time of the larger step (interleaved runs, noise 10 %):

    glibc's own settings          440 to 475   551 to 573   1.00
    trim() after each step        281          498 to 502   1.00
    threshold fixed at 4 MiB      342 to 371   518 to 531   0.94 to 1.05
    threshold fixed at 512 KiB    284          494          1.12 and more: every activation is zeroed by page faults
    threshold fixed at 1 GiB      540          610          1.00

Hence 4 MiB here, and trim() between steps for who needs the rest. The number of heaps (M_ARENA_MAX) made no difference.

With other C libraries than glibc (musl, macOS) nothing here has an effect; each function says what it returns then.
"""

from __future__ import annotations

import ctypes
import functools

_M_MMAP_THRESHOLD = -3

MMAP_THRESHOLD_BYTES = 4 * 1024 * 1024


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


def set_malloc_thresholds() -> bool:
    """Make glibc give freed activations back to the system; True when it took the settings.

    Blocks of 4 MiB and more get memory of their own, and the threshold no longer grows. The setting is the process's:
    call once, before the model runs; it cannot be undone. False on other C libraries.
    """
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES))


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
