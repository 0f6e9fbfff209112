"""A tensor group that is planned for: nothing is exchanged, and what ranks would exchange is counted.

For modules on the meta device that are cut as the first rank's are (`lightning-ptm plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from lightning_ptm.parallel.exchange import TensorGroup


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank has exchanged with others.

    Attributes:
        forward_bytes: that it has sent in forwards, by rings; backward_bytes: that it would send in their backward passes.
        forwards, backwards: in how many exchanges.
        kept_bytes: of results that a recomputed forward is given again.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    forwards: int = 0
    backwards: int = 0
    kept_bytes: int = 0

    def since(self, before: Sent) -> Sent:
        """What has been added to `before`."""
        return Sent(
            self.forward_bytes - before.forward_bytes,
            self.backward_bytes - before.backward_bytes,
            self.forwards - before.forwards,
            self.backwards - before.backwards,
            self.kept_bytes - before.kept_bytes,
        )


class CountedTensorGroup(TensorGroup):
    """The first rank of a group, alone."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 0)
        self.sent = Sent()
        """So far."""

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
    def kept(self, exchange: Callable[[], Tensor]) -> Tensor:
        result = exchange()
        self.sent = replace(self.sent, kept_bytes=self.sent.kept_bytes + result.nbytes)
        return result

    @override
    def sends_back(self, sent_bytes: int) -> None:
        sent = self.sent
        self.sent = replace(sent, backward_bytes=sent.backward_bytes + sent_bytes, backwards=sent.backwards + 1)

    def _sends(self, sent_bytes: int) -> None:
        sent = self.sent
        self.sent = replace(sent, forward_bytes=sent.forward_bytes + sent_bytes, forwards=sent.forwards + 1)
