"""Which rank holds which experts when ranks divide them, and who computes with whom (expert parallelism).

Knows numbers of ranks and experts only. Ranks r of equal r // size are a group: they exchange tokens, and each of its members
holds other experts. Ranks of equal r % size hold the same ones, and their pages are sharded over these ranks.

I1: every expert of a layer is held by exactly one member of each group. I2: members hold neighbours, the first ones one more
where experts do not divide evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.holders import Axis, Holders, Mesh, Sharing, everybodys


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """Of `world_size` ranks, groups of `size` divide the experts among them."""

    world_size: int
    size: int

    def __post_init__(self) -> None:
        if self.world_size % self.size:
            sizes = ", ".join(str(size) for size in range(1, self.world_size + 1) if self.world_size % size == 0)
            raise ConfigError(
                f"expert_parallel_size={self.size} does not divide the number of ranks, {self.world_size}, so the last group "
                f"would lack experts; use one of {sizes}, or another number of ranks"
            )

    @property
    def mesh(self) -> Mesh:
        """The members of a group are neighbours."""
        return Mesh({Axis.DATA: self.world_size // self.size, Axis.EXPERT: self.size})

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, by member."""
        return self.mesh.groups((Axis.EXPERT,))

    def member(self, rank: int) -> int:
        """Which member of its group a rank is."""
        return self.mesh.coordinate(rank, Axis.EXPERT)

    def holders(self, member: int) -> tuple[int, ...]:
        """The ranks that hold a member's experts."""
        return self.mesh.groups((Axis.DATA,))[member]

    def counts(self, experts: int) -> tuple[int, ...]:
        """By member, how many of a layer's experts it holds (I2)."""
        least, more = divmod(experts, self.size)
        return tuple(least + (member < more) for member in range(self.size))

    def owner(self, expert: int, experts: int) -> int:
        """The member that holds one of a layer's experts."""
        if not 0 <= expert < experts:
            raise IndexError(f"there are {experts} experts")
        least, more = divmod(experts, self.size)
        of_first = more * (least + 1)
        return expert // (least + 1) if expert < of_first else more + (expert - of_first) // least


def divided(split: ExpertSplit, members: Mapping[int, int], scaled_by: int) -> Holders:
    """Who holds what: experts are of the ranks that are their members, all else is everybody's.

    Args:
        members: by unit of an expert, the member that holds it.
        scaled_by: of experts' gradients, see `Sharing`.
    """
    # An expert's tokens are of its whole group, so its gradients are of all ranks' losses.
    axes = (Axis.DATA,)
    by_member = [Sharing(axes, ranks, split.world_size, scaled_by) for ranks in split.mesh.groups(axes)]
    return replace(everybodys(split.mesh), apart={unit: by_member[member] for unit, member in members.items()})
