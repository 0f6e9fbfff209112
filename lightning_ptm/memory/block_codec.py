"""Block codec: fp32 elements as 8-bit codes, with one scale for each block of them.

Pure arithmetic on 1-D tensors of any device; knows no pages, no optimizers. A code is a short floating-point number, the
upper bits of the fp32 number that it stands for, counted down from the largest of its block: 3 bits of mantissa, and 5 of
exponent where the block has no negative element, so that a second moment keeps 31 powers of two; else a sign and 4 of
exponent. A scale is an exponent, so nothing is ever multiplied and decoding is exact. (Blocks with scales of their own are
those of 8-bit optimizers, Dettmers et al., ICLR 2022; exponents as scales those of OCP's microscaling formats.)
I1: what decodes from codes encodes to itself, whatever the noise; zeros stay zeros, inf and NaN inf and NaN.
I2: where a block has no negative element, none that is greater than 0 becomes 0: nobody divides by the root of nothing.
I3: with noise that is uniform in [0, NOISE), the mean of what decodes is the element, but for I2 and what is smaller than
    2**-14 (2**-30) of the largest of its block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_ptm.memory.backend import in_ram
from lightning_ptm.terms import ALIGN_NUMEL

BLOCK_NUMEL = ALIGN_NUMEL
"""Elements of a block. Parameters and shards begin at multiples of it, so a block is of one parameter, whoever holds it."""
SCALE_DTYPE = torch.int16
_LOW_BITS = 20
"""Of an fp32 number, those that a code has not."""
NOISE = 1 << _LOW_BITS
_NEAREST = NOISE // 2
_TOP = {False: 0xFF, True: 0x7F}
"""The largest code, by whether a bit is the sign."""
_EXPONENT_BITS = 23
_INF = 0x7F800000
_NAN = 0x7FC00000
"""That which rounding cannot carry beyond the last number; a GPU's own is 0x7FFFFFFF."""
_PER_EXPONENT = 1 << (_EXPONENT_BITS - _LOW_BITS)
_SIGN = 0x80
_STRIP_NUMEL = 1 << 18
"""Elements that are worked on together: what is in between stays in a core's cache."""


class BlockCodec:
    """Encodes and decodes. Owns scratch: one thread at a time."""

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def encode(self, values: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None = None) -> None:
        """Write the codes and scales of elements.

        Args:
            values: (n,), fp32; n is a multiple of BLOCK_NUMEL.
            codes: (n,), uint8, written; scales: (n / BLOCK_NUMEL,), SCALE_DTYPE, written.
            noise: (n,), int32, uniform in [0, NOISE): rounding is stochastic; None: to the nearest.
        """
        for part in _strips(values.numel()):
            other, rounded = self._room(values.device, part.stop - part.start)
            bits = values[part].view(torch.int32).view(-1, BLOCK_NUMEL)
            lowest = bits.amin(1)
            least, most = _range(lowest)
            if least < 0:
                torch.bitwise_and(bits, 0x7FFFFFFF, out=other)
            magnitudes = other if least < 0 else bits
            signed = lowest < 0
            largest = magnitudes.amax(1)
            if not in_ram(values) or int(largest.max()) > _INF:
                magnitudes = torch.where(magnitudes > _INF, _NAN, magnitudes)
                largest.clamp_(max=_NAN)
            # Rounded up, so that the largest code is not exceeded.
            offsets = (largest + (NOISE - 1)) >> _EXPONENT_BITS
            offsets.mul_(_PER_EXPONENT).add_(_PER_EXPONENT - 1 - _TOP[False])
            if least < 0:
                offsets.add_(signed, alpha=_TOP[False] - _TOP[True])
            offsets.clamp_(min=0)
            scales[_blocks(part)].copy_(torch.where(signed, ~offsets, offsets) if least < 0 else offsets)
            added = _NEAREST if noise is None else noise[part].view(-1, BLOCK_NUMEL)
            torch.add(magnitudes, added, out=rounded)
            rounded >>= _LOW_BITS
            rounded -= offsets.unsqueeze(1)
            if most < 0 or least > 0:
                rounded.clamp_(min=0 if most < 0 else 1)  # I2
            else:
                torch.minimum(magnitudes, (~signed).to(torch.int32).unsqueeze(1), out=other)
                torch.maximum(rounded, other, out=rounded)
            if least < 0:
                torch.bitwise_right_shift(bits, 31, out=other)
                rounded.add_(other, alpha=-_SIGN)
            codes[part].view(-1, BLOCK_NUMEL).copy_(rounded)

    def decode(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        """Write the elements that codes stand for. Args: as `encode`; `values` is written."""
        for part in _strips(values.numel()):
            signs, moved = self._room(values.device, part.stop - part.start)
            bits = values[part].view(torch.int32).view(-1, BLOCK_NUMEL)
            bits.copy_(codes[part].view(-1, BLOCK_NUMEL))
            offsets = scales[_blocks(part)].to(torch.int32)
            least, _ = _range(offsets)
            if least < 0:
                signed = offsets < 0
                torch.bitwise_and(bits, (signed * _SIGN).to(torch.int32).unsqueeze(1), out=signs)
                bits ^= signs
                offsets = torch.where(signed, ~offsets, offsets)
            if least >= 0 and _range(codes[part])[0] > 0:
                bits += offsets.unsqueeze(1)
            else:
                torch.clamp(bits, max=1, out=moved)  # a code of 0 is no number but 0
                moved *= offsets.unsqueeze(1)
                bits += moved
            bits <<= _LOW_BITS
            if least < 0:
                signs <<= 24
                bits |= signs

    def scratch(self, device: torch.device, numel: int) -> Tensor:
        """(numel,), int32, with undefined contents, good until the next call of any method; at most a strip."""
        return self._room(device, numel)[0].view(-1)

    def _room(self, device: torch.device, numel: int) -> tuple[Tensor, Tensor]:
        """Two tensors (blocks, BLOCK_NUMEL), int32, with undefined contents."""
        known = self._scratch.get(device)
        if known is None:
            known = self._scratch[device] = (
                torch.empty(_STRIP_NUMEL, dtype=torch.int32, device=device),
                torch.empty(_STRIP_NUMEL, dtype=torch.int32, device=device),
            )
        first, second = (each.narrow(0, 0, numel).view(-1, BLOCK_NUMEL) for each in known)
        return first, second


def _strips(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _STRIP_NUMEL):
        yield slice(start, min(start + _STRIP_NUMEL, numel))


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK_NUMEL, part.stop // BLOCK_NUMEL)


def _range(numbers: Tensor) -> tuple[int, int]:
    """(least, greatest); what is true of any on a device, which is not waited for to know."""
    if not in_ram(numbers):
        return -1, 0
    return int(numbers.min()), int(numbers.max())
