"""A limit on the RAM that this process may allocate, so that an allocation fails instead of the process being killed.

A process that exceeds the memory of its control group or of the machine is killed by the kernel without an explanation.
Under a limit (the soft limit RLIMIT_DATA, which counts all private writable memory, touched or not) the allocation that
exceeds it is refused. PyTorch or Python then raises at the place of the allocation, and the run can report what was
lacking. Linux only; elsewhere a limit has no effect.

I1: the hard limit is never changed, and a soft limit set by others is never raised.
I2: when the last limit is lifted, the soft limit is what it was before the first.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from lightning_ptm.memory.malloc import malloc_free_bytes

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

_REFUSED = (
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "could not create a memory",
    "could not create a primitive",
    "could not execute a primitive",
    "out of memory",
    "start new thread",
)
"""Texts of PyTorch, oneDNN, Python and C++ for a failed allocation that is no MemoryError; in lower case."""


_STACK_BYTES = 8 << 20
"""Bytes that glibc maps for the stack of a thread; it uses a few KiB of them."""

_SOFT_LIMIT_BEFORE: dict[int, int] = {}
"""By process, the soft limit before the first of the limits now in force."""
_IN_FORCE: set[MemoryLimit] = set()
"""The limits in force. A run that is set up again sets its limit before the previous one is lifted."""


class MemoryLimit:
    """A limit on the RAM that this process may still map. Of several in a process, the one set last counts."""

    def put(self, left_bytes: int, *, unused_page_bytes: int = 0) -> None:
        """Sets the limit: from now on this process may take `left_bytes` more than it has taken.

        Freed parts of the heap that were returned to the system stay mapped: allocations that use them again take RAM and
        map nothing, so the limit on mappings is lower by their size.

        Args:
            unused_page_bytes: bytes that this process has mapped outside the heap and not used yet, which are no freed
                parts of it.
        """
        mapped = _mapped_bytes()
        if resource is None or mapped is None:
            return
        mapped -= _returned_heap_bytes(unused_page_bytes)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if not _IN_FORCE:
            _SOFT_LIMIT_BEFORE[os.getpid()] = soft
        _IN_FORCE.add(self)
        limits = [each for each in (_SOFT_LIMIT_BEFORE.get(os.getpid(), soft), hard) if each != resource.RLIM_INFINITY]
        _set(min([mapped + max(left_bytes, 0), *limits]), hard)

    def left_bytes(self) -> int | None:
        """Returns how many more bytes this process may map; None if unlimited."""
        mapped = _mapped_bytes()
        if resource is None or mapped is None or self not in _IN_FORCE:
            return None
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return None if soft == resource.RLIM_INFINITY else max(0, soft - mapped)

    def lift(self) -> None:
        """Removes the limit. No effect if it is not in force."""
        if self not in _IN_FORCE:
            return
        _IN_FORCE.discard(self)
        before = None if _IN_FORCE else _SOFT_LIMIT_BEFORE.pop(os.getpid(), None)
        if before is not None:
            _set(before, resource.getrlimit(resource.RLIMIT_DATA)[1])

    def refused(self, error: BaseException) -> bool:
        """Whether an error comes from an allocation that the limit refused."""
        if self not in _IN_FORCE:
            return False
        text = str(error).lower().replace("primitive descriptor", "")  # there oneDNN lacks a kernel, and no memory
        return isinstance(error, MemoryError) or (
            isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _REFUSED)
        )


def freed_resident_bytes(unused_page_bytes: int = 0) -> int:
    """Returns the free bytes of the heap that still have RAM, which trimming it returns to the system; estimated.

    Args:
        unused_page_bytes: as in `MemoryLimit.put`.
    """
    return malloc_free_bytes() - _returned_heap_bytes(unused_page_bytes)


def wanted_bytes(error: BaseException) -> int | None:
    """Returns the bytes that a refused allocation of PyTorch asked for; None if the error does not say."""
    found = re.search(r"you tried to allocate (\d+) bytes", str(error))
    return None if found is None else int(found.group(1))


def _set(soft: int, hard: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # the hard limit was lowered meanwhile, which limits memory as well
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _mapped_bytes() -> int | None:
    """Returns the mapped bytes as RLIMIT_DATA counts them; None if the system does not report them."""
    status = _status()
    return status["VmData"] * 1024 if "VmData" in status else None


def _returned_heap_bytes(unused_page_bytes: int = 0) -> int:
    """Returns the bytes of the heap that are mapped, free and without RAM; estimated.

    No more than malloc's free bytes, some of which still have RAM; and no more than what is mapped without RAM, which
    stacks of threads and unused pages are as well.
    """
    status = _status()
    if not {"VmData", "RssAnon", "Threads"} <= status.keys():
        return 0
    stacks = (status["Threads"] - 1) * _STACK_BYTES
    without_ram = (status["VmData"] - status["RssAnon"]) * 1024 - stacks - unused_page_bytes
    return max(0, min(malloc_free_bytes(), without_ram))


def _status() -> dict[str, int]:
    """Returns the numbers of /proc/self/status by name, sizes in KiB; empty where the system does not report them."""
    numbers: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, *values = line.split()
            if values and values[0].isdigit():
                numbers[name.rstrip(":")] = int(values[0])
    return numbers
