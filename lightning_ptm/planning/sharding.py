"""Sharding classes: which ranks share each unit. Every element of the model has exactly one owner in the world.

Owns for each unit its sharding class: the ranks that share it, and the divisor of the sum of their gradients. Knows
numbers of ranks and units, never tensors; equal on all ranks. The table is made by `shared_by_all` where all ranks
share all units, by `expert_split.divided` where they divide experts, or by `staged` where they divide blocks; in all
cases with or without tensor parallelism.

I1: the ranks of a unit's class divide its elements among them (`layout.FlatLayout.owner`); no other rank has any.
I2: a class is shared along axes, so the ranks that differ along the other axes hold other units of its kind in the same
    way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lightning_ptm.planning.mesh import Axis, Mesh

if TYPE_CHECKING:
    from lightning_ptm.planning.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """A sharding class.

    Attributes:
        axes: the axes along which its ranks differ.
        ranks: the ranks that share, in the order of their pieces.
        losses: number of ranks' losses whose mean the gradient belongs to; more than the ranks that share where some
            ranks sent their tokens to others.
        scaled_by: divisor that has already been applied to each gradient before the sum.
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]
    losses: int
    scaled_by: int = 1
    # Derived, once: they are asked for in every backward.
    divisor: float = field(init=False, repr=False, compare=False)
    """The divisor of the sum of the ranks' gradients."""
    needs_no_reduction: bool = field(init=False, repr=False, compare=False)
    """Whether a rank's gradient is the run's gradient, without any reduction."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisor", self.losses / self.scaled_by)
        object.__setattr__(self, "needs_no_reduction", self.losses == len(self.ranks) == 1)


@dataclass(frozen=True, slots=True)
class UnitShardGroup:
    """The sharding classes of a unit's flats.

    Attributes:
        whole: class of parameters that a rank has whole; its ranks are those that hold the unit.
        parts: class of parameters that are slices of larger ones; its ranks are those with the first slices.
        partial: class of whole parameters whose gradients on the ranks of a tensor group, which have the same data, are
            summands of one gradient.
    """

    whole: ShardGroup
    parts: ShardGroup
    partial: ShardGroup


def sharing_along(mesh: Mesh, axes: Collection[Axis], scaled_by: int = 1) -> tuple[UnitShardGroup, ...]:
    """Returns, for each group of ranks that differ along `axes` alone, the sharding classes of a unit that they share.

    Whichever ranks hold the unit, its gradients belong to the losses of all ranks. The losses of a tensor group are one
    loss: a whole gradient counts for each rank of the group; a slice of a gradient, or a summand of one, counts once
    for the group.
    """
    axes = tuple(axis for axis in mesh.axes if axis in axes)
    same_slice_axes = tuple(axis for axis in axes if axis is not Axis.TENSOR)
    first_parts = {ranks[0]: ranks for ranks in mesh.groups(same_slice_axes)}
    losses = math.prod(size for axis, size in mesh.sizes.items() if not axis.one_loss)
    all_losses = losses * mesh.sizes[Axis.TENSOR]
    return tuple(
        UnitShardGroup(
            ShardGroup(axes, ranks, all_losses, scaled_by),
            ShardGroup(same_slice_axes, first_parts[ranks[0]], losses, scaled_by),
            ShardGroup(axes, ranks, losses, scaled_by),
        )
        for ranks in mesh.groups(axes)
    )


@dataclass(frozen=True, slots=True)
class ModelSharding:
    """The table of sharding classes.

    Attributes:
        common: the classes of units that all ranks share.
        by_unit: by unit, the classes of units that only some ranks share.
        stage_runs: runs of blocks of a pipeline: all units but the root, in order. Run i is on stage i modulo the stages.
    """

    mesh: Mesh
    common: UnitShardGroup
    by_unit: Mapping[int, UnitShardGroup] = field(default_factory=dict)
    stage_runs: tuple[range, ...] = ()

    def of(self, unit: int) -> UnitShardGroup:
        """Returns the classes of a unit."""
        return self.by_unit.get(unit, self.common)

    def of_flat(self, flat: FlatLayout) -> ShardGroup:
        """Returns the class of a flat."""
        sharing = self.of(flat.unit)
        if flat.partial:
            return sharing.partial
        return sharing.parts if flat.parts > 1 else sharing.whole

    @property
    def ranks_by_unit(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each unit that only some ranks hold."""
        return {unit: sharing.whole.ranks for unit, sharing in self.by_unit.items()}

    def shared_by(self) -> dict[int, int]:
        """Returns, for each unit that only some ranks hold, how many do."""
        return {unit: len(ranks) for unit, ranks in self.ranks_by_unit.items()}

    @property
    def in_stages(self) -> bool:
        """Whether ranks have blocks of their own (pipeline parallelism)."""
        return Axis.STAGE in self.mesh.axes

    @property
    def runs_of_stage(self) -> int:
        """Number of runs of blocks of each stage; 1 without stages."""
        return max(1, len(self.stage_runs) // self.mesh.sizes[Axis.STAGE])

    @property
    def in_parts(self) -> bool:
        """Whether ranks have slices of parameters (tensor parallelism)."""
        return Axis.TENSOR in self.mesh.axes

    def remote_units(self, rank: int) -> frozenset[int]:
        """Returns the units that other ranks hold, and this one does not."""
        return frozenset(unit for unit, sharing in self.by_unit.items() if rank not in sharing.whole.ranks)

    @property
    def sharding_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks hold the same units."""
        classes = [self.common, *self.by_unit.values()]
        return tuple(axis for axis in self.mesh.axes if all(axis in sharing.whole.axes for sharing in classes))


def shared_by_all(mesh: Mesh) -> ModelSharding:
    """Returns the table where all ranks share all units.

    Slices of parameters are shared by the ranks with the same slice.
    """
    (common,) = sharing_along(mesh, mesh.axes)
    return ModelSharding(mesh, common)


def staged(mesh: Mesh, runs: Sequence[range]) -> ModelSharding:
    """Returns the table of a pipeline: a block is shared by the ranks of its stage, the root unit by all ranks.

    Args:
        runs: as `ModelSharding.stage_runs`.
    """
    by_coordinate = sharing_along(mesh, [axis for axis in Axis if axis is not Axis.STAGE])
    by_stage = {mesh.stage(sharing.whole.ranks[0]): sharing for sharing in by_coordinate}
    by_unit = {unit: by_stage[position % len(by_stage)] for position, units in enumerate(runs) for unit in units}
    return replace(shared_by_all(mesh), by_unit=by_unit, stage_runs=tuple(runs))
