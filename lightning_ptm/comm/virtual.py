"""The communicator of a rank whose other ranks do not exist: collectives move nothing and end at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_ptm.comm.communicator import Communicator, SoloCommunicator
from lightning_ptm.comm.work import Work
from lightning_ptm.planning.layout import FlatLayout


class VirtualCommunicator(SoloCommunicator):
    """Communicator of rank `rank` among `world_size` ranks, for tensors without values (memory/virtual_backend.py).

    All ranks are assumed to do alike: what one reduces or asks for, all do.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.alone = world_size == 1

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Communicator:
        ranks = next(ranks for ranks in partition if self.rank in ranks)
        return VirtualCommunicator(ranks.index(self.rank), len(ranks))

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        return Work(buffers=(shard, full))

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        return Work(buffers=(full, shard))
