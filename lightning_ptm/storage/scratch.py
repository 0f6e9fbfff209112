"""Tensors that RAM need not hold: copies in a file without a name, which the system writes out and takes back as it likes.

Owns nothing for long: the file and its space go when the last of the tensors does, or the process.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from lightning_ptm.memory.disk import nameless

_SEGMENT_BYTES = 256 << 20
"""Of a mapping, at least: a process may have some tens of thousands of them, and a model as many tensors."""

_ALIGN_BYTES = 64


class Scratch:
    """See the file's contract.

    Args:
        folder: of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapping: mmap.mmap | None = None
        self._filled = 0

    def copy(self, value: Tensor) -> Tensor:
        """A contiguous copy on the CPU.

        Raises:
            OSError: the folder's disk has no room, or may not be written to.
        """
        size = value.numel() * value.itemsize
        if size == 0:
            return value.detach().cpu().clone()
        if self._mapping is None or self._filled + size > len(self._mapping):
            self._mapping, self._filled = _mapped(self._folder, max(size, _SEGMENT_BYTES)), 0
        into = torch.frombuffer(self._mapping, dtype=value.dtype, count=value.numel(), offset=self._filled)
        self._filled += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        result = into.view(value.shape)
        result.copy_(value.detach())
        # What was written is the file's now, not the process's; it is read again when it is saved.
        self._mapping.madvise(mmap.MADV_DONTNEED)
        return result


def _mapped(folder: Path, size_bytes: int) -> mmap.mmap:
    descriptor = nameless(folder)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)  # a disk that is too small is found now, not by SIGBUS
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
