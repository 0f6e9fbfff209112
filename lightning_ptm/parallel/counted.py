"""A tensor group that is planned for: nothing is exchanged, and what ranks would exchange is counted.

For modules on the meta device that are cut as the first rank's are (`lightning-ptm plan`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from typing_extensions import override

from lightning_ptm.parallel.exchange import TensorGroup


class CountedGroup(TensorGroup):
    """The first rank of a group, alone.

    Attributes:
        forward_bytes: that a rank has sent to others in forwards, by rings.
        backward_bytes: that it would send in their backward passes.
        kept_bytes: of results that a recomputed forward is given again.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size, 0)
        self.forward_bytes = 0
        self.backward_bytes = 0
        self.kept_bytes = 0

    @override
    def sum(self, value: Tensor) -> Tensor:
        self.forward_bytes += self._summed(value)
        return value.clone()

    @override
    def gather(self, value: Tensor) -> Tensor:
        self.forward_bytes += value.nbytes * (self.size - 1)
        return value.unsqueeze(0).expand(self.size, *value.shape).clone()

    @override
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        self.forward_bytes += pieces.nbytes * (self.size - 1) // self.size
        return pieces[0].clone()

    @override
    def kept(self, exchange: Callable[[], Tensor]) -> Tensor:
        result = exchange()
        self.kept_bytes += result.nbytes
        return result

    @override
    def sends_back(self, sent_bytes: int) -> None:
        self.backward_bytes += sent_bytes


__all__ = ["CountedGroup"]
