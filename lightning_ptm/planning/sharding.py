"""Who owns what: every element of the model has exactly one owner in the world.

Owns the ranks' places along the axes of a mesh, and for each unit its sharing class: which ranks share it, and by what the
sum of their gradients is divided. Knows numbers of ranks and units, never tensors; equal on all ranks. A provider makes the
table: `shared_by_all` where all ranks share all units, `experts.divided` where they divide experts; either with parameters in
parts or without.

I1: the ranks of a unit's class divide its elements among them (`layout.FlatLayout.owner`); no other rank has any.
I2: a class is shared along axes, so the ranks that differ along the others hold other units of its kind in the same way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ptm.planning.layout import FlatLayout


class Axis(enum.Enum):
    """What ranks do along an axis."""

    DATA = "data"
    """Each computes the same on data of its own."""
    EXPERT = "expert"
    """They do so, too, and each has other experts."""
    TENSOR = "tensor"
    """They compute the same on the same data, and each has other parts of parameters."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks by their coordinates along axes, the outermost first: along the last one neighbours differ."""

    sizes: Mapping[Axis, int]

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes.values())

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Where along an axis a rank is."""
        sizes = list(self.sizes.values())
        inner = math.prod(sizes[list(self.sizes).index(axis) + 1 :])
        return rank // inner % self.sizes[axis]

    def groups(self, axes: Collection[Axis]) -> tuple[tuple[int, ...], ...]:
        """All ranks, in groups of those that differ along these axes alone; the groups in the order of their first ranks."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            elsewhere = tuple(self.coordinate(rank, axis) for axis in self.sizes if axis not in axes)
            found.setdefault(elsewhere, []).append(rank)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """A sharing class.

    Attributes:
        axes: the ranks that share differ along these alone.
        ranks: they, in the order of their pieces.
        losses: of so many ranks' losses a gradient is the mean: of more than share it, where some gave theirs to others.
        scaled_by: what gradients are over before they are added up; their mean is not.
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]
    losses: int
    scaled_by: int = 1

    @property
    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by."""
        return self.losses / self.scaled_by

    @property
    def alone(self) -> bool:
        """Whether a rank's gradient is that of the run: no other rank has a part of it."""
        return self.losses == len(self.ranks) == 1


@dataclass(frozen=True, slots=True)
class UnitShardGroup:
    """The sharing classes of a unit's flats.

    Attributes:
        whole: of parameters that a rank has whole; its ranks are those that hold the unit.
        parts: of parameters that are parts of larger ones; its ranks are those with the first parts.
        partial: of whole parameters whose gradients on the ranks of a tensor group, which have the same data, are parts of a
            sum.
    """

    whole: ShardGroup
    parts: ShardGroup
    partial: ShardGroup


def sharing_along(mesh: Mesh, axes: Collection[Axis], scaled_by: int = 1) -> tuple[UnitShardGroup, ...]:
    """The classes of a unit that ranks share which differ along these axes alone: one for each group of such ranks.

    Whoever holds it, its gradients are of all ranks' losses. Those of a tensor group are one loss: a whole gradient counts
    for each rank of the group, a part, and a part of a sum, once for the group.
    """
    axes = tuple(axis for axis in mesh.sizes if axis in axes)
    alike = tuple(axis for axis in axes if axis is not Axis.TENSOR)
    first_parts = {ranks[0]: ranks for ranks in mesh.groups(alike)}
    all_losses, losses = mesh.world_size, mesh.world_size // mesh.sizes.get(Axis.TENSOR, 1)
    return tuple(
        UnitShardGroup(
            ShardGroup(axes, ranks, all_losses, scaled_by),
            ShardGroup(alike, first_parts[ranks[0]], losses, scaled_by),
            ShardGroup(axes, ranks, losses, scaled_by),
        )
        for ranks in mesh.groups(axes)
    )


@dataclass(frozen=True, slots=True)
class ModelSharding:
    """The table of sharing classes.

    Attributes:
        everybody: the classes of units that all ranks share.
        apart: by unit, the classes of those that not all ranks share.
    """

    mesh: Mesh
    everybody: UnitShardGroup
    apart: Mapping[int, UnitShardGroup] = field(default_factory=dict)

    def of(self, unit: int) -> UnitShardGroup:
        """The classes of a unit."""
        return self.apart.get(unit, self.everybody)

    def of_flat(self, flat: FlatLayout) -> ShardGroup:
        """The class of a flat."""
        sharing = self.of(flat.unit)
        if flat.partial:
            return sharing.partial
        return sharing.parts if flat.parts > 1 else sharing.whole

    def shared_by(self) -> dict[int, int]:
        """By unit, how many ranks hold those that not all do."""
        return {unit: len(sharing.whole.ranks) for unit, sharing in self.apart.items()}

    @property
    def in_parts(self) -> bool:
        """Whether ranks have parts of parameters."""
        return self.mesh.sizes.get(Axis.TENSOR, 1) > 1

    def elsewhere(self, rank: int) -> frozenset[int]:
        """Units that other ranks hold, and this one does not."""
        return frozenset(unit for unit, sharing in self.apart.items() if rank not in sharing.whole.ranks)

    @property
    def alike(self) -> tuple[Axis, ...]:
        """Ranks that differ along these axes alone hold the same units."""
        classes = [self.everybody, *self.apart.values()]
        return tuple(axis for axis in self.mesh.sizes if all(axis in sharing.whole.axes for sharing in classes))


def shared_by_all(mesh: Mesh) -> ModelSharding:
    """All ranks share all units, and those that have the same parts of a parameter share these."""
    (everybody,) = sharing_along(mesh, tuple(mesh.sizes))
    return ModelSharding(mesh, everybody)
