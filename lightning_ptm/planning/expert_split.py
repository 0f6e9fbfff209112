"""Expert parallelism: which rank holds which experts.

Knows numbers of ranks and experts only. A *group* is the ranks that differ along the mesh's expert axis alone: they
exchange tokens, and each of its members holds other experts. Ranks with the same position on that axis hold the same
experts, and shard the experts' pages among themselves.

With tensor parallelism, each rank of a tensor group is in its own expert group, of ranks with the same parts of
parameters. The ranks of a tensor group have the same tokens, and each of them sends all tokens to its own expert group:
a cut expert needs every token on each of its parts, and a whole expert is computed alike by all ranks of a tensor
group, as every whole module is. (Each rank could send only its share of the tokens and then exchange results within the
tensor group: fewer bytes between groups, one more exchange within them.)

I1: every expert of a layer is held by exactly one member of each group.
I2: a member holds consecutive experts; the first members hold one more where experts do not divide evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.sharding import ModelSharding, shared_by_all, sharing_along


def counts(experts: int, members: int) -> tuple[int, ...]:
    """Returns, by member, how many of a layer's experts it holds (I2)."""
    least, more = divmod(experts, members)
    return tuple(least + (member < more) for member in range(members))


def owners(experts: int, members: int) -> tuple[int, ...]:
    """Returns, by expert of a layer, the member that holds it."""
    return tuple(member for member, count in enumerate(counts(experts, members)) for _ in range(count))


def divided(mesh: Mesh, members: Mapping[int, int], scaled_by: int) -> ModelSharding:
    """Returns the sharding classes of a model with divided experts.

    Experts are shared by the ranks of their member; every other unit is shared by all ranks.

    Args:
        members: by unit of an expert, the member that holds it.
        scaled_by: scale of experts' gradients, see `ShardGroup`.
    """
    # An expert's tokens come from its whole group, so its gradients are those of all ranks' losses.
    by_member = sharing_along(mesh, [axis for axis in Axis if axis is not Axis.EXPERT], scaled_by)
    return replace(shared_by_all(mesh), by_unit={unit: by_member[member] for unit, member in members.items()})
