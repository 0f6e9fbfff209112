"""What ranks send to each other while nothing computes, for it would compute what comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ptm.terms import Link


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Exchanges of one rank: bytes that it sends, in so many collectives, before which it meets others in so many rounds."""

    bytes: int = 0
    collectives: int = 0
    rounds: int = 0

    def __add__(self, other: SendOrder) -> SendOrder:
        return SendOrder(self.bytes + other.bytes, self.collectives + other.collectives, self.rounds + other.rounds)


NOTHING_SENT = SendOrder()

Exchanged = Mapping[int, Mapping[Link, SendOrder]]
"""By tick, what a rank sends to others: tokens, activations."""
