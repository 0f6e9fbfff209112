"""safetensors files: their headers, and memory-mapped tensors (https://huggingface.co/docs/safetensors).

A file has 8 bytes (the header's length, little endian), a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors' bytes, end to end, without gaps. No pickle, no code.
I1: headers that we write are padded with spaces to whole blocks, so that the first tensor can be written with direct
I/O.
I2: a header that is read is checked against the size of its file: no offset is outside of it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.user_errors import entries, items, number, parsed, regular, unread
from lightning_ptm.storage.user_errors import text as as_text
from lightning_ptm.terms import BLOCK_BYTES

_LENGTH_BYTES = 8
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)
"""Python 3.11 has no name for it."""
_MOST_DIMENSIONS = 64
"""Limit of torch's iterators over tensors."""
_MOST_HEADER_BYTES = 1 << 30
"""Limit for a header that is read. The format's own limit is 100 MB, which a model of millions of tensors exceeds;
damaged lengths are mostly far larger."""

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file.

    Args:
        name: unique in the file.
        dtype, shape: as in torch.
        start, stop: its bytes, from the beginning of the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a file and their offsets.

    Args:
        header: its first bytes.
        tensors: its tensors, in the order of their bytes.
        size_bytes: size of the whole file.
        metadata: strings by name.
    """

    header: bytes
    tensors: tuple[Stored, ...]
    size_bytes: int
    metadata: Mapping[str, str]

    def tensor_at(self, offset: int) -> str:
        """Returns the name of the tensor that has this byte of the file; "the header" for bytes before the first
        tensor."""
        for tensor in self.tensors:
            if tensor.start <= offset < tensor.stop:
                return tensor.name
        return "the header"


def lay_out(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> Layout:
    """Returns the layout of a new file with these tensors (name, dtype, shape), in this order.

    Raises:
        CheckpointError: a dtype has no name in the format.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: list[tuple[str, torch.dtype, tuple[int, ...], int, int]] = []
    stop = 0
    for name, dtype, shape in tensors:
        if dtype not in CODES:
            raise CheckpointError(
                f"{name} has dtype {dtype}, which safetensors files cannot hold; save it in another dtype"
            )
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        places.append((name, dtype, shape, start, stop))
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(_LENGTH_BYTES + len(text)) // BLOCK_BYTES) * BLOCK_BYTES - _LENGTH_BYTES
    header = length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
    stored = tuple(Stored(name, dtype, shape, len(header) + a, len(header) + b) for name, dtype, shape, a, b in places)
    return Layout(header, stored, len(header) + stop, dict(metadata or {}))


def read_layout(path: Path) -> Layout:
    """Reads and checks a file's header (I2).

    Raises:
        CheckpointError: it is no safetensors file, it is cut short, or its header contradicts itself.
    """
    try:
        with regular(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is no safetensors file, or was cut short at {size} bytes; give another file, or fetch "
                    "it again"
                )
            text = file.read(length)
    except OSError as error:
        raise unread(path, error) from error
    begin = _LENGTH_BYTES + length
    try:
        held = entries(parsed(text))
        metadata = {name: as_text(value) for name, value in entries(held.pop("__metadata__", {})).items()}
        tensors = [_stored(name, entries(entry), begin) for name, entry in held.items()]
    except KeyError as error:
        raise CheckpointError(
            f"{path} is damaged: the entry of a tensor in its header lacks {error}, so it cannot be loaded; fetch or save "
            "it again"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no safetensors file: its header is invalid ({error}); give another file, or fetch it again"
        ) from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    position = begin
    for tensor in tensors:
        wanted = math.prod(tensor.shape) * tensor.dtype.itemsize
        if tensor.start != position or tensor.stop - tensor.start != wanted or tensor.stop > size:
            raise CheckpointError(
                f"{path}: {tensor.name} should have {wanted} bytes from {position} on; its header says {tensor.start} "
                f"to {tensor.stop}, and the file has {size}; it was cut short or damaged: use another file"
            )
        position = tensor.stop
    return Layout(length.to_bytes(_LENGTH_BYTES, "little") + text, tuple(tensors), size, metadata)


def _stored(name: str, entry: dict[str, Any], begin: int) -> Stored:
    """Returns the tensor of a header's entry. Raises KeyError, ValueError."""
    shape = tuple(map(number, items(entry["shape"])))
    # A product that torch can represent, also for a tensor without elements.
    number(math.prod(max(1, size) for size in shape))
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions")
    start, stop = items(entry["data_offsets"], 2)
    return Stored(name, _DTYPES[as_text(entry["dtype"])], shape, begin + number(start), begin + number(stop))


class Mapped:
    """A file's tensors as views of a private memory mapping. Bytes are read when they are accessed, into pages that the
    system can evict. The mapping lives as long as any of the tensors.

    Args:
        layout: the file's, if it is known.

    Raises:
        CheckpointError: as `read_layout`.
    """

    def __init__(self, path: Path, layout: Layout | None = None) -> None:
        self.path = path
        self.layout = layout or read_layout(path)
        self._by_name = {tensor.name: tensor for tensor in self.layout.tensors}
        try:
            with path.open("rb") as file:
                # Private and writable, since torch wants writable memory; writes would stay in this process. There are
                # none, so no swap space is reserved: a file may be larger than RAM.
                self._mapping = mmap.mmap(
                    file.fileno(),
                    self.layout.size_bytes,
                    flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        except (OSError, ValueError) as error:  # ValueError: it was truncated after its header was read
            raise unread(path, error if isinstance(error, OSError) else OSError(str(error))) from error

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def names(self) -> Sequence[str]:
        """Returns the tensors' names in the order of their bytes."""
        return [tensor.name for tensor in self.layout.tensors]

    def tensor(self, name: str) -> torch.Tensor:
        """Returns one tensor, whose elements are read from the file when they are accessed."""
        stored = self._by_name[name]
        if stored.start == stored.stop:
            return torch.empty(stored.shape, dtype=stored.dtype)
        whole = torch.frombuffer(
            self._mapping, dtype=torch.uint8, count=stored.stop - stored.start, offset=stored.start
        )
        if whole.data_ptr() % stored.dtype.itemsize:
            whole = whole.clone()  # headers of other programs may leave tensors unaligned
        return whole.view(stored.dtype).view(stored.shape)


def sync_folder(path: Path) -> None:
    """Syncs a folder, so that new names in it are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
