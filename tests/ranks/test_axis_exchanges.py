"""Exchanges of activations along several axes: values by axis, in one order with gathers that one rank asks for alone."""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from torch import Tensor

from lightning_ptm.comm import NeededCollective, ProcessGroupCommunicator, RankTeams
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.errors import RankError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange
from lightning_ptm.runtime.ranks.barriers import Barriers
from lightning_ptm.terms import Operation
from lightning_ptm.trainer.device_mesh import MeshGroups

DATA, CONTEXT, TENSOR = Axis.DATA, Axis.CONTEXT, Axis.TENSOR
MESHES = [{CONTEXT: 2}, {DATA: 2, CONTEXT: 2}, {CONTEXT: 2, TENSOR: 2}, {CONTEXT: 4}]
KINDS = ["sum", "gather", "sum_of_piece", "swap", "shift"]


@dataclasses.dataclass(frozen=True)
class Occasion:
    """A point from which a rank may ask for a gather."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    axis: Axis
    kind: str
    numel: int


class Ranks:
    """One rank of a mesh, connected as in a run, with units that any rank may gather at an occasion."""

    def __init__(self, sizes: dict[Axis, int], *, near: bool) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        self.mesh, backend = Mesh(sizes), CpuBackend()
        self.world = ProcessGroupCommunicator(backend, datetime.timedelta(seconds=60))
        self.barriers = Barriers(self.world, self.take_part, RankTeams())
        self.occasions = 0
        self.gathered = 0
        made = MeshGroups(self.mesh, "cpu")
        axes = [axis for axis in self.mesh.axes if axis.exchanges]
        self.groups = {axis: RankGroup(made.along((axis,)), backend, axis) for axis in axes}
        apart = {axis: self.world.subgroup(self.mesh.groups((axis,)), exchanging=near) for axis in axes}
        run = ActivationExchange(apart, self.mesh.index(self.world.rank, axes), self.barriers, self)
        self.barriers.compare(self.mesh.groups(axes), (), run.done)
        for group in self.groups.values():
            group.connect(run)

    def take_part(self, decision: Decision) -> None:
        self.gathered += 1
        assert self.world.all_reduce(torch.ones(1)).item() == self.world.world_size

    def occasion(self, unit: int | None) -> None:
        self.occasions += 1
        if unit is not None:
            self.take_part(self.barriers.agreement.request(NeededCollective(Operation.GATHER, unit)))

    def exchange(self, number: int, what: Exchange) -> Tensor:
        """Exchanges values of which each rank has its own; they are compared with those of all ranks."""
        ranks = next(ranks for ranks in self.mesh.groups((what.axis,)) if self.world.rank in ranks)
        group = self.groups[what.axis]
        given = [self.value(number, rank, what, len(ranks)) for rank in ranks]
        here = ranks.index(self.world.rank)
        found: Tensor = getattr(group, what.kind)(given[here])
        expected = {
            "sum": lambda: sum(given),
            "gather": lambda: torch.stack(given),
            "sum_of_piece": lambda: sum(each[here] for each in given),
            "swap": lambda: torch.stack([each[here] for each in given]),
            "shift": lambda: given[here - 1],
        }[what.kind]()
        assert torch.equal(found, expected), (what, found, expected)
        return found

    def value(self, number: int, rank: int, what: Exchange, size: int) -> Tensor:
        shape = (size, what.numel) if what.kind in ("swap", "sum_of_piece") else (2, what.numel)
        generator = torch.Generator().manual_seed(1000 * number + rank)
        values = torch.randint(-99, 99, shape, generator=generator).to(torch.float32)
        return values.t().contiguous().t()  # in another order in memory than in its shape


def schedule(mesh: Mesh, replica: int, seed: int) -> Iterator[Occasion | Exchange]:
    """What the ranks of a replica do; other replicas do something else."""
    draw = random.Random(f"{seed} {replica}")
    axes = [axis for axis in mesh.axes if axis.exchanges]
    for _ in range(20):
        for _ in range(draw.randrange(3)):
            yield Occasion()
        for _ in range(draw.randrange(4)):
            yield Exchange(
                draw.choice(axes), draw.choice(KINDS), draw.choice([0, 1, 7]) if draw.random() < 0.95 else 300_000
            )


def perform(ranks: Ranks, seed: int, raises_at: int = -1) -> None:
    """Runs a schedule, at whose occasions each rank asks for units by itself.

    Args:
        raises_at: number of the step at which this rank raises; -1: none.
    """
    alone = random.Random(f"{seed} of rank {ranks.world.rank}")
    for number, what in enumerate(schedule(ranks.mesh, ranks.mesh.replica(ranks.world.rank), seed)):
        if number == raises_at:
            raise ValueError(f"rank {ranks.world.rank} stops at step {number}")
        if isinstance(what, Occasion):
            ranks.occasion(alone.randrange(5) if alone.random() < 0.4 else None)
        else:
            ranks.exchange(number, what)
    ranks.barriers.reach(seed)


def named(sizes: object) -> str:
    return " x ".join(f"{axis.name}={size}" for axis, size in sizes.items()) if isinstance(sizes, dict) else str(sizes)


def values_of(sizes: dict[Axis, int], near: bool) -> int:
    ranks = Ranks(sizes, near=near)
    for seed in range(2):
        perform(ranks, seed)
    ranks.world.close()
    return ranks.gathered


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("sizes", MESHES, ids=named)
def test_each_rank_gets_the_values_of_its_axis(sizes: dict[Axis, int], near: bool) -> None:
    gathered = run_ranks(values_of, Mesh(sizes).world_size, sizes, near, limit_s=120)
    assert len(set(gathered)) == 1 and gathered[0] > 5  # all take part in what one asks for


def errors_of(sizes: dict[Axis, int], near: bool) -> list[str]:
    """What each of some schedules ends with, where a rank raises somewhere."""
    found = []
    for seed in range(8):
        ranks = Ranks(sizes, near=near)
        draw = random.Random(seed)
        who, at = draw.randrange(ranks.mesh.world_size), draw.randrange(20)
        try:
            perform(ranks, seed, at if ranks.world.rank == who else -1)
        except (RankError, ValueError) as error:
            ranks.barriers.fail(str(error))
            found.append(str(error))
        ranks.world.close()
        dist.barrier()
    return found


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("sizes", [{CONTEXT: 2}, {CONTEXT: 2, TENSOR: 2}], ids=named)
def test_an_error_of_one_rank_ends_all_with_its_reason(sizes: dict[Axis, int], near: bool) -> None:
    by_rank = run_ranks(errors_of, Mesh(sizes).world_size, sizes, near, limit_s=120)
    for told in zip(*by_rank, strict=True):
        (reason,) = {each for each in told if each.startswith("rank") and each.split(" ")[2] == "stops"}
        assert all(reason in each for each in told), told


def different(sizes: dict[Axis, int], near: bool) -> str:
    ranks: Any = Ranks(sizes, near=near)
    ranks.exchange(0, Exchange(CONTEXT, "sum", 3))
    ranks.occasion(None)
    axis = TENSOR if TENSOR in sizes else CONTEXT
    last = ranks.world.rank == ranks.world.world_size - 1
    with pytest.raises(RankError) as caught:
        ranks.exchange(1, Exchange(CONTEXT if last else axis, "shift" if last else "swap", 3))
    ranks.world.close()
    return str(caught.value)


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("sizes", [{CONTEXT: 2}, {CONTEXT: 2, TENSOR: 2}], ids=named)
def test_ranks_that_come_to_different_exchanges_are_named(sizes: dict[Axis, int], near: bool) -> None:
    count = Mesh(sizes).world_size
    for told in run_ranks(different, count, sizes, near, limit_s=120):
        assert (
            f"rank 0 has come to the swap of no layer (forward, (2, 3), torch.float32) where rank {count - 1} has"
            in told
        )
        assert "come to the shift of no layer" in told and "call the same layers in the same order" in told
