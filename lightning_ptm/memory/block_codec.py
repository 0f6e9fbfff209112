"""Block codec: stores fp32 elements as 8-bit codes with one scale per block. For optimizer states in 8 bits.

Pure arithmetic on 1-D tensors of any device; knows no pages and no optimizers. A code is a short floating-point number:
the upper bits of the fp32 number, relative to the largest element of the block. It has 3 bits of mantissa and, in a
block without negative elements, 5 bits of exponent, so that a second moment keeps 31 powers of two; otherwise a sign
bit and 4 bits of exponent. A scale is an exponent, so decoding multiplies nothing and is exact. (Blocks with scales of
their own are from 8-bit optimizers, Dettmers et al., ICLR 2022; exponents as scales are from OCP's microscaling
formats.)

I1: a decoded value encodes to the same code, whatever the noise; zeros stay zeros, inf and NaN stay inf and NaN.
I2: in a block without negative elements no element greater than 0 becomes 0, since an optimizer divides by its root.
I3: with noise that is uniform in [0, NOISE), the expected decoded value is the element, except for I2 and for elements
    smaller than 2**-14 (without negative elements 2**-30) of the largest of their block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_ptm.memory.backend import in_ram
from lightning_ptm.terms import ALIGN_NUMEL

BLOCK_NUMEL = ALIGN_NUMEL
"""Elements of a block. Parameters and shards begin at multiples of it, so no block spans two parameters or ranks."""
SCALE_DTYPE = torch.int16
_LOW_BITS = 20
"""Low bits of an fp32 number that a code drops."""
NOISE = 1 << _LOW_BITS
_NEAREST = NOISE // 2
_TOP = {False: 0xFF, True: 0x7F}
"""The largest code, by whether one bit is the sign."""
_EXPONENT_BITS = 23
_INF = 0x7F800000
_NAN = 0x7FC00000
"""The NaN pattern that rounding up does not carry into the sign bit; a GPU's own, 0x7FFFFFFF, would be carried."""
_PER_EXPONENT = 1 << (_EXPONENT_BITS - _LOW_BITS)
_SIGN = 0x80
_STRIP_NUMEL = 1 << 18
"""Elements processed together: their intermediate values stay in a core's cache."""


class BlockCodec:
    """Encoder and decoder with scratch memory of its own: one thread at a time."""

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def encode(self, values: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None = None) -> None:
        """Writes the codes and scales of elements.

        Args:
            values: (n,), fp32; n is a multiple of BLOCK_NUMEL.
            codes: (n,), uint8, written.
            scales: (n / BLOCK_NUMEL,), SCALE_DTYPE, written.
            noise: (n,), int32, uniform in [0, NOISE), for stochastic rounding; None: rounds to nearest.
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
        """Writes the elements of codes into `values`. Shapes and dtypes as for `encode`."""
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
                torch.clamp(bits, max=1, out=moved)  # the code 0 stands for 0 at every scale
                moved *= offsets.unsqueeze(1)
                bits += moved
            bits <<= _LOW_BITS
            if least < 0:
                signs <<= 24
                bits |= signs

    def scratch(self, device: torch.device, numel: int) -> Tensor:
        """Returns scratch memory (numel,), int32, undefined, valid until the next call of a method; at most a strip."""
        return self._room(device, numel)[0].view(-1)

    def _room(self, device: torch.device, numel: int) -> tuple[Tensor, Tensor]:
        """Returns two scratch tensors (blocks, BLOCK_NUMEL), int32, with undefined contents."""
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
    """Returns (least, greatest) of `numbers`; on a device (-1, 0), the general case, to avoid a synchronization."""
    if not in_ram(numbers):
        return -1, 0
    return int(numbers.min()), int(numbers.max())
