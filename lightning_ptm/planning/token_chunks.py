"""Division of a sequence's tokens over the ranks of a context group. Knows numbers only.

A sequence is cut into twice as many chunks as the group has ranks, and rank r has chunk r and its mirror image, counted from
the end. With a causal mask a query has as many keys as there are tokens before it, so two such chunks have as much work as
any other two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenChunks:
    """The division of a sequence's tokens over a context group.

    Attributes:
        size: number of ranks; 1 divides nothing.
        tokens: tokens of each rank; an even number if there are several ranks.
    """

    size: int
    tokens: int

    @property
    def of_chunk(self) -> int:
        """Tokens of a chunk."""
        return self.tokens if self.size == 1 else self.tokens // 2

    def starts(self, rank: int) -> tuple[int, ...]:
        """Returns the position of the first token of each of a rank's chunks, in order."""
        if self.size == 1:
            return (0,)
        return rank * self.of_chunk, (2 * self.size - 1 - rank) * self.of_chunk

    def in_order(self) -> tuple[tuple[int, int], ...]:
        """Returns the chunks in the order of the sequence, each as (rank that has it, its index among that rank's chunks)."""
        if self.size == 1:
            return ((0, 0),)
        ranks = range(self.size)
        return (*((rank, 0) for rank in ranks), *((rank, 1) for rank in reversed(ranks)))


def divides(length: int, size: int) -> bool:
    """Whether a sequence of this length can be divided over `size` ranks."""
    return size == 1 or length % (2 * size) == 0
