"""A ceiling over what this process may still take of RAM, at which an allocation fails instead of the process being killed.

Where a process takes more than its control group or the machine has, the kernel kills it, and nothing says why. With one
(the soft limit RLIMIT_DATA, which counts all private memory that can be written, touched or not) the allocation that would be
too much is refused, PyTorch or Python raises where it was asked for, and the run can say what was lacking. Linux; elsewhere a
ceiling has no effect.

I1: the hard limit stays, and a soft limit of others is never raised. I2: when the last ceiling is lifted, the soft limit is
what it was before the first.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

try:
    import resource
except ImportError:  # no Unix
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
"""What PyTorch, oneDNN, Python and the C++ library say in errors that are no MemoryError; in lower case."""


_THEIRS: dict[int, int] = {}
"""By process, the soft limit that there was before the first of the ceilings that are in force now."""
_IN_FORCE: set[int] = set()
"""By identity. A run that is laid out anew has its ceiling before the one before it has lifted its own."""


class MemoryLimit:
    """See the file's contract. Of several in a process the last one that was put counts."""

    def put(self, left_bytes: int) -> None:
        """From now on this process may map so many bytes more than it has mapped."""
        mapped = _mapped_bytes()
        if resource is None or mapped is None:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if not _IN_FORCE:
            _THEIRS[os.getpid()] = soft
        _IN_FORCE.add(id(self))
        limits = [each for each in (_THEIRS.get(os.getpid(), soft), hard) if each != resource.RLIM_INFINITY]
        _set(min([mapped + max(left_bytes, 0), *limits]), hard)

    def left_bytes(self) -> int | None:
        """How many bytes more this process may map; None: as many as it likes."""
        mapped = _mapped_bytes()
        if resource is None or mapped is None or id(self) not in _IN_FORCE:
            return None
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return None if soft == resource.RLIM_INFINITY else max(0, soft - mapped)

    def lift(self) -> None:
        """There is none any more."""
        if id(self) not in _IN_FORCE:
            return
        _IN_FORCE.discard(id(self))
        before = None if _IN_FORCE else _THEIRS.pop(os.getpid(), None)
        if before is not None:
            _set(before, resource.getrlimit(resource.RLIMIT_DATA)[1])

    def refused(self, error: BaseException) -> bool:
        """Whether an error is that of an allocation which a ceiling has refused."""
        if id(self) not in _IN_FORCE:
            return False
        text = str(error).lower().replace("primitive descriptor", "")  # there oneDNN lacks a kernel, and no memory
        return isinstance(error, MemoryError) or (
            isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _REFUSED)
        )


def wanted_bytes(error: BaseException) -> int | None:
    """How many bytes an allocation of PyTorch's asked for that was refused; None where the error does not say."""
    found = re.search(r"you tried to allocate (\d+) bytes", str(error))
    return None if found is None else int(found.group(1))


def _set(soft: int, hard: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # who else lowers the hard limit meanwhile has a ceiling of its own
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _mapped_bytes() -> int | None:
    """As RLIMIT_DATA counts them; None where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None
