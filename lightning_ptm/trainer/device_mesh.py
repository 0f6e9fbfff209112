"""The device mesh of a run (`LightningModule.device_mesh`). Knows ranks and process groups, no module.

Owns the mesh of the last run of this process: torch keeps process groups, with their connections and threads, until the
process ends, so the next run reuses them.

A module written for Lightning's ModelParallelStrategy finds its axes with any number of ranks; with one rank, a request for a
process group is an error that explains why.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_ptm.errors import UsageError

_AXES = ("data_parallel", "tensor_parallel")


_last: tuple[Any, DeviceMesh] | None = None
"""(what the mesh was made for, the mesh)."""


def last_mesh(world_size: int, tensor_size: int, device: str) -> DeviceMesh | None:
    """The mesh of an earlier run; None if that run had other sizes or ranks, or has failed."""
    if _last is None or _last[0] != (torch.distributed.group.WORLD, world_size, tensor_size, device):
        return None
    return _last[1]


def forget_mesh() -> None:
    """Drops the last mesh, since collectives on its groups may have failed."""
    global _last
    _last = None


def mesh_of(world_size: int, tensor_size: int, device: str) -> DeviceMesh:
    """Makes a new mesh and keeps it as the last one; collective."""
    global _last
    mesh = _made(world_size, tensor_size, device)
    _last = (torch.distributed.group.WORLD, world_size, tensor_size, device), mesh
    return mesh


def _made(world_size: int, tensor_size: int, device: str) -> DeviceMesh:
    """A mesh of all ranks, in which `tensor_size` consecutive ranks have slices of the same layers; collective."""
    if tensor_size > 1:
        return init_device_mesh(device, (world_size // tensor_size, tensor_size), mesh_dim_names=_AXES)
    # Each rank makes its own group of one; init_device_mesh would have all ranks make all these groups in sequence.
    alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    groups = [torch.distributed.group.WORLD, alone]
    ranks = torch.arange(world_size).view(-1, 1)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=_AXES)


class MeshOfOne:
    """Device mesh of a single rank without process groups: of size 1 along each axis. Requests for a group raise UsageError.

    Args:
        mesh_dim_names: names of the axes.
    """

    def __init__(self, mesh_dim_names: tuple[str, ...] = _AXES) -> None:
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
