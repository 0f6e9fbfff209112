"""Where a full checkpoint is put together: in RAM, or, where that is short, in a file beside the disk tier."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CheckpointError
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.machine import free_host_bytes
from lightning_ptm.storage.scratch import Scratch

_RAM_SHARE = 0.5
"""Of the free RAM, what a full checkpoint may take while it is put together."""


def copies(engine: Engine) -> Callable[[str, Tensor], Tensor]:
    """How a checkpoint's tensors are copied: into RAM, if a good part of it stays free then. Knows this rank alone.

    Raises (what it returns):
        CheckpointError: the disk beside RAM has no room for them.
    """
    states_bytes = engine.optimizer_state_bytes(on_disk=False) + engine.optimizer_state_bytes(on_disk=True)
    needed = engine.precise_bytes(with_other_parts=True) + states_bytes
    if not engine.disk_paths or needed <= free_host_bytes() * _RAM_SHARE:
        return lambda name, value: value.clone()
    folder = engine.disk_paths[0]
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
                f"to put it together in {folder}, at {name}: {error.strerror or error}; use state_dict_type='sharded', "
                f"which needs no such room, or free some there"
            ) from error
        return value.clone()

    return copy_of
