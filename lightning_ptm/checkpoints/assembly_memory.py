"""Where a full checkpoint is put together: in RAM, or, where that is short, in a file beside the disk tier or in the
Trainer's root folder.

Owns nothing for long: the file and its space go when the last of the tensors in it does, or the process.
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
"""Of the free RAM, what a full checkpoint may take while it is put together."""


def copies(engine: Engine) -> Callable[[str, Tensor], Tensor]:
    """How a checkpoint's tensors are copied: into RAM, if a good part of it stays free then. Knows this rank alone.

    Raises (what it returns):
        CheckpointError: the disk beside RAM has no room for them.
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
                    f"a full checkpoint takes {format_bytes(needed)}, more than half of the free RAM, and is put together "
                    f"there all the same, since {folder} has no room for it ({error.strerror or error})"
                )
                return value.clone()
            raise CheckpointError(
                f"a full checkpoint takes {format_bytes(needed)}, which is more than RAM should hold, and there is no room "
                f"to put it together in {folder}, at {name}: {error.strerror or error}; use "
                f"checkpoints=Checkpoints(state_dict_type='sharded'), "
                f"which needs no such room, or free some there"
            ) from error
        return value.clone()

    return copy_of


_SEGMENT_BYTES = 256 << 20
"""Of a mapping, at least: a process may have some tens of thousands of them, and a model as many tensors."""

_ALIGN_BYTES = 64


class Scratch:
    """Tensors that RAM need not hold: copies in a file of `folder` without a name, which the system writes out and takes back
    as it likes."""

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
