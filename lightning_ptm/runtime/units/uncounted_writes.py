"""Fingerprints of a flat's values, to detect writes that torch's version counters miss.

A write through `parameter.data`, a numpy view, a fused kernel or another library does not change the parameter's version.
Knows tensors, never pages; binding.py decides when to compare.

I1: no false positives: a parameter that is reported to differ does differ.
I2: a fingerprint contains a sample of each parameter's elements, so that a change of the whole parameter is found and a
    change of a few elements may not be. With `every_element` (the setting `poison`) it is a position-dependent checksum of
    all elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ptm.planning.layout import FlatLayout

_RUNS = 4
"""Number of places in a parameter, evenly spread, from which a sample takes elements. Its cost are cache misses: less than
1 % of a step of 64 tokens in which each unit is fetched twice."""
_RUN_NUMEL = 8
"""Number of consecutive elements at each place."""
_BLOCK = 1 << 16
"""Number of elements that are multiplied at once, so that the products stay in the cache."""
_PRIME = 6364136223846793005
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sampled(numel: int) -> Tensor:
    """Returns the indices of the sampled elements of a parameter."""
    if numel <= _RUNS * _RUN_NUMEL:
        return torch.arange(numel)
    starts = torch.arange(_RUNS) * (numel - _RUN_NUMEL) // (_RUNS - 1)
    return (starts[:, None] + torch.arange(_RUN_NUMEL)).flatten()


class Fingerprint:
    """Computes and compares fingerprints of flats of one layout.

    Args:
        device: device of the flats.
        every_element: whether fingerprints are checksums of all elements (I2).
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
        """Returns the fingerprint of a flat's present values, (padded_numel,) or longer."""
        words = max(1, full.itemsize // 8)
        bits = full.view(_INTEGERS[min(8, full.itemsize)])
        if self._every_element:
            sums = [self._checksum(bits[start * words : (start + numel) * words]) for _, start, numel in self._slots]
            return torch.stack(sums) if sums else bits.new_empty(0, dtype=torch.int64)
        # Of elements wider than an integer, the first half.
        return (bits if words == 1 else bits.view(-1, words)[:, 0]).index_select(0, self._index)

    def differs(self, full: Tensor, before: Tensor) -> int | None:
        """Returns the first slot whose values in `full` differ from the fingerprint `before`; None if none does."""
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
            # Exponents are in the highest bits, where a sum of many equal changes (all numbers halved) could overflow to 0.
            total = total * _PRIME + ((wide ^ (wide >> 29)) * self._factors[: block.numel()]).sum()
        return total
