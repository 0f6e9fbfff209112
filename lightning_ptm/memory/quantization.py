"""Frozen weights in fewer bits (QLoRA, Dettmers et al. 2023): numbers to blocks of codes and back.

Owns the arithmetic; `terms.Code` has the sizes. Every value is `code value x largest absolute value of its block`, computed
in float32 and rounded once to the dtype of the values, by operations that round alike on every device.

I1: `encode` of what `decode` gave has the same values again: code values reach from -1 to 1, so the largest absolute value is
    itself one of them, and no other is rounded as far as half of the way to the next code value.
I2: a block is of `ALIGN_NUMEL` elements: its largest absolute value as a float32, then its codes; nf4 has two in a byte, the
    first in the upper bits. A value that is no finite number makes its block NaN.
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
"""Elements on their way between codes and values take some bytes each in float32, and these are in the cache of a CPU."""

_AT_ONCE_BLOCKS_APART = 1 << 16
"""On a device, where every operation on a part is a launch: four million elements."""

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
    """The values of a paged tensor that holds their codes.

    Args:
        paged: uint8, (code.bytes_of(numel),).
        code: which.
        dtype: of the values.
        numel: of the values, whole blocks.
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
        """Of the values."""
        return self.numel * self.dtype.itemsize

    @property
    def tier(self) -> Tier:
        """Where the codes are."""
        return self.paged.tier

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first byte, bytes) of the codes of `numel` values, whole blocks, from `start` on."""
        return self.code.bytes_of(start), self.code.bytes_of(numel)

    def decoded(self, codes: Tensor, numel: int) -> Tensor:
        """The `numel` values of codes, in memory of their own."""
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


def decode(codes: Tensor, code: Code, values: Tensor, *, apart: bool = False) -> None:
    """Writes the values of `codes`, uint8 (code.bytes_of(numel),), into `values` (numel,).

    Args:
        codes: may lie in the memory of the values, from `room_before_codes` on.
        apart: they are on a device with memory and arithmetic of its own (`Backend.apart`).
    """
    blocks, rows = values.view(-1, ALIGN_NUMEL), codes.view(-1, code.block_bytes)
    for part in _parts(rows, _AT_ONCE_BLOCKS_APART if apart else _AT_ONCE_BLOCKS):
        wide = _DECODERS[code.name](rows[part][:, 4:]).mul_(rows[part].view(torch.float32)[:, :1])
        blocks[part].copy_(wide)


def room_before_codes(values_bytes: int, codes_bytes: int) -> int:
    """Where, in the bytes of values, their codes may lie so that `decode` reads each before it writes there: at a disk block.

    A block of values takes more bytes than one of codes. So before the blocks from b on there is room for the values of those
    before b; that it is less by a part of a disk block counts for nothing, since no less than `_AT_ONCE_BLOCKS` are left.
    """
    return (values_bytes - codes_bytes) // BLOCK_BYTES * BLOCK_BYTES


def rounded(values: Tensor, code: Code) -> Tensor:
    """What is left of values (numel,), whole blocks, in their dtype."""
    codes = torch.empty(code.bytes_of(values.numel()), dtype=torch.uint8, device=values.device)
    encode(values, code, codes)
    left = torch.empty_like(values)
    decode(codes, code, left)
    return left


def _parts(blocks: Tensor, at_once: int) -> Iterator[slice]:
    """So many of them at a time; the first part is the one that may be short (`room_before_codes`)."""
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
    # By byte: the two values of its two codes.
    pairs = torch.stack((values.repeat_interleave(len(values)), values.repeat(len(values))), -1)
    return torch.nn.functional.embedding(codes.to(torch.int32), pairs).view(len(codes), -1)


_ENCODERS = {"int8": _to_int8, "nf4": _to_nf4}
_DECODERS = {"int8": _from_int8, "nf4": _from_nf4}
