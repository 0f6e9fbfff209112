"""Fingerprints of tensors: equal bytes have equal fingerprints, different bytes almost always different ones.

The bytes are arranged as rows of words. A fingerprint combines the sums of rows and of columns, each multiplied by a
number that depends on its position, so that the same words in another order give another fingerprint. It is computed at
memory bandwidth, by all threads of torch, and does not depend on their number. A sample of the elements (`sample_of`)
takes microseconds and detects changes of whole rows, such as anything that passes through a matrix product.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

_WORD_BYTES = 8
_ROW = 1 << 12
_ROWS = 1 << 4
"""Rows that are summed together: they stay in a core's caches."""
_PART = 1 << 16
_PRIME = (1 << 61) - 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Returns the fingerprint of a dense tensor in RAM, over its elements in memory order.

    Raises:
        RuntimeError: it has no bytes to read (meta, sparse, batched).
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)  # an expanded dimension repeats the same bytes
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    whole = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
    size = whole.numel() // _WORD_BYTES * _WORD_BYTES
    body, rest = whole[:size], whole[size:]
    if body.storage_offset() % _WORD_BYTES or body.data_ptr() % _WORD_BYTES:
        body = body.clone()
    words = body.view(torch.int64)
    long = len(words) // _ROW * _ROW
    rows = words[:long].view(-1, _ROW)
    # Sums of whole words lose an even number of changes of the highest bit, the sign of a float64.
    upper = [(some >> 32).sum(1) for some in rows.split(_ROWS)]
    sums = torch.cat((rows.sum(1), rows.sum(0), *upper, words[long:], rest.to(torch.int64)))
    # Folds the upper bits into the lower ones, which a product keeps: floats often differ in the upper bits only.
    return _weighed(sums ^ (sums >> 32))


def _weighed(words: Tensor) -> int:
    """Returns the sum of words (n,), each multiplied by the number of its position."""
    total = 0
    for part in words.split(_PART):
        total = total * _PRIME + int(torch.dot(part, _numbers()[: len(part)]))
    return total % (1 << 64)


@cache
def _numbers() -> Tensor:
    """Returns a large pseudorandom number for each position in a part."""
    with torch.inference_mode(False):
        chance = torch.Generator().manual_seed(1)
        return torch.randint(1, 1 << 62, (_PART,), generator=chance, device="cpu", dtype=torch.int64)


_LEAST_SAMPLED = 1 << 8
_ONE_IN = 1 << 10
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_of(tensor: Tensor) -> Tensor:
    """Returns a copy of the bits of one element in 1024 of a strided tensor, but of at least 256 elements if it has so many.

    The sample thins the last dimension first, so that it covers as many rows as possible.

    Raises: as `fingerprint`.
    """
    return _sampled_bits(tensor).clone(memory_format=torch.contiguous_format)


def has_sample(tensor: Tensor, sample: Tensor) -> bool:
    """Returns whether a tensor of the same shape and dtype has the bits that `sample_of` copied. Raises: as `fingerprint`."""
    return torch.equal(_sampled_bits(tensor), sample)


def _sampled_bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor[_sample(tensor.shape)].view(_INTEGERS[tensor.dtype.itemsize])


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
