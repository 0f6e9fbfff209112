"""Exchanges of tokens and activations between ranks, for which compute waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ptm.terms import Link


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Exchanges of one rank: bytes that it sends, number of collectives, and number of agreement rounds before them.

    Attributes:
        hidden: whether they pass while their tick computes (of two halves of a batch, the other one); else before it does.
    """

    bytes: int = 0
    collectives: int = 0
    rounds: int = 0
    hidden: bool = False

    def __add__(self, other: SendOrder) -> SendOrder:
        sums = self.bytes + other.bytes, self.collectives + other.collectives, self.rounds + other.rounds
        return SendOrder(*sums, self.hidden or other.hidden)

    def of_two_halves(self, *, hidden: bool) -> SendOrder:
        """Returns the exchanges of two halves of a batch: as many bytes, in twice as many collectives."""
        return SendOrder(self.bytes, 2 * self.collectives, 2 * self.rounds, hidden)

    def __sub__(self, other: SendOrder) -> SendOrder:
        return SendOrder(self.bytes - other.bytes, self.collectives - other.collectives, self.rounds - other.rounds)


NOTHING_SENT = SendOrder()

Exchanged = Mapping[int, Mapping[Link, SendOrder]]
"""By tick and link, the exchanges of one rank: tokens, activations."""
