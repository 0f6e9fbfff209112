"""Which rank holds which experts when ranks divide them, and who computes with whom (expert parallelism).

Knows numbers of ranks and experts only. Ranks r of equal r // size are a group: they exchange tokens, and each of its members
holds other experts. Ranks of equal r % size hold the same ones, and their pages are sharded over these ranks.

I1: every expert of a layer is held by exactly one member of each group. I2: members hold neighbours, the first ones one more
where experts do not divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptm.errors import ConfigError


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
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, by member."""
        starts = range(0, self.world_size, self.size)
        return tuple(tuple(range(start, start + self.size)) for start in starts)

    @property
    def sharing(self) -> int:
        """How many ranks hold the same experts."""
        return self.world_size // self.size

    def member(self, rank: int) -> int:
        """Which member of its group a rank is."""
        return rank % self.size

    def holders(self, member: int) -> tuple[int, ...]:
        """The ranks that hold a member's experts."""
        return tuple(range(member, self.world_size, self.size))

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
