"""Fingerprints of tensors: of equal bytes equal, of others not; samples find what changes rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_ptm.memory.fingerprint import _sample, fingerprint, has_sample, sample_of

LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda whole: whole,
    "transposed": lambda whole: whole.T,
    "columns": lambda whole: whole[:, 1:5],
    "every third row": lambda whole: whole[::3],
    "from an odd element": lambda whole: whole.view(-1)[1:8],
    "bytes": lambda whole: whole.view(torch.uint8)[:3, :5],
    "halves": lambda whole: whole.bfloat16(),
    "complex": lambda whole: torch.view_as_complex(whole.reshape(-1, 2)),
    "one number": lambda whole: whole[2, 3],
    "none": lambda whole: whole[:0],
}


@pytest.mark.parametrize("look", LOOKS)
def test_equal_bytes_have_equal_fingerprints_and_one_bit_makes_another(look: str) -> None:
    whole = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    view = LOOKS[look](whole)
    copy = view.clone()
    assert fingerprint(view) == fingerprint(copy)
    if copy.numel():
        flat = copy.view(-1) if copy.is_contiguous() else copy.contiguous().view(-1)
        changed = flat.clone()
        changed.view(torch.uint8)[-1] ^= 1
        assert fingerprint(changed) != fingerprint(flat)


def test_it_is_of_numbers_that_are_none_too() -> None:
    nan = torch.full((5,), float("nan"))
    assert fingerprint(nan) == fingerprint(nan.clone())
    other = nan.clone()
    other[3] = 0
    assert fingerprint(other) != fingerprint(nan)


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (4096,), (3, 5, 700), (64, 64, 64), (2, 1, 1, 5000), (0, 4), (1 << 21,)]
)
def test_a_sample_is_small_and_spread_over_all(shape: tuple[int, ...]) -> None:
    values = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32)[: torch.Size(shape).numel()].view(
        shape
    )
    chosen = values[_sample(values.shape)]
    assert chosen.numel() <= max(256, values.numel() // 1024)
    assert chosen.numel() >= min(values.numel(), 128)
    if values.numel():
        assert chosen.min() == 0 and chosen.max() >= 0.4 * (values.numel() - 1)
    assert has_sample(values, sample_of(values.clone()))
    assert not values.numel() or not has_sample(values, sample_of(values + 1))


def test_a_sample_finds_a_changed_row_of_few() -> None:
    values = torch.randn(8, 16, 64)
    for row in range(16):
        other = values.clone()
        other[3, row] += 1
        assert not has_sample(other, sample_of(values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [64, 4096, 1 << 20])
def test_all_numbers_halved_are_others(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert fingerprint(values * 0.5) != fingerprint(values)
    assert not has_sample(values * 0.5, sample_of(values))


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
