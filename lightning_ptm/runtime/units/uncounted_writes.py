"""What a flat's values were when compute got them, to find writes that torch does not count.

A write through `parameter.data`, a numpy view, a fused kernel or another library's own code leaves the parameter's version as
it was. Knows tensors, never pages; who compares, and when, is binding.py's.

I1: a parameter that is said to differ differs. I2: of each parameter some elements are kept, spread over it, so that a change
of all of it is found and a change of a few elements may not be; with `every_element` (the setting `poison`) a checksum of all
of it, in which places count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ptm.planning.layout import FlatLayout

_RUNS = 4
"""Places of a parameter, from its start to its end, of which a sample has elements. Reading these, none of which is in a
cache, is what a sample costs: less than 1 % of a step of 64 tokens in which each unit is brought twice."""
_RUN_NUMEL = 8
"""Elements that follow each other at each place."""
_BLOCK = 1 << 16
"""Elements that are multiplied at once, so that the products stay in the cache."""
_PRIME = 6364136223846793005
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sampled(numel: int) -> Tensor:
    """Places of the elements that a sample of so many has."""
    if numel <= _RUNS * _RUN_NUMEL:
        return torch.arange(numel)
    starts = torch.arange(_RUNS) * (numel - _RUN_NUMEL) // (_RUNS - 1)
    return (starts[:, None] + torch.arange(_RUN_NUMEL)).flatten()


class Fingerprint:
    """Of flats of one layout.

    Args:
        device: of the flats.
        every_element: see I2.
    """

    def __init__(self, layout: FlatLayout, device: torch.device, *, every_element: bool) -> None:
        self._slots = [(place, slot.start, slot.numel) for place, slot in enumerate(layout.slots) if slot.numel]
        self._every_element = every_element
        sampled = [start + _sampled(numel) for _, start, numel in self._slots]
        self._per_slot = [len(each) for each in sampled]
        self._index = torch.cat([torch.empty(0, dtype=torch.int64), *sampled]).to(device)
        self._factors: Tensor | None = None

    @torch.no_grad()
    def of(self, full: Tensor) -> Tensor:
        """Of a flat's values now: (padded_numel,) or longer."""
        words = max(1, full.itemsize // 8)
        bits = full.view(_INTEGERS[min(8, full.itemsize)])
        if self._every_element:
            sums = [self._checksum(bits[start * words : (start + numel) * words]) for _, start, numel in self._slots]
            return torch.stack(sums) if sums else bits.new_empty(0, dtype=torch.int64)
        # Of a number that is wider than an integer, the first half.
        return (bits if words == 1 else bits.view(-1, words)[:, 0]).index_select(0, self._index)

    def differs(self, full: Tensor, before: Tensor) -> int | None:
        """The first slot of which `full` has other values than those of which `before` was made; None: none has."""
        now = self.of(full)
        if torch.equal(now, before):
            return None
        counts = [1] * len(self._slots) if self._every_element else self._per_slot
        changed = int((now != before).nonzero()[0])
        for (place, _, _), count in zip(self._slots, counts, strict=True):
            if changed < count:
                return place
            changed -= count
        return None

    def _checksum(self, bits: Tensor) -> Tensor:
        if self._factors is None:
            self._factors = torch.arange(1, 2 * _BLOCK, 2, dtype=torch.int64, device=bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for block in bits.split(_BLOCK):
            wide = block.long()
            # Exponents lie in the highest bits, of which a sum of many equal changes (all numbers halved) would lose sight.
            total = total * _PRIME + ((wide ^ (wide >> 29)) * self._factors[: block.numel()]).sum()
        return total
