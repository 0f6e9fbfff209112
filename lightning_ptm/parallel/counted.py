"""A tensor group that is planned for: nothing is exchanged, and what ranks would exchange is counted.

For modules on the meta device that are cut as the first rank's are (`lightning-ptm plan`).
"""

from __future__ import annotations

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
    def enter(self, value: Tensor) -> Tensor:
        before = self._entered
        out = super().enter(value)
        if self._entered is not before:
            self.backward_bytes += self._summed(value)
        return out

    @override
    def part_of(self, value: Tensor) -> Tensor:
        self.backward_bytes += value.nbytes * (self.size - 1) // self.size
        return super().part_of(value)

    @override
    def sum(self, value: Tensor) -> Tensor:
        self.forward_bytes += self._summed(value)
        self.kept_bytes += value.nbytes
        return value.clone()

    @override
    def gather(self, value: Tensor) -> Tensor:
        self.forward_bytes += value.nbytes * (self.size - 1)
        self.kept_bytes += value.nbytes * self.size
        return value.unsqueeze(0).expand(self.size, *value.shape).clone()

    def _summed(self, value: Tensor) -> int:
        return 2 * value.nbytes * (self.size - 1) // self.size


__all__ = ["CountedGroup"]
