"""Fingerprints of tensors' bytes: equal bytes have equal ones, and others almost never do.

A fingerprint is the sum of the bytes as 64-bit integers. It is computed at the speed of memory, by all threads of torch, and
does not depend on their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BYTES = 8


@torch.no_grad()
def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Of the elements of a dense tensor in RAM, in the order of its memory: the sum of its 8-byte words, and of the rest.

    Raises:
        RuntimeError: it has no bytes to read (meta, sparse, batched).
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)  # an expanded dimension says the same again and again
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    whole = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
    words = whole.numel() // _WORD_BYTES * _WORD_BYTES
    body, rest = whole[:words], whole[words:]
    if body.storage_offset() % _WORD_BYTES or body.data_ptr() % _WORD_BYTES:
        body = body.clone()
    return int(body.view(torch.int64).sum()), int(rest.sum(dtype=torch.int64))
