"""State tensors of a flat, and how much of them travels at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decided_by_hand import BF16, FP32, LOCK_FREE, MIXED, PAGE, decided, sgd

from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.deciding.state_tensors import chunk_bytes, own_state_bytes, scratch_bytes

Kept = tuple[What, str, torch.dtype]
PARAMETER, GRADIENT = (What.PARAMETERS, "parameters", FP32), (What.GRADIENTS, "gradient", FP32)
MOMENTS = [(What.STATES, "exp_avg", FP32), (What.STATES, "exp_avg_sq", FP32)]
MASTER = (What.MASTERS, "master", FP32)
HALF = [(What.PARAMETERS, "parameters", BF16), (What.GRADIENTS, "gradient", BF16)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [*MOMENTS, PARAMETER, GRADIENT]),
        ({"optimizers": sgd}, [PARAMETER, GRADIENT]),
        ({"optimizers": []}, [PARAMETER]),
        (MIXED, [MASTER, *MOMENTS, *HALF]),
        ({**MIXED, "sums_gradients": True}, [MASTER, *MOMENTS, HALF[0], GRADIENT]),
        (LOCK_FREE, [MASTER, *MOMENTS, PARAMETER, GRADIENT]),
    ],
)
def test_what_is_kept_of_a_flat(options: dict[str, Any], expected: list[Kept]) -> None:
    found = decided(**options)
    for flat in found.layout.flats:
        kept = found.state_tensors[flat.index]
        assert [(column.what, column.layout.name, column.layout.dtype) for column in kept] == expected
        assert {column.layout.numel for column in kept} == {flat.shard_numel}


@pytest.mark.parametrize(
    ("options", "pages"),
    [
        ({}, 4),
        ({"optimizers": sgd}, 2),
        ({"optimizers": []}, 0),
        (MIXED, 3 + 2),
        ({**MIXED, "sums_gradients": True}, 4 + 1),
    ],
)
def test_staging_of_a_chunk(options: dict[str, Any], pages: int) -> None:
    """A page of each at most, whatever the dtype; those of 16 bits fill half of theirs."""
    assert chunk_bytes(decided(**options)) == pages * PAGE


@pytest.mark.parametrize(("word", "size"), [("bf16", 2 * 16384), ("int8", 20480)])
def test_encoded_states_take_what_lies_in_pages_and_scratch_for_what_they_stand_for(word: str, size: int) -> None:
    """A chunk of 16384 elements takes two bytes each, or one and a scale of two for each 64, up to a disk block's
    end."""
    found = decided(optimizer_state_dtype=word)
    own = own_state_bytes(found)
    for flat in found.layout.flats:
        (sizes,) = own[flat.index]
        chunks, rest = divmod(flat.shard_numel, 16384)
        assert not rest and sizes == (chunks * size,) * 2
        kept = {column.layout.name: column for column in found.state_tensors[flat.index]}
        assert kept["exp_avg"].layout.numel * kept["exp_avg"].layout.dtype.itemsize == sizes[0]
        assert kept["parameters"].layout.numel == flat.shard_numel
    assert scratch_bytes(found) == 2 * PAGE
    assert scratch_bytes(decided()) == 0
