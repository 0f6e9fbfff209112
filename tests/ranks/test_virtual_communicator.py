"""The communicator of a rank whose other ranks do not exist."""

from __future__ import annotations

import torch
from planning.models import PAGE, even_layout

from lightning_ptm.comm.virtual import VirtualCommunicator


def test_groups_are_those_of_the_rank() -> None:
    world = VirtualCommunicator(5, 8)
    group = world.subgroup([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert (group.rank, group.world_size, group.alone) == (1, 4, False)
    assert VirtualCommunicator(1, 4).subgroup([[0], [1], [2], [3]]).alone


def test_collectives_of_tensors_without_values_end_at_once() -> None:
    (flat,) = even_layout([8], world_size=4).flats
    full = torch.empty(flat.padded_numel, device="meta")
    shard = torch.empty(flat.shard_numel, device="meta")
    ranks = VirtualCommunicator(0, 4)
    assert flat.shard_numel * 4 == flat.padded_numel == 8 * PAGE // flat.itemsize
    for work in (ranks.all_gather(shard, full, flat), ranks.reduce_scatter(full, shard, flat, 4.0)):
        assert work.done()
        work.wait()
