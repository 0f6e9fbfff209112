"""Fingerprints: equal for equal bytes, wherever these lie, and others for the same words in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_ptm.memory.fingerprint import fingerprint, sampled

CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.flip(0),
    lambda x: x.roll(1, 1),
    lambda x: x.roll(4, 0),
    lambda x: torch.cat((x[64:], x[:64])),
    lambda x: -x,
    lambda x: x.where(x != x[3, 3], 2 * x),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [16, 1024])
def test_what_changes_the_bytes_changes_the_fingerprint(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert fingerprint(x) == fingerprint(torch.cat((x, x))[size:])
    for change in CHANGES:
        assert torch.equal(change(x), x) or fingerprint(change(x).contiguous()) != fingerprint(x)


def test_two_words_that_differ_in_their_upper_bits_alone() -> None:
    x = torch.ones(1 << 17, dtype=torch.float64)
    prints = set()
    for at in range(0, len(x), 1 << 12):
        each = x.clone()
        each[at] = 0.5
        prints.add(fingerprint(each))
    assert len(prints) == 32


def test_a_sample_in_another_order() -> None:
    x = torch.randn(2, 64)
    assert sampled(x) == sampled(x.clone()) and sampled(x) != sampled(x.flip(0)) and sampled(x) != sampled(x.flip(1))
