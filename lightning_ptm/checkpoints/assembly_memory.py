"""Memory in which a full checkpoint is assembled: RAM, or a memory-mapped file on the disk tier (or in the Trainer's
root folder) if RAM is short.

The file has no name; its space is freed with the last tensor in it, or when the process ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CheckpointError
from lightning_ptm.memory.disk import nameless
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.machine.machine import free_host_bytes

_RAM_SHARE = 0.5
"""Share of the free RAM that a full checkpoint may take."""


def copies(engine: Engine) -> Callable[[str, Tensor], Tensor]:
    """Returns the function that copies a checkpoint's tensors: into RAM if it stays half free, else into a file.
    Decided by each rank for itself.

    Raises (the returned function):
        CheckpointError: neither RAM nor the disk has room for them.
    """
    states_bytes = engine.optimizer_state_bytes(on_disk=False) + engine.optimizer_state_bytes(on_disk=True)
    needed = engine.precise_bytes(with_other_parts=True) + states_bytes
    if not engine.folders or needed <= free_host_bytes() * _RAM_SHARE:
        return lambda name, value: value.clone()
    folder = engine.folders[0]
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Scratch(folder)

    in_ram = False

    def copy_of(name: str, value: Tensor) -> Tensor:
        nonlocal in_ram
        try:
            if not in_ram:
                return scratch.copy(value)
        except OSError as error:
            if needed <= free_host_bytes():
                in_ram = True
                rank_zero_warn(
                    f"a full checkpoint takes {format_bytes(needed)}, more than half of the free RAM, and is "
                    f"assembled in RAM all the same, since {folder} has no room for it ({error.strerror or error})"
                )
                return value.clone()
            raise CheckpointError(
                f"a full checkpoint takes {format_bytes(needed)}, more than the free RAM, and {folder}, where it was "
                f"to be assembled, has no room for {name}: {error.strerror or error}; use "
                f"checkpoints=Checkpoints(state_dict_type='sharded'), "
                "which needs no such room, or free space there"
            ) from error
        return value.clone()

    return copy_of


_SEGMENT_BYTES = 256 << 20
"""Minimum size of a mapping: a process may have some ten thousand mappings, and a model may have as many tensors."""

_ALIGN_BYTES = 64


class Scratch:
    """Copies of tensors in an unnamed file of `folder`, whose pages the operating system writes out and reads back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapping: mmap.mmap | None = None
        self._filled = 0

    def copy(self, value: Tensor) -> Tensor:
        """Returns a contiguous copy on the CPU.

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
        # The pages are dirty in the page cache, not in the process; they are read again when the checkpoint is saved.
        self._mapping.madvise(mmap.MADV_DONTNEED)
        return result


def _mapped(folder: Path, size_bytes: int) -> mmap.mmap:
    descriptor = nameless(folder)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)  # a disk that is too small is found now, not by SIGBUS
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
