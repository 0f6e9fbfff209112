"""Expert parallelism: which rank holds which experts, and which ranks exchange tokens.

Knows numbers of ranks and experts only. A *group* is the ranks that differ along the mesh's expert axis alone: they
exchange tokens, and each of its members holds other experts. Ranks with the same position on that axis hold the same
experts, and shard the experts' pages among themselves.

With tensor parallelism, tensor groups are innermost in the mesh, so that their ranks are neighbours. Each rank of a
tensor group is in its own expert group, of ranks with the same parts of parameters. The ranks of a tensor group have
the same tokens, and each of them sends all tokens to its own expert group: a cut expert needs every token on each of
its parts, and a whole expert is computed alike by all ranks of a tensor group, as every whole module is. (Each rank
could send only its share of the tokens and then exchange results within the tensor group: fewer bytes between groups,
one more exchange within them.)

I1: every expert of a layer is held by exactly one member of each group.
I2: a member holds consecutive experts; the first members hold one more where experts do not divide evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.sharding import ModelSharding, shared_by_all, sharing_along

ALONG = ((Axis.DATA, Axis.EXPERT), (Axis.DATA, Axis.TENSOR), (Axis.DATA,), (Axis.EXPERT,), (Axis.TENSOR,))
"""Combinations of axes along which some ranks share states or exchange data, in addition to all ranks together.

In order: parts of parameters that all ranks share, experts, parts of experts (DATA), tokens, activations.
"""


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """The division of experts among groups of `size` of the `world_size` ranks.

    Args:
        parts: tensor-parallel size, which also cuts experts; it divides `world_size`.

    Raises:
        ConfigError: the sizes do not divide.
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
        """The mesh: tensor groups are neighbouring ranks, and so are the tensor groups that divide experts."""
        batches = self.world_size // self.parts
        return Mesh({Axis.DATA: batches // self.size, Axis.EXPERT: self.size, Axis.TENSOR: self.parts})

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each expert group, by member."""
        return self.mesh.groups((Axis.EXPERT,))

    def member(self, rank: int) -> int:
        """Returns the member number of a rank within its group."""
        return self.mesh.coordinate(rank, Axis.EXPERT)

    def holders(self, member: int) -> tuple[int, ...]:
        """Returns the ranks that hold a member's experts, or parts of them."""
        return self.mesh.groups((Axis.DATA, Axis.TENSOR))[member]

    def counts(self, experts: int) -> tuple[int, ...]:
        """Returns, by member, how many of a layer's experts it holds (I2)."""
        least, more = divmod(experts, self.size)
        return tuple(least + (member < more) for member in range(self.size))

    def owner(self, expert: int, experts: int) -> int:
        """Returns the member that holds one of a layer's experts."""
        if not 0 <= expert < experts:
            raise IndexError(f"there are {experts} experts")
        least, more = divmod(experts, self.size)
        of_first = more * (least + 1)
        return expert // (least + 1) if expert < of_first else more + (expert - of_first) // least


def divided(split: ExpertSplit, members: Mapping[int, int], scaled_by: int) -> ModelSharding:
    """Returns the sharding classes of a model with divided experts.

    Experts are shared by the ranks of their member; every other unit is shared by all ranks.

    Args:
        members: by unit of an expert, the member that holds it.
        scaled_by: scale of experts' gradients, see `ShardGroup`.
    """
    # An expert's tokens come from its whole group, so its gradients are those of all ranks' losses.
    by_member = sharing_along(split.mesh, (Axis.DATA, Axis.TENSOR), scaled_by)
    return replace(shared_by_all(split.mesh), by_unit={unit: by_member[member] for unit, member in members.items()})
