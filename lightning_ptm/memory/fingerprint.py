"""Fingerprints of tensors' bytes: equal bytes have equal ones, and others almost never do.

The bytes are looked at as rows of words. A fingerprint is of the sums of rows and of columns, each times a number of its
place, so that the same words in another order have another one. It is computed at the speed of memory, by all threads of
torch, and does not depend on their number. That of a sample costs microseconds, and finds what changes whole rows, as
whatever goes through a matrix product does.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

_WORD_BYTES = 8
_ROW = 1 << 12
_ROWS = 1 << 4
"""So many stay in a core's caches while they are looked at."""
_PART = 1 << 16
_PRIME = (1 << 61) - 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Of the elements of a dense tensor in RAM, in the order of its memory.

    Raises:
        RuntimeError: it has no bytes to read (meta, sparse, batched).
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)  # an expanded dimension says the same again and again
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    whole = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
    size = whole.numel() // _WORD_BYTES * _WORD_BYTES
    body, rest = whole[:size], whole[size:]
    if body.storage_offset() % _WORD_BYTES or body.data_ptr() % _WORD_BYTES:
        body = body.clone()
    words = body.view(torch.int64)
    long = len(words) // _ROW * _ROW
    rows = words[:long].view(-1, _ROW)
    # An even number of signs of float64, the highest bits, is lost in sums of whole words.
    upper = [(some >> 32).sum(1) for some in rows.split(_ROWS)]
    sums = torch.cat((rows.sum(1), rows.sum(0), *upper, words[long:], rest.to(torch.int64)))
    # The upper bits go into the lower ones, which a product keeps: floats often differ in the upper ones alone.
    return _weighed(sums ^ (sums >> 32))


def _weighed(words: Tensor) -> int:
    """The sum of words (n,), each times a number of its place."""
    total = 0
    for part in words.split(_PART):
        total = total * _PRIME + int(torch.dot(part, _numbers()[: len(part)]))
    return total % (1 << 64)


@cache
def _numbers() -> Tensor:
    """A number of each place in a part, large ones that look random."""
    with torch.inference_mode(False):
        chance = torch.Generator().manual_seed(1)
        return torch.randint(1, 1 << 62, (_PART,), generator=chance, device="cpu", dtype=torch.int64)


_LEAST_SAMPLED = 1 << 8
_ONE_IN = 1 << 10
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sampled(tensor: Tensor) -> int:
    """Of one element in 1024 of a strided tensor, and of 256 if it has so many: one of a row (along the last dimension), of
    as many rows as that makes.

    Raises: as `fingerprint`.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    chosen = tensor[_sample(tensor.shape)].resolve_neg()
    bits = chosen.view(_INTEGERS[tensor.dtype.itemsize])
    return int((_folded(bits) if bits.dtype is torch.int64 else bits).sum(dtype=torch.int64))


def _folded(words: Tensor) -> Tensor:
    """Exponents lie in the highest bits, of which a sum of many equal changes (all numbers halved) would lose sight."""
    return words ^ (words >> 29)


@lru_cache(maxsize=4096)
def _sample(shape: torch.Size) -> tuple[slice, ...]:
    most = max(_LEAST_SAMPLED, math.prod(shape) // _ONE_IN)
    steps = [1] * len(shape)
    while True:
        sizes = [-(-size // step) for size, step in zip(shape, steps, strict=True)]
        if sizes and sizes[-1] > 1 and math.prod(sizes) > most:
            steps[-1] *= 2  # rows first
        elif math.prod(sizes) <= most:
            return tuple(slice(None, None, step) for step in steps)
        else:
            steps[sizes.index(max(sizes))] *= 2
