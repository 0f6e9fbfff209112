"""Communicators by the axes of a mesh: who is among whom, and where nobody else is."""

from __future__ import annotations

import datetime

import pytest
import torch.distributed as dist
from kit.ranks.harness import run_ranks

from lightning_ptm.comm import Communicators, ProcessGroupCommunicator, SoloCommunicator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.mesh import Axis, Mesh

DATA, EXPERT = Axis.DATA, Axis.EXPERT


def test_one_rank_is_alone_along_all_axes() -> None:
    solo = SoloCommunicator()
    made = Communicators(Mesh({DATA: 1, EXPERT: 1}), solo)
    assert made.world is made.along((DATA, EXPERT)) is made.along((DATA,)) is made.along((EXPERT,)) is solo


def among_whom(data: int, expert: int) -> dict[str, list[int]]:
    """By axes, the ranks that one hears of."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    everybody = ProcessGroupCommunicator(CpuBackend(), datetime.timedelta(seconds=60))
    made = Communicators(Mesh({DATA: data, EXPERT: expert}), everybody)
    groups_made = len(everybody.group_names)
    assert made.along((EXPERT, DATA)) is made.world is everybody
    found = {}
    for axes in ((DATA,), (EXPERT,)):
        along = made.along(axes)
        rows = along.exchange((everybody.rank, along.rank, 0))
        assert [place for _, place, _ in rows] == list(range(along.world_size))
        assert (along.world_size == 1) == isinstance(along, SoloCommunicator)
        found[axes[0].name] = [rank for rank, _, _ in rows]
    assert (len(everybody.group_names), groups_made) == (groups_made, 2 if 1 in (data, expert) else 6)
    everybody.close()
    return found


@pytest.mark.parametrize(("data", "expert"), [(2, 1), (1, 2), (2, 2)])
def test_who_is_among_whom(data: int, expert: int) -> None:
    for rank, found in enumerate(run_ranks(among_whom, data * expert, data, expert)):
        first, place = rank - rank % expert, rank % expert
        assert found == {
            "DATA": list(range(place, data * expert, expert)),
            "EXPERT": list(range(first, first + expert)),
        }
