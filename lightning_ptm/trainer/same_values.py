"""The first values of a module that ranks are about to divide: of ranks that made other modules (of other random numbers, or
from a file on one rank alone) the parts would be of several wholes.

Owns nothing. Pages take the values of the first rank that has a part (runtime/values.py, I1), so it is enough that the ranks
of a tensor group have the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lightning_ptm.memory.backend import Backend
from lightning_ptm.runtime.closed import ClosedParameter
from lightning_ptm.trainer.same_batches import digest


def take_first_rank_s_values(module: nn.Module, group: ProcessGroup, backend: Backend) -> None:
    """Gives the parameters of which ranks have other values those of the first rank, in place. Parameters without values stay
    as they are. Collective in the group; a pass over the bytes of all, and an exchange of those that differ."""
    parameters = list(module.parameters())
    ours = [0 if each.is_meta or isinstance(each, ClosedParameter) else digest(each) for each in parameters]
    told: list[list[int]] = [[] for _ in range(group.size())]
    dist.all_gather_object(told, ours, group=group)
    if any(len(each) != len(ours) for each in told):
        return  # other modules altogether, which ranks find when they compare what they are to train
    for parameter, *digests in zip(parameters, *told, strict=True):
        if len(set(digests)) > 1 and all(digests):
            with torch.no_grad():
                value = parameter.detach().to(backend.device).contiguous()
                dist.broadcast(value, group=group, group_src=0)
                parameter.copy_(value)
