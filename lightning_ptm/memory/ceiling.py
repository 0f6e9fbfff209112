"""A ceiling over what this process may still take of RAM, at which an allocation fails instead of the process being killed.

Where a process takes more than its control group or the machine has, the kernel kills it, and nothing says why. With one
(the soft limit RLIMIT_DATA, which counts all private memory that can be written, touched or not) the allocation that would be
too much is refused, PyTorch or Python raises where it was asked for, and the run can say what was lacking. Linux; elsewhere a
ceiling has no effect.

I1: the hard limit stays, and a soft limit that somebody has set is never raised. I2: `lift` puts the soft limit back.
"""

from __future__ import annotations

import contextlib
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
    "out of memory",
    "start new thread",
)
"""What PyTorch, oneDNN, Python and the C++ library say in errors that are no MemoryError; in lower case."""


class Ceiling:
    """See the file's contract. One at a time in a process."""

    def __init__(self) -> None:
        self._before: int | None = None
        """The soft limit that there was; None while there is no ceiling of ours."""

    def put(self, left_bytes: int) -> None:
        """From now on this process may map so many bytes more than it has mapped."""
        mapped = _mapped_bytes()
        if resource is None or mapped is None:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if self._before is None:
            self._before = soft
        limits = [each for each in (self._before, hard) if each != resource.RLIM_INFINITY]
        _set(min([mapped + max(left_bytes, 0), *limits]), hard)

    def lift(self) -> None:
        """There is none any more."""
        before, self._before = self._before, None
        if before is not None:
            _set(before, resource.getrlimit(resource.RLIMIT_DATA)[1])

    def refused(self, error: BaseException) -> bool:
        """Whether an error is that of an allocation which a ceiling has refused."""
        if self._before is None:
            return False
        text = str(error).lower()
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
