"""Exchanges of tokens and activations between ranks, for which compute waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ptm.terms import Link


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Exchanges of one rank: bytes that it sends, number of collectives, and number of agreement rounds before them."""

    bytes: int = 0
    collectives: int = 0
    rounds: int = 0

    def __add__(self, other: SendOrder) -> SendOrder:
        return SendOrder(self.bytes + other.bytes, self.collectives + other.collectives, self.rounds + other.rounds)

    def __sub__(self, other: SendOrder) -> SendOrder:
        return SendOrder(self.bytes - other.bytes, self.collectives - other.collectives, self.rounds - other.rounds)


NOTHING_SENT = SendOrder()

Exchanged = Mapping[int, Mapping[Link, SendOrder]]
"""By tick and link, the exchanges of one rank: tokens, activations."""
