"""The C library's allocator: how much it has handed out, and settings under which freed activations leave the process.

PyTorch's CPU tensors come from malloc. glibc serves blocks above a threshold by mmap, which give their memory back when
freed, and the others from a heap, whose holes stay resident. The threshold begins at 128 KiB and grows to the largest
block freed so far (up to 32 MiB), so after the first step most activations live in the heap.

With other C libraries than glibc (musl, macOS) nothing here has an effect; each function says what it returns then.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

MMAP_THRESHOLD_BYTES = 512 * 1024
TRIM_THRESHOLD_BYTES = 16 * 1024 * 1024


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

    Blocks of 512 KiB and more get memory of their own, and the threshold no longer grows; a heap keeps at most 16 MiB
    of free memory at its end. Settings are the process's: call once, before the model runs; they cannot be undone.
    """
    libc = _glibc()
    if libc is None:
        return False
    return bool(
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    )


def malloc_in_use_bytes() -> int:
    """Bytes that malloc has handed out and not got back, over all heaps and mapped blocks; 0 when it cannot tell."""
    libc = _glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):  # glibc before 2.33
        return 0
    libc.mallinfo2.restype = _MallInfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def trim() -> bool:
    """Give the heaps' free memory back to the system (malloc_trim); True when some was given back."""
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
