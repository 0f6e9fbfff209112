"""Process groups along axes of the mesh, and the device mesh that shows them to users (`LightningModule.device_mesh`).

Owns the groups of the last run of this process: torch keeps process groups, with their connections and threads, until the
process ends, so the next run reuses them. Knows ranks, no module.

A module written for Lightning's ModelParallelStrategy finds its axes with any number of ranks; with one rank, a request for a
process group is an error that explains why.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_ptm.errors import UsageError
from lightning_ptm.planning.mesh import OTHER_LOSS, SAME_BATCH, Axis, Mesh

_DATA = "data_parallel"
_STAGE = "pipeline_parallel"
_TENSOR = "tensor_parallel"


class MeshGroups:
    """The process groups of this rank and those that differ from it along some axes alone. Collective.

    Args:
        mesh: axes and sizes.
        device: type of the device that computes.
    """

    def __init__(self, mesh: Mesh, device: str) -> None:
        self.made_for = (dist.group.WORLD, mesh, device)
        """What a run needs to reuse these groups."""
        self._mesh = mesh
        self._made: dict[frozenset[Axis], dist.ProcessGroup] = {}
        dimensions: dict[str, Collection[Axis]] = {_STAGE: (Axis.STAGE,)} if Axis.STAGE in mesh.axes else {}
        dimensions[_DATA] = [axis for axis in mesh.axes if not axis.same_batch]
        dimensions |= {axis.setting.removesuffix("_size"): (axis,) for axis in mesh.axes if axis.exchanges}
        dimensions.setdefault(_TENSOR, ())
        for axes in map(self._several, (*dimensions.values(), SAME_BATCH, OTHER_LOSS)):
            if axes not in self._made:
                self._made[axes] = self._group(axes)
        groups = [self.along(axes) for axes in dimensions.values()]
        ranks = torch.arange(mesh.world_size).view([group.size() for group in groups])
        self.device_mesh = DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(dimensions))

    def along(self, axes: Collection[Axis]) -> dist.ProcessGroup:
        """Returns the group of the ranks that differ from this one along these axes alone."""
        return self._made[self._several(axes)]

    def _several(self, axes: Collection[Axis]) -> frozenset[Axis]:
        return frozenset(axes).intersection(self._mesh.axes)

    def _group(self, axes: Collection[Axis]) -> dist.ProcessGroup:
        if not axes:
            # Each rank makes its own group of one, where `new_subgroups_by_enumeration` has all ranks make all of them.
            return dist.new_group([dist.get_rank()], use_local_synchronization=True)
        # Lightning's default group, of all ranks, stands for those with other losses (`RankGroups.counted`).
        if len(axes) == len(self._mesh.axes) and not any(axis.one_loss for axis in axes):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return dist.new_subgroups_by_enumeration([list(ranks) for ranks in self._mesh.groups(axes)])[0]


_last: MeshGroups | None = None


def last_groups(mesh: Mesh, device: str) -> MeshGroups | None:
    """The groups of an earlier run; None if that run had another mesh or other ranks, or has failed."""
    return _last if _last is not None and _last.made_for == (dist.group.WORLD, mesh, device) else None


def forget_groups() -> None:
    """Drops the last groups, since collectives on them may have failed."""
    global _last
    _last = None


def groups_of(mesh: Mesh, device: str) -> MeshGroups:
    """Makes new groups and keeps them as the last ones; collective."""
    global _last
    _last = MeshGroups(mesh, device)
    return _last


class MeshOfOne:
    """Device mesh of a single rank without process groups: of size 1 along each axis. Requests for a group raise UsageError.

    Args:
        mesh_dim_names: names of the axes.
    """

    def __init__(self, mesh_dim_names: tuple[str, ...] = (_DATA, _TENSOR)) -> None:
        self.mesh_dim_names = mesh_dim_names
        self.ndim = len(mesh_dim_names)
        self.shape = (1,) * self.ndim

    def __getitem__(self, names: str | tuple[str, ...]) -> MeshOfOne:
        chosen = (names,) if isinstance(names, str) else names
        if not set(chosen) <= set(self.mesh_dim_names):
            raise KeyError(f"device_mesh[{names!r}]: the mesh has only the axes {self.mesh_dim_names}")
        return MeshOfOne(chosen)

    def size(self, mesh_dim: int | None = None) -> int:
        return 1

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0

    def get_coordinate(self) -> tuple[int, ...]:
        return (0,) * self.ndim

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # as copy and pickle expect
        raise UsageError(
            f"this run has one rank, which has no process groups, and a device mesh of size 1 without {name}; ask "
            f"self.trainer.world_size first"
        )
