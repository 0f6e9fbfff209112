"""The mesh of ranks: their coordinates along axes. Knows numbers of ranks only."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass


class Axis(enum.Enum):
    """Axis of the mesh, by what ranks along it do."""

    DATA = "data"
    """Each rank computes the same model on its own data."""
    EXPERT = "expert"
    """Each rank has its own data and its own experts."""
    TENSOR = "tensor"
    """All ranks compute the same model on the same data, and each has its own slices of parameters."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks by their coordinates along axes, the outermost axis first.

    Neighbouring ranks differ along the last axis.
    """

    sizes: Mapping[Axis, int]

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(self.sizes.values())

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Returns the coordinate of a rank along an axis."""
        sizes = list(self.sizes.values())
        inner = math.prod(sizes[list(self.sizes).index(axis) + 1 :])
        return rank // inner % self.sizes[axis]

    def groups(self, axes: Collection[Axis]) -> tuple[tuple[int, ...], ...]:
        """Returns all ranks, in groups that differ along `axes` alone; groups are in the order of their first ranks."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            others = tuple(self.coordinate(rank, axis) for axis in self.sizes if axis not in axes)
            found.setdefault(others, []).append(rank)
        return tuple(map(tuple, found.values()))
