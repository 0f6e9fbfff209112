"""The mesh of ranks: axes of parallelism, and the coordinates of ranks along them.

Owns the table of axes (`Axis`), the division of the ranks among them, and that of a tensor group into a square or a cube
(`GridShape`); no other module divides or multiplies numbers of ranks. Knows numbers of ranks only; equal on all ranks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError


class Axis(enum.Enum):
    """Axis of the mesh, by what ranks along it do. The outermost is first: neighbouring ranks differ along the last.

    Attributes:
        setting: name of the setting of its size; empty: its size is what the other axes leave.
        same_batch: whether ranks along it compute the same batch.
        own_parameters: whether some parameters are on one rank along it alone.
        one_loss: whether ranks along it compute one loss, of whose gradients each has all or a summand; otherwise the
            run's loss is the mean of theirs.
        exchanges: whether ranks along it call the same layers in the same order, and exchange activations in them.
    """

    #         setting, same_batch, own_parameters, one_loss, exchanges
    STAGE = "pipeline_parallel_size", True, True, True, False
    """Each rank computes its own blocks of the model, for the same batch, and hands hidden states on (`Mesh.stage`)."""
    DATA = "", False, False, False, False
    """Each rank computes the same model on its own data."""
    EXPERT = "expert_parallel_size", False, True, False, False
    """Each rank has its own data and its own experts."""
    CONTEXT = "context_parallel_size", True, False, False, True
    """All ranks compute the same model, each on its own tokens of the same sequences."""
    TENSOR = "tensor_parallel_size", True, True, True, True
    """All ranks compute the same model on the same data, and each has its own slices of parameters."""

    def __init__(self, setting: str, same_batch: bool, own_parameters: bool, one_loss: bool, exchanges: bool) -> None:
        self.setting = setting
        self.same_batch = same_batch
        self.own_parameters = own_parameters
        self.one_loss = one_loss
        self.exchanges = exchanges


SAME_BATCH = tuple(axis for axis in Axis if axis.same_batch)
"""The axes along which ranks compute the same batch."""
OTHER_LOSS = tuple(axis for axis in Axis if not axis.one_loss)
"""The axes along which ranks compute different losses."""


def _stride(axis: enum.Enum, sizes: Mapping[Any, int]) -> int:
    """Returns the difference between neighbouring ranks along an axis; `sizes` has the outermost axis first."""
    axes = list(sizes)
    return math.prod(sizes[each] for each in axes[axes.index(axis) + 1 :])


def _groups(ranks: int, axes: Collection[enum.Enum], sizes: Mapping[Any, int]) -> tuple[tuple[int, ...], ...]:
    """Returns ranks in groups that differ along `axes` alone, in the order of their first ranks."""
    others = [(_stride(axis, sizes), size) for axis, size in sizes.items() if size > 1 and axis not in axes]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(ranks):
        found.setdefault(tuple([rank // stride % size for stride, size in others]), []).append(rank)
    return tuple(map(tuple, found.values()))


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks by their coordinates along axes.

    Args:
        sizes: number of ranks along axes; 1 along those that are not named.
    """

    sizes: Mapping[Axis, int]
    axes: tuple[Axis, ...] = field(init=False, compare=False)
    """The axes along which there are several ranks."""

    def __post_init__(self) -> None:
        sizes = {axis: self.sizes.get(axis, 1) for axis in Axis}
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "axes", tuple([axis for axis, size in sizes.items() if size > 1]))

    @classmethod
    def of(cls, world_size: int, sizes: Mapping[Axis, int]) -> Mesh:
        """Returns the mesh of `world_size` ranks with these sizes, and along DATA what they leave.

        Raises:
            ConfigError: the sizes do not divide the ranks.
        """
        taken = math.prod(sizes.values())
        if world_size % taken:
            settings = cls(sizes).settings(sizes)
            product = f" ({taken} ranks)" if taken not in sizes.values() else ""
            raise ConfigError(
                f"{settings}{product} does not divide the number of ranks, {world_size} (devices x num_nodes), "
                f"so the last group would lack ranks; use a multiple of {taken} ranks, or another size"
            )
        return cls({Axis.DATA: world_size // taken, **sizes})

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(self.sizes.values())

    def settings(self, axes: Collection[Axis]) -> str:
        """Returns the settings of these axes along which there are several ranks, in words."""
        return " x ".join(f"{axis.setting}={self.sizes[axis]}" for axis in self.axes if axis in axes)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Returns the coordinate of a rank along an axis."""
        return rank // _stride(axis, self.sizes) % self.sizes[axis]

    def stage(self, rank: int) -> int:
        """Returns the pipeline stage of a rank; stage 0 has the first blocks. Rank 0 is in the last stage, which computes
        the loss that loggers and callbacks of rank 0 show."""
        return self.sizes[Axis.STAGE] - 1 - self.coordinate(rank, Axis.STAGE)

    def groups(self, axes: Collection[Axis]) -> tuple[tuple[int, ...], ...]:
        """Returns all ranks, in groups that differ along `axes` alone; groups are in the order of their first ranks."""
        return _groups(self.world_size, axes, self.sizes)

    def index(self, rank: int, axes: Collection[Axis]) -> int:
        """Returns the index in `groups(axes)` of a rank's group."""
        return next(index for index, ranks in enumerate(self.groups(axes)) if rank in ranks)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """All ranks, in groups that compute the same batch."""
        return self.groups(SAME_BATCH)

    def replica(self, rank: int) -> int:
        """Returns the index in `replicas` of a rank's group."""
        return self.index(rank, SAME_BATCH)


class GridAxis(enum.Enum):
    """Axis of the square or cube into which grid modes divide a tensor group (`lightning_ptm.parallel.grid`)."""

    SAMPLES = "samples"
    """Ranks along it have other samples of the batch."""
    FEATURES = "features"
    """Ranks along it have other features of the residual stream."""
    INNER = "inner features"
    """Cubes only: ranks along it have other features between two linear layers, such as heads."""


@dataclass(frozen=True, slots=True)
class GridShape:
    """The ranks of a tensor group as a square, or as a cube; the outermost axis is first.

    Args:
        side: number of ranks along each axis.
        cube: whether there are three axes; otherwise two.
    """

    side: int
    cube: bool = False

    @property
    def axes(self) -> tuple[GridAxis, ...]:
        """The axes of the mesh."""
        return tuple(GridAxis) if self.cube else (GridAxis.SAMPLES, GridAxis.FEATURES)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.side ** len(self.axes)

    def coordinate(self, index: int, axis: GridAxis) -> int:
        """Returns the coordinate along an axis of the rank of this index in its tensor group."""
        return index // _stride(axis, dict.fromkeys(self.axes, self.side)) % self.side

    def groups(self, mesh: Mesh, axis: GridAxis) -> tuple[tuple[int, ...], ...]:
        """Returns all ranks, in groups that differ along an axis of their grid alone."""
        sizes = dict.fromkeys(self.axes, self.side)
        return tuple(
            tuple(ranks[index] for index in indices)
            for ranks in mesh.groups((Axis.TENSOR,))
            for indices in _groups(self.size, (axis,), sizes)
        )


def mesh_of(settings: Settings, world_size: int, parts: int | None = None) -> Mesh:
    """Returns the mesh of a run.

    Args:
        parts: number of slices of sliced parameters; None: that of the setting.

    Raises:
        ConfigError: the settings do not divide the ranks.
    """
    sizes = {axis: getattr(settings, axis.setting) for axis in Axis if axis.setting}
    return Mesh.of(world_size, sizes if parts is None else {**sizes, Axis.TENSOR: parts})
