"""Check that a model is not distributed already by torch (parallelize_module, fully_shard, DDP and FSDP wrappers)."""

from __future__ import annotations

import sys
from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_ptm.errors import ConfigError


def refuse_distributed(root: nn.Module) -> None:
    """Raises a ConfigError if `distributed_by_others` finds anything."""
    if (why := distributed_by_others(root)) is not None:
        raise ConfigError(why)


def distributed_by_others(root: nn.Module) -> str | None:
    """Returns an error text for the first DTensor or DDP/FSDP wrapper in a module, with the remedy; None without any."""
    for name, each in chain(root.named_parameters(), root.named_buffers()):
        if isinstance(each, DTensor):
            return (
                f"{name} is a DTensor: torch's parallelize_module, distribute_module or fully_shard has distributed it, and "
                f"AngelPTMStrategy shards whole parameters over ranks itself; leave out fully_shard, and in place of the "
                f"others set tensor_parallel_size and give the same layers as a plan of tensor_parallel (ColwiseParallel and "
                f"RowwiseParallel of lightning_ptm.parallel mean the same)"
            )
    wrappers: tuple[type[nn.Module], ...] = (DistributedDataParallel, DataParallel)
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:  # not imported means not used
        wrappers += (fsdp.FullyShardedDataParallel,)
    for name, module in root.named_modules():
        if isinstance(module, wrappers):
            return (
                f"{name} is a {type(module).__name__}, which exchanges parameters or gradients itself, and so does "
                f"AngelPTMStrategy; leave the wrapper out"
            )
    return None
