"""Files of a sharded checkpoint's folder."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lightning_ptm.checkpoints.saving import StateFiles
from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.index import Seal


@dataclass
class Kind:
    unit: str
    kind: str
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]


def test_a_file_for_each_kind_of_each_unit() -> None:
    states = [("weight", torch.float32, (2, 3))]
    files = StateFiles.of([Kind("", "parameters", states), Kind("a", "parameters", []), Kind("", "exp/avg", states)])
    names = ["0000.parameters.safetensors", "0001.parameters.safetensors", "0000.exp%2Favg.safetensors"]
    assert [file.name for file in files.files] == names
    assert [(file.unit, file.kind) for file in files.files] == [
        ("", "parameters"),
        ("a", "parameters"),
        ("", "exp/avg"),
    ]
    assert files.files[0].size_bytes == len(files.layouts[0].header) + 24
    assert files.seals() == {name: Seal.of(layout.header) for name, layout in zip(names, files.layouts, strict=True)}


def test_a_dtype_that_files_cannot_hold_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"weight has dtype torch\.complex128"):
        StateFiles.of([Kind("", "parameters", [("weight", torch.complex128, (1,))])])
