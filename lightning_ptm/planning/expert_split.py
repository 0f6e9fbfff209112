"""Which rank holds which experts when ranks divide them, and who computes with whom (expert parallelism).

Knows numbers of ranks and experts only. A *group* are ranks that differ along the mesh's expert axis alone: they exchange
tokens, and each of its members holds other experts. Ranks of equal place on that axis hold the same ones, and their pages are
sharded over these ranks.

Where ranks also cut parameters, tensor groups are innermost, so that their ranks are neighbours, and each rank of one is in
an expert group of its own, of ranks with the same parts. A tensor group has the same tokens, and each of its ranks sends all
of them to its own group: an expert that is cut needs every token on each of its parts, and one that is whole is computed
alike by all ranks of a tensor group, as all that is whole is. (Each could send its share of the tokens, and the ranks of a
tensor group tell each other what came: fewer bytes between groups, one exchange more inside of them.)

I1: every expert of a layer is held by exactly one member of each group. I2: members hold neighbours, the first ones one more
where experts do not divide evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.sharding import Axis, Mesh, ModelSharding, shared_by_all, sharing_along

ALONG = ((Axis.DATA, Axis.EXPERT), (Axis.DATA, Axis.TENSOR), (Axis.DATA,), (Axis.EXPERT,), (Axis.TENSOR,))
"""Axes along which some ranks share or exchange, beside all of them: parts of what is everybody's, experts, parts of these,
and tokens."""


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """Of `world_size` ranks, groups of `size` divide the experts among them.

    Args:
        parts: into how many tensor groups cut parameters, of experts, too; it divides `world_size`.

    Raises:
        ConfigError: there are no such groups.
    """

    world_size: int
    size: int
    parts: int = 1

    def __post_init__(self) -> None:
        batches = self.world_size // self.parts
        if batches % self.size:
            sizes = ", ".join(str(size) for size in range(1, batches + 1) if batches % size == 0)
            ranks = f"the number of ranks, {batches}"
            if self.parts > 1:
                ranks = f"the number of tensor groups, {batches} ({self.world_size} ranks by {self.parts})"
            raise ConfigError(
                f"expert_parallel_size={self.size} does not divide {ranks}, so the last group would lack experts; use one of "
                f"{sizes}, or another number of ranks"
            )

    @property
    def mesh(self) -> Mesh:
        """The ranks of a tensor group are neighbours, and those groups that divide experts."""
        batches = self.world_size // self.parts
        return Mesh({Axis.DATA: batches // self.size, Axis.EXPERT: self.size, Axis.TENSOR: self.parts})

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, by member."""
        return self.mesh.groups((Axis.EXPERT,))

    def member(self, rank: int) -> int:
        """Which member of its group a rank is."""
        return self.mesh.coordinate(rank, Axis.EXPERT)

    def holders(self, member: int) -> tuple[int, ...]:
        """The ranks that hold a member's experts, or parts of them."""
        return self.mesh.groups((Axis.DATA, Axis.TENSOR))[member]

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


def divided(split: ExpertSplit, members: Mapping[int, int], scaled_by: int) -> ModelSharding:
    """Who holds what: experts are of the ranks that are their members, all else is everybody's.

    Args:
        members: by unit of an expert, the member that holds it.
        scaled_by: of experts' gradients, see `ShardGroup`.
    """
    # An expert's tokens are of its whole group, so its gradients are of all ranks' losses.
    by_member = sharing_along(split.mesh, (Axis.DATA, Axis.TENSOR), scaled_by)
    return replace(shared_by_all(split.mesh), apart={unit: by_member[member] for unit, member in members.items()})
