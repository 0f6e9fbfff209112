"""safetensors files as the library of that name reads and writes them, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.tensors import Mapped, lay_out, read_layout
from lightning_ptm.terms import BLOCK_BYTES

TENSORS = {
    "scalar": torch.tensor(3.5),
    "odd": torch.arange(7, dtype=torch.uint8),
    "matrix": torch.randn(5, 3),
    "half": torch.randn(4, 9).bfloat16(),
    "none": torch.empty(0, 4),
    "größe": torch.arange(6).view(2, 3),
}


def write(path: Path) -> None:
    layout = lay_out([(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()], {"format": "pt"})
    content = bytearray(layout.header.ljust(layout.size_bytes, b"\0"))
    for stored in layout.tensors:
        raw = TENSORS[stored.name].contiguous().reshape(-1).view(torch.uint8)
        content[stored.start : stored.stop] = bytes(raw.tolist())
    path.write_bytes(content)


def test_the_librarys_reader_opens_our_files(tmp_path: Path) -> None:
    write(tmp_path / "ours.safetensors")
    loaded = load_file(tmp_path / "ours.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], value) for name, value in TENSORS.items())
    assert len(lay_out([("a", torch.float32, (2,))]).header) % BLOCK_BYTES == 0


def test_we_open_the_librarys_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    mapped = Mapped(tmp_path / "theirs.safetensors")
    assert set(mapped.names()) == set(TENSORS)
    for name, value in TENSORS.items():
        assert torch.equal(mapped.tensor(name), value) and mapped.tensor(name).dtype is value.dtype
        # Writing to it changes neither the file nor what others read.
    mapped.tensor("matrix").zero_()
    assert torch.equal(load_file(tmp_path / "theirs.safetensors")["matrix"], TENSORS["matrix"])


def test_a_tensor_outlives_the_file_object(tmp_path: Path) -> None:
    write(tmp_path / "ours.safetensors")
    tensor = Mapped(tmp_path / "ours.safetensors").tensor("matrix")
    (tmp_path / "ours.safetensors").unlink()
    assert torch.equal(tensor, TENSORS["matrix"])


def test_it_is_known_which_tensor_has_a_byte(tmp_path: Path) -> None:
    write(tmp_path / "ours.safetensors")
    layout = read_layout(tmp_path / "ours.safetensors")
    assert layout.tensor_at(8) == "the header"
    for stored in layout.tensors:
        if stored.stop > stored.start:
            assert layout.tensor_at(stored.start) == layout.tensor_at(stored.stop - 1) == stored.name


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors file"),
        (b"PK\3\4" + b"\0" * 100, "no safetensors file"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "no safetensors file"),
        (b"\x05" + b"\0" * 7 + b"hello", "header is invalid"),
        (header([1, 2]), "header is invalid"),
        (header({"a": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
        (header({"a": {**GOOD, "dtype": "F99"}}) + b"\0" * 8, "F99"),
        (header({"a": GOOD}) + b"\0" * 7, "cut short or damaged"),
        (header({"a": {**GOOD, "shape": [3]}}) + b"\0" * 8, "cut short or damaged"),
        (header({"a": {**GOOD, "data_offsets": [4, 12]}}) + b"\0" * 12, "cut short or damaged"),
        (header({"a": GOOD, "b": GOOD}) + b"\0" * 16, "cut short or damaged"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Mapped(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_layout(tmp_path / "none.safetensors")


def test_a_dtype_without_a_name() -> None:
    with pytest.raises(CheckpointError, match="complex128"):
        lay_out([("a", torch.complex128, (2,))])
