"""Quantized frozen weights (QLoRA, Dettmers et al. 2023): encodes values as blocks of int8 or nf4 codes, and decodes.

Owns the arithmetic; `terms.Code` has the sizes. Every value is `code value x largest absolute value of its block`,
computed in float32 and rounded once to the dtype of the values, by operations that round alike on every device.

I1: encoding decoded values and decoding them again gives the same values. Code values range from -1 to 1, so the
    largest absolute value of a block is itself a code value, and rounding moves no other value half of the way to the
    next code value.
I2: a block has `ALIGN_NUMEL` elements: its largest absolute value as a float32, then its codes. nf4 stores two codes in
    a byte, the first in the upper bits. A value that is not finite makes its whole block NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.terms import ALIGN_NUMEL, BLOCK_BYTES, Code, Tier

_AT_ONCE_BLOCKS = 1 << 12
"""Blocks converted together on a CPU: their float32 intermediates stay in its cache."""

_AT_ONCE_BLOCKS_APART = 1 << 16
"""Blocks converted together on a device, where every operation is a kernel launch: four million elements."""

_LARGEST_INT8 = 127.0

# The quantiles of the normal distribution that QLoRA publishes (bitsandbytes has the same).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A paged tensor that stores codes, described as the values that they decode to.

    Args:
        paged: the codes, uint8, (code.bytes_of(numel),).
        code: the kind of codes.
        dtype: dtype of the values.
        numel: number of values, whole blocks.
    """

    paged: PagedTensor
    code: Code
    dtype: torch.dtype
    numel: int

    @property
    def id(self) -> int:
        return self.paged.id

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.numel * self.dtype.itemsize

    @property
    def tier(self) -> Tier:
        """The tier of the codes."""
        return self.paged.tier

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """Returns (first byte, number of bytes) of the codes of `numel` values, whole blocks, from `start` on."""
        return self.code.bytes_of(start), self.code.bytes_of(numel)

    def decoded(self, codes: Tensor, numel: int) -> Tensor:
        """Returns the `numel` values of codes, in new memory."""
        values = torch.empty(numel, dtype=self.dtype, device=codes.device)
        decode(codes, self.code, values)
        return values

    def encode(self, values: Tensor, codes: Tensor) -> None:
        """Writes the codes of values."""
        encode(values, self.code, codes)


def encode(values: Tensor, code: Code, codes: Tensor) -> None:
    """Writes the codes of `values`, (numel,) of whole blocks, into `codes`, uint8 (code.bytes_of(numel),)."""
    blocks, rows = values.view(-1, ALIGN_NUMEL), codes.view(-1, code.block_bytes)
    for part in _parts(blocks, _AT_ONCE_BLOCKS):
        wide = blocks[part].to(torch.float32)
        most = wide.abs().amax(-1, keepdim=True)
        most += most * 0.0  # inf is NaN from here on (I2)
        scaled = wide / torch.where(most > 0, most, 1.0)
        rows[part].view(torch.float32)[:, :1] = most
        rows[part][:, 4:] = _ENCODERS[code.name](scaled)


def decode(codes: Tensor, code: Code, values: Tensor, *, has_own_memory: bool = False) -> None:
    """Writes the values of `codes`, uint8 (code.bytes_of(numel),), into `values` (numel,).

    Args:
        codes: may share the memory of the values, from `room_before_codes` on.
        code: the kind of codes.
        values: written.
        has_own_memory: whether they are on a device with memory of its own (`Backend.has_own_memory`).
    """
    blocks, rows = values.view(-1, ALIGN_NUMEL), codes.view(-1, code.block_bytes)
    for part in _parts(rows, _AT_ONCE_BLOCKS_APART if has_own_memory else _AT_ONCE_BLOCKS):
        wide = _DECODERS[code.name](rows[part][:, 4:]).mul_(rows[part].view(torch.float32)[:, :1])
        blocks[part].copy_(wide)


def room_before_codes(values_bytes: int, codes_bytes: int) -> int:
    """Returns the byte offset, within the bytes of values, at which their codes may be stored for decoding in place.

    It is a multiple of a disk block. A block of values takes more bytes than a block of codes, so the codes that are
    not decoded yet begin after the values written so far. Rounding the offset down shortens the distance by less than a
    disk block, which is safe because after each part of `decode` either no block or at least `_AT_ONCE_BLOCKS` blocks
    are left.
    """
    return (values_bytes - codes_bytes) // BLOCK_BYTES * BLOCK_BYTES


def rounded(values: Tensor, code: Code) -> Tensor:
    """Returns values (numel,), whole blocks, encoded and decoded again, in their dtype."""
    codes = torch.empty(code.bytes_of(values.numel()), dtype=torch.uint8, device=values.device)
    encode(values, code, codes)
    left = torch.empty_like(values)
    decode(codes, code, left)
    return left


def _parts(blocks: Tensor, at_once: int) -> Iterator[slice]:
    """Yields slices of at most `at_once` blocks; only the first may be shorter (`room_before_codes`)."""
    count = len(blocks)
    start, stop = 0, count % at_once or min(count, at_once)
    while start < count:
        yield slice(start, stop)
        start, stop = stop, stop + at_once


def _to_int8(scaled: Tensor) -> Tensor:
    return (scaled * _LARGEST_INT8).round_().to(torch.int8).view(torch.uint8)


def _from_int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).to(torch.float32).div_(_LARGEST_INT8)


def _to_nf4(scaled: Tensor) -> Tensor:
    nearest = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for below, above in itertools.pairwise(_NF4):  # ten times as fast as torch.bucketize on a CPU
        nearest += scaled > (below + above) / 2
    return (nearest[:, ::2] << 4) | nearest[:, 1::2]


def _from_nf4(codes: Tensor) -> Tensor:
    values = torch.tensor(_NF4, dtype=torch.float32, device=codes.device)
    # Row b: the two values of the two codes in byte b.
    pairs = torch.stack((values.repeat_interleave(len(values)), values.repeat(len(values))), -1)
    return torch.nn.functional.embedding(codes.to(torch.int32), pairs).view(len(codes), -1)


_ENCODERS = {"int8": _to_int8, "nf4": _to_nf4}
_DECODERS = {"int8": _from_int8, "nf4": _from_nf4}
