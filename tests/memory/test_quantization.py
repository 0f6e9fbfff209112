"""Numbers to codes and back, beside a reference that looks at one element at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_ptm.memory import quantization
from lightning_ptm.memory.quantization import decode, encode, room_before_codes, rounded
from lightning_ptm.terms import ALIGN_NUMEL, CODES

NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1"
)
"""The NF4 values as the QLoRA paper's appendix E prints them."""

LEVELS = {"int8": [level / 127 for level in range(-127, 128)], "nf4": [float(level) for level in NF4.split()]}


def one_by_one(values: Tensor, code: str) -> Tensor:
    """Each value of a block the nearest level, times the largest absolute value."""
    found = []
    for block in values.double().split(ALIGN_NUMEL):
        most = float(block.abs().max())
        for value in block.tolist():
            nearest = min(LEVELS[code], key=lambda level: abs(level - (value / most if most else 0.0)))
            found.append(torch.tensor(nearest, dtype=torch.float32) * most)
    return torch.stack(found).to(values.dtype)


def numbers(dtype: torch.dtype, blocks: int = 5, seed: int = 0) -> Tensor:
    values = torch.randn(blocks * ALIGN_NUMEL, generator=torch.Generator().manual_seed(seed)) * 0.02
    values[:ALIGN_NUMEL] = 0
    values[-7:] = 0
    values[ALIGN_NUMEL] = -3.0  # the largest is negative
    return values.to(dtype)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_value_becomes_the_nearest_level_of_its_block(code: str, dtype: torch.dtype) -> None:
    values = numbers(dtype)
    assert torch.equal(rounded(values, CODES[code]), one_by_one(values, code))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_that_came_from_codes_give_the_same_codes(code: str, dtype: torch.dtype) -> None:
    values = rounded(numbers(dtype, 400, seed=1), CODES[code])
    first, again = (torch.empty(CODES[code].bytes_of(len(values)), dtype=torch.uint8) for _ in range(2))
    encode(values, CODES[code], first)
    encode(rounded(values, CODES[code]), CODES[code], again)
    assert torch.equal(first, again) and torch.equal(rounded(values, CODES[code]), values)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_no_number_is_none_afterwards_and_no_other_block(strange: float) -> None:
    values = numbers(torch.float32)
    values[2 * ALIGN_NUMEL + 3] = strange
    for code in CODES.values():
        missing = rounded(values, code).isnan().view(-1, ALIGN_NUMEL)
        assert missing.sum(-1).tolist() == [0, 0, ALIGN_NUMEL, 0, 0]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [1, 63, 64, 65, 1000])
def test_codes_at_the_end_of_their_values_memory_are_decoded_in_place(
    code: str, dtype: torch.dtype, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_AT_ONCE_BLOCKS", 128)  # parts, as of a long flat
    values = numbers(dtype, blocks + 2, seed=2)
    memory = torch.empty(values.nbytes, dtype=torch.uint8)
    start = room_before_codes(values.nbytes, CODES[code].bytes_of(len(values)))
    here = memory[start:][: CODES[code].bytes_of(len(values))]
    encode(values, CODES[code], here)
    decode(here, CODES[code], memory.view(dtype))
    assert torch.equal(memory.view(dtype), rounded(values, CODES[code]))
    assert start % 4096 == 0
