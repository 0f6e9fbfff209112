"""What `LightningModule.device_mesh` is in a run. Knows ranks and process groups, no module.

Owns the mesh of the last run of this process: torch keeps groups, with their connections and threads, until the process ends,
so the next run has them, too.

A module that asks for the axes of Lightning's ModelParallelStrategy gets them however many ranks there are, or hears why not.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_ptm.errors import UsageError

_AXES = ("data_parallel", "tensor_parallel")


_last: tuple[Any, DeviceMesh] | None = None
"""What it is made of, and the mesh."""


def last_mesh(world_size: int, tensor_size: int, device: str) -> DeviceMesh | None:
    """That of a run before this one; None where that was another one, or has failed."""
    if _last is None or _last[0] != (torch.distributed.group.WORLD, world_size, tensor_size, device):
        return None
    return _last[1]


def forget_mesh() -> None:
    """Collectives on its groups have failed, maybe."""
    global _last
    _last = None


def mesh_of(world_size: int, tensor_size: int, device: str) -> DeviceMesh:
    """A new one, which is kept. See `_made`; collective."""
    global _last
    mesh = _made(world_size, tensor_size, device)
    _last = (torch.distributed.group.WORLD, world_size, tensor_size, device), mesh
    return mesh


def _made(world_size: int, tensor_size: int, device: str) -> DeviceMesh:
    """Of all ranks, `tensor_size` neighbours with parts of the same layers; collective."""
    if tensor_size > 1:
        return init_device_mesh(device, (world_size // tensor_size, tensor_size), mesh_dim_names=_AXES)
    # Each rank makes its own group alone; init_device_mesh would have all ranks make those of all, one after the other.
    alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    groups = [torch.distributed.group.WORLD, alone]
    ranks = torch.arange(world_size).view(-1, 1)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=_AXES)


class MeshOfOne:
    """One rank's, which has no process groups: of size 1 along each axis. What needs a group is a UsageError.

    Args:
        mesh_dim_names: its axes.
    """

    def __init__(self, mesh_dim_names: tuple[str, ...] = _AXES) -> None:
        self.mesh_dim_names = mesh_dim_names
        self.ndim = len(mesh_dim_names)
        self.shape = (1,) * self.ndim

    def __getitem__(self, names: str | tuple[str, ...]) -> MeshOfOne:
        chosen = (names,) if isinstance(names, str) else names
        if not set(chosen) <= set(self.mesh_dim_names):
            raise KeyError(f"a device mesh with the axes {self.mesh_dim_names} was asked for {names!r}")
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
            raise AttributeError(name)  # as copying and pickling look for
        raise UsageError(
            f"this run has one rank, which has no process groups, and a device mesh of size 1 without {name}; ask "
            f"self.trainer.world_size first"
        )
