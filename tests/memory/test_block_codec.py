"""The block codec: what decodes from codes encodes to itself, means are kept, nothing that counts becomes 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_ptm.memory import block_codec
from lightning_ptm.memory.block_codec import BLOCK_NUMEL, NOISE, SCALE_DTYPE, BlockCodec


def encoded(values: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    codes = torch.full((values.numel(),), 0xAA, dtype=torch.uint8)
    scales = torch.full((values.numel() // BLOCK_NUMEL,), 77, dtype=SCALE_DTYPE)
    BlockCodec().encode(values, codes, scales, noise)
    return codes, scales


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    values = torch.full((codes.numel(),), float("nan"))
    BlockCodec().decode(codes, scales, values)
    return values


def noise_of(numel: int, seed: int = 0) -> Tensor:
    return torch.randint(0, NOISE, (numel,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def every_scale_and_code() -> tuple[Tensor, Tensor]:
    """Blocks that have all codes between them, under every scale that encoding makes of finite numbers."""
    tops = {False: 0xFF, True: 0x7F}
    found = []
    for signed, top in tops.items():
        offsets = torch.arange(255 * 8 - top, dtype=torch.int16)
        found += [(~offsets if signed else offsets).repeat_interleave(256 // BLOCK_NUMEL)]
    scales = torch.cat(found)
    return torch.arange(256, dtype=torch.uint8).repeat(len(scales) * BLOCK_NUMEL // 256), scales


@pytest.mark.parametrize("noise", ["none", "least", "most"])
def test_what_any_codes_and_scales_stand_for_encodes_to_itself(noise: str) -> None:
    values = decoded(*every_scale_and_code())
    assert values.isfinite().all()
    given = {"none": None, "least": 0, "most": NOISE - 1}[noise]
    again = decoded(*encoded(values, None if given is None else torch.full(values.shape, given, dtype=torch.int32)))
    assert torch.equal(again, values)


def test_the_mean_over_many_draws_is_the_value() -> None:
    values = torch.randn(4 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(1))
    values[2 * BLOCK_NUMEL :].square_()
    draws = 4096
    many = values.repeat(draws)
    mean = decoded(*encoded(many, noise_of(many.numel()))).view(draws, -1).double().mean(0)
    # A gap is an eighth of a value at most, so an error of a mean is 1/16 / sqrt(draws) at most.
    assert ((mean - values).abs() / values.abs()).max() < 5 / 16 / draws**0.5
    nearest = decoded(*encoded(values)).double()
    assert ((nearest - values).abs() / values.abs()).max() > 5 / 16 / draws**0.5, "rounding to the nearest is no mean"


def test_no_code_is_further_than_a_gap_from_its_value() -> None:
    values = torch.randn(1 << 14, generator=torch.Generator().manual_seed(2)).exp()
    off = (decoded(*encoded(values, noise_of(values.numel()))) - values).abs() / values
    assert off.max() <= 1 / 8
    assert ((decoded(*encoded(values)) - values).abs() / values).max() <= 1 / 16


def test_a_block_without_negative_elements_keeps_what_is_small_above_zero() -> None:
    block = torch.zeros(BLOCK_NUMEL)
    block[:4] = torch.tensor([1e3, 1e-6, 1e-12, 1e-30])
    seen = decoded(*encoded(block, torch.zeros(BLOCK_NUMEL, dtype=torch.int32)))
    assert (seen[:4] > 0).all() and not seen[4:].any()
    assert abs(seen[1] / 1e-6 - 1) < 1 / 8


def test_blocks_do_not_touch_each_other() -> None:
    small, large = torch.randn(BLOCK_NUMEL) * 1e-9, torch.randn(BLOCK_NUMEL) * 1e9
    together = decoded(*encoded(torch.cat([small, large])))
    assert torch.equal(together, torch.cat([decoded(*encoded(small)), decoded(*encoded(large))]))


def test_infinite_and_undefined_elements_stay_what_they_are() -> None:
    block = torch.randn(BLOCK_NUMEL)
    block[3], block[5], block[7] = float("inf"), -float("inf"), float("nan")
    seen = decoded(*encoded(block, torch.full((BLOCK_NUMEL,), NOISE - 1, dtype=torch.int32)))
    assert seen[3] == float("inf") and seen[5] == -float("inf") and seen[7].isnan()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FFF0000, 0x7F800001], ids=hex)
@pytest.mark.parametrize("noise", [None, 0, NOISE - 1])
def test_any_kind_of_undefined_element_stays_undefined(bits: int, noise: int | None) -> None:
    """The first is what a GPU makes."""
    block = torch.ones(BLOCK_NUMEL)
    block.view(torch.int32)[3] = bits
    seen = decoded(*encoded(block, None if noise is None else torch.full((BLOCK_NUMEL,), noise, dtype=torch.int32)))
    assert seen.isnan().tolist() == [place == 3 for place in range(BLOCK_NUMEL)]


def test_how_many_elements_are_worked_on_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(64 * BLOCK_NUMEL)
    noise = noise_of(values.numel())
    codes, scales = encoded(values, noise)
    whole = decoded(codes, scales)
    monkeypatch.setattr(block_codec, "_STRIP_NUMEL", 3 * BLOCK_NUMEL)
    in_strips = encoded(values, noise)
    assert torch.equal(in_strips[0], codes) and torch.equal(in_strips[1], scales)
    assert torch.equal(decoded(codes, scales), whole)
