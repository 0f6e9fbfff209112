"""Limits on the CPU cores that one thread's tensor arithmetic uses.

torch.set_num_threads holds for the process: called for a background thread, it would slow compute down. OpenMP keeps a
number for each thread, so this module calls the OpenMP library that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def use_cores(count: int) -> bool:
    """Limits the tensor arithmetic of the calling thread, and of no other, to `count` cores.

    Returns:
        False where PyTorch's OpenMP library is not found: the thread then uses as many cores as any other.
    """
    library = _openmp()
    if library is None:
        return False
    torch.get_num_threads()  # a thread's first use of PyTorch sets the number, and would set it again
    library.omp_set_num_threads(ctypes.c_int(count))
    return True


@contextmanager
def one_core() -> Iterator[None]:
    """Context in which the tensor arithmetic of the calling thread, and of no other, runs on one core; without effect
    where PyTorch's OpenMP library is not found (`use_cores`)."""
    before = torch.get_num_threads()
    use_cores(1)
    try:
        yield
    finally:
        use_cores(before)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b[^\s/]*\.so\S*)", mapped)))
    of_torch = [path for path in found if path.startswith(str(Path(torch.__file__).parent))]
    for path in of_torch or found:
        try:
            library = ctypes.CDLL(path)
            library.omp_set_num_threads  # noqa: B018  raises where there is none
        except (OSError, AttributeError):
            continue
        return library
    return None
