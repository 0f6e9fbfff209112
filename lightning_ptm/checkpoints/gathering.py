"""Full state dicts of a run, gathered on rank 0: the module's and the optimizers', as a single device would have saved
them; and full weights of which RAM holds one flat at a time, on every rank (`stream_weights`).

State dicts are gathered unit by unit, and only rank 0 keeps them whole: in RAM, or if RAM is short in a memory-mapped file
on the disk tier (or in the Trainer's root folder). The file has no name; its space is freed with the last tensor in
it, or when the process ends. Functions with an engine argument are collective, except `copies`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.checkpoints.module_states import named_items
from lightning_ptm.checkpoints.optimizer_states import opened, plain_optimizer
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CheckpointError, UsageError
from lightning_ptm.memory.disk import nameless
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.machine.machine import free_host_bytes

_RAM_SHARE = 0.5
"""Share of the free RAM that a full checkpoint may take."""


def module_state(engine: Engine, module: LightningModule, *, keep: bool) -> dict[str, Any]:
    """Returns the module's state dict with precise, full weights; empty unless `keep` (on ranks other than 0)."""
    engine.drain("state dict")
    engine.executor.release_all()
    values: dict[int, Tensor] = {}
    copy_of = copies(engine)
    for name, parameter, value in engine.values.parameters():
        if keep:
            values[id(parameter)] = copy_of(name, value)
    if not keep:
        return {}
    # The module's own state_dict knows all names (tied weights, buffers, extra state, overrides), its hooks may change
    # values, and it adds the modules' versions, which `load_state_dict` reads.
    with engine.gathered_parameters.substituted(values):
        return module.state_dict()


def stream_weights(engine: Engine, module: LightningModule, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, value) of each weight of the module; see `AngelPTMStrategy.stream_weights`."""
    if any(binding.summoned for binding in engine.gathered_flats.bindings):
        raise UsageError(
            "weights cannot be streamed inside of `with strategy.gathered(module):`, whose edits are in pages only after "
            "the block; stream them after it"
        )
    engine.values.check_known()
    engine.drain("stream_weights")
    engine.executor.release_all()
    with engine.gathered_parameters.substituted(None):
        named = named_items(module)
    names = {id(item): name for name, item in reversed(named.items())}  # of tied weights the first
    begun = engine.executor.occasions

    def as_wanted(value: Tensor) -> Tensor:
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)

    for name, parameter, value in engine.values.parameters():
        yield names.get(id(parameter), name), as_wanted(value.detach())
        del value
        if engine.executor.occasions != begun:
            raise UsageError(
                f"the module computed while its weights were streamed, after {names.get(id(parameter), name)}, so that the "
                "rest could be of a later step; take all of `stream_weights()` before the next step"
            )
    for name, item in named.items():
        if isinstance(item, Tensor) and not isinstance(item, torch.nn.Parameter):
            yield name, as_wanted(item.detach().cpu())


def optimizer_state(engine: Engine, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """Returns the optimizer's state dict with full state tensors; empty unless `keep`."""
    engine.drain("optimizer state")
    engine.executor.release_all()
    optimizer = plain_optimizer(optimizer)
    index = engine.updates.groups.index_of(optimizer)
    order = {id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states: dict[int, dict[str, Any]] = {}
    copy_of = copies(engine)
    for parameter, state in engine.optimizer_values.states(index, copy_of if keep else lambda name, value: value):
        if keep and id(parameter) in order:  # else it was removed from the optimizer's groups
            states[order[id(parameter)]] = state
    if not keep:
        return {}
    with opened(optimizer):
        result = optimizer.state_dict()
    if engine.stepping.steps_itself(optimizer) or not order:  # or it is Lightning's mock optimizer
        return result
    # States that the optimizer itself holds are those of parameters that this run does not train.
    states = result["state"] | states
    result["state"] = {place: states[place] for place in sorted(states) if states[place]}
    return result


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
