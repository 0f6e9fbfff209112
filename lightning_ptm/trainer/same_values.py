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

from lightning_ptm.errors import RankError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.runtime.closed import ClosedParameter
from lightning_ptm.trainer.same_batches import digest


def take_first_rank_s_values(module: nn.Module, group: ProcessGroup, backend: Backend) -> None:
    """Gives the parameters of which ranks have other values those of the first rank, in place. Parameters without values stay
    as they are. Collective in the group; a pass over the bytes of all, and an exchange of those that differ.

    Raises:
        RankError: another rank has not come, such as one whose `configure_optimizers` has failed.
    """
    parameters = list(module.parameters())
    ours = [0 if each.is_meta or isinstance(each, ClosedParameter) else digest(each) for each in parameters]
    told: list[list[int]] = [[] for _ in range(group.size())]
    try:
        dist.all_gather_object(told, ours, group=group)
    except RuntimeError as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankError(
            f"another rank of the tensor group of rank {dist.get_rank()} has failed, or hangs, while the run was set up "
            f"({first_line}); look for the first error among the ranks' logs"
        ) from error
    if any(len(each) != len(ours) for each in told):
        return  # other modules altogether, which ranks find when they compare what they are to train
    for parameter, *digests in zip(parameters, *told, strict=True):
        if len(set(digests)) > 1 and all(digests):
            with torch.no_grad():
                value = parameter.detach().to(backend.device).contiguous()
                dist.broadcast(value, group=group, group_src=0)
                parameter.copy_(value)


__all__ = ["take_first_rank_s_values"]
