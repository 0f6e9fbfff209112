"""Tensor group for planning: exchanges nothing, and counts the bytes that ranks would exchange.

For modules on the meta device that are cut as on the first rank (`lightning-ptm plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from lightning_ptm.parallel.exchange import TensorGroup


@dataclass(frozen=True, slots=True)
class Sent:
    """Counters of a rank's exchanges with other ranks.

    Attributes:
        forward_bytes: bytes sent in forwards, by ring collectives.
        backward_bytes: bytes that the backward passes of these forwards would send.
        forwards, backwards: numbers of exchanges.
        kept_bytes: bytes of results that are stored for recomputed forwards.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    forwards: int = 0
    backwards: int = 0
    kept_bytes: int = 0

    def since(self, before: Sent) -> Sent:
        """Returns the difference to earlier counters."""
        return Sent(
            self.forward_bytes - before.forward_bytes,
            self.backward_bytes - before.backward_bytes,
            self.forwards - before.forwards,
            self.backwards - before.backwards,
            self.kept_bytes - before.kept_bytes,
        )


class CountedTensorGroup(TensorGroup):
    """The first rank of a group, without the others: results have the right shapes, bytes are counted."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 0)
        self.sent = Sent()
        """Counters so far."""

    @override
    def sum(self, value: Tensor) -> Tensor:
        self._sends(self._summed(value))
        return value.clone()

    @override
    def gather(self, value: Tensor) -> Tensor:
        self._sends(value.nbytes * (self.size - 1))
        return value.unsqueeze(0).expand(self.size, *value.shape).clone()

    @override
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        self._sends(pieces.nbytes * (self.size - 1) // self.size)
        return pieces[0].clone()

    @override
    def swap(self, pieces: Tensor) -> Tensor:
        self._sends(pieces.nbytes * (self.size - 1) // self.size)
        return pieces.clone()

    @override
    def shift(self, value: Tensor) -> Tensor:
        self._sends(value.nbytes)
        return value.clone()

    @override
    def kept(self, exchange: Callable[[], Tensor]) -> Tensor:
        result = exchange()
        self.sent = replace(self.sent, kept_bytes=self.sent.kept_bytes + result.nbytes)
        return result

    @override
    def count_backward(self, sent_bytes: int) -> None:
        sent = self.sent
        self.sent = replace(sent, backward_bytes=sent.backward_bytes + sent_bytes, backwards=sent.backwards + 1)

    def _sends(self, sent_bytes: int) -> None:
        sent = self.sent
        self.sent = replace(sent, forward_bytes=sent.forward_bytes + sent_bytes, forwards=sent.forwards + 1)
