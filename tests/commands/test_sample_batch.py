"""Batches on the meta device, of samples and of shapes."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from lightning_ptm.commands.sample_batch import meta_batch
from lightning_ptm.errors import ConfigError

Pair = namedtuple("Pair", "x y")


def shown(batch: Any) -> Any:
    """Shapes and dtypes in place of tensors."""
    if isinstance(batch, torch.Tensor):
        assert batch.is_meta
        return (*batch.shape, str(batch.dtype).removeprefix("torch."))
    if isinstance(batch, dict):
        return {name: shown(part) for name, part in batch.items()}
    return [shown(part) for part in batch]


@pytest.mark.parametrize(
    ("batch", "dtype", "expected"),
    [
        ((8, 2048), "int64", (8, 2048, "int64")),
        ([8, 2], torch.int32, (8, 2, "int32")),
        ("8x3x4", None, (8, 3, 4, "float32")),
        ("8x3x4, 8:int64", "bfloat16", [(8, 3, 4, "bfloat16"), (8, "int64")]),
        ("ids=2x4,labels=2:int64", "int32", {"ids": (2, 4, "int32"), "labels": (2, "int64")}),
        ({"x": (2, 3), "y": torch.zeros(2, dtype=torch.int64)}, None, {"x": (2, 3, "float32"), "y": (2, "int64")}),
        (((2, 3), "2:int64"), None, [(2, 3, "float32"), (2, "int64")]),
        ((torch.zeros(2, 3), torch.zeros(2)), None, [(2, 3, "float32"), (2, "float32")]),
        (Pair(torch.zeros(2, 3), torch.zeros(2)), None, [(2, 3, "float32"), (2, "float32")]),
    ],
)
def test_batches(batch: Any, dtype: Any, expected: Any) -> None:
    assert shown(meta_batch(batch, dtype)) == expected
    if isinstance(batch, (Pair, dict)):
        assert type(meta_batch(batch, dtype)) is type(batch)


@pytest.mark.parametrize(
    ("batch", "dtype", "words"),
    [
        ("8y2048", None, "'8y2048' is no shape; give a shape such as '8x2048:int64', or several"),
        ("", None, "is no shape"),
        ("a=2,3", None, "where some parts have names and some have none"),
        ((0, 3), None, r"batch is \(0, 3\), and a batch has at least one element"),
        ("2x3", "long_int", "dtype is 'long_int'; give a name of torch's, such as 'int64'"),
        ("2x3:tensor", None, "dtype is 'tensor'"),
        ([], None, r"batch is \[\], which has no tensor"),
        (5, None, "batch is 5, which has no tensor"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, dtype: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        meta_batch(batch, dtype)
