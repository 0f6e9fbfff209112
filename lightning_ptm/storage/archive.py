"""Files that torch.save has written (zip archives), with their tensors left where they are: named, placed, and read piece by
piece.

Knows files and tensors; not what is in a checkpoint.
I1: opening one reads its directory and its pickle, never a tensor's bytes, so it costs no memory that grows with them.
    Contiguous tensors are read into a buffer; others (a transposed matrix) through a mapping of their record, whose pages
    are the system's to take back.
I2: a record that has been read to its end was compared with the checksum (CRC-32) that the archive has of it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.ranges import read_fully
from lightning_ptm.storage.user_errors import unread
from lightning_ptm.torch_internals import offset_in_checkpoint

PIECE_BYTES = 4 << 20
"""Of a tensor that are in memory at once; a multiple of every dtype's size."""

_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the archive: bytes [start, stop) of the file, and their CRC-32."""

    name: str
    start: int
    stop: int
    crc: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the archive: a view of the elements in one record.

    Args:
        name: for messages.
        record: what holds it.
        offset: its first element, counted in the record's elements.
        stride: in elements; a tensor need not be contiguous.
    """

    name: str
    record: Record
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


class Archive:
    """An archive's directory.

    Raises:
        CheckpointError: it cannot be read, or torch.save has not written it so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as directory:
                self.records = tuple(_record(path, file.fileno(), info) for info in directory.infolist())
        except OSError as error:
            raise unread(path, error) from error
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError, struct.error) as error:
            # The last ones are a damaged directory: names, versions and lengths that cannot be.
            raise CheckpointError(
                f"{path} is no file of torch.save, or was cut short ({error}); give the path of a checkpoint (one of a "
                f"torch before 1.6 has to be loaded and saved again first)"
            ) from error
        if not any(record.name.endswith("/data.pkl") for record in self.records):
            raise CheckpointError(f"{path} is a zip archive, and no file of torch.save; give the path of a checkpoint")
        self._by_start = {record.start: record for record in self.records if record.stop > record.start}
        self._checked: set[str] = set()

    @property
    def size_bytes(self) -> int:
        """Of all records."""
        return sum(record.stop - record.start for record in self.records)

    @property
    def has_checksums(self) -> bool:
        """False where it was saved with torch.serialization.set_crc32_options(False), which leaves zeros."""
        return any(record.crc for record in self.records)

    def load(self, *, weights_only: bool = True) -> Any:
        """The object that was saved, with all tensors on the meta device; `place` finds those.

        Raises:
            CheckpointError: it is damaged, of another byte order, or holds objects that `weights_only` does not load.
        """
        self._check_byte_order()  # torch.load would swap bytes of tensors that it has not read, and crash
        for record in self.records:
            if record.name.endswith("/data.pkl"):
                self._check_once(record)  # torch.load does not
        try:
            return torch.load(self.path, map_location="meta", weights_only=weights_only)
        except Exception as error:  # torch has an error of its own for each way in which a file can be damaged
            remedy = "give weights_only=False (--weights_only=false on the command line)"
            raise unreadable(self.path, error, weights_only=weights_only, remedy=remedy) from error

    def place(self, name: str, tensor: Tensor) -> Placed:
        """Where a tensor of what `load` returned lies.

        Raises:
            CheckpointError: it is of a kind that has no plain elements (sparse, quantized), or lies outside of the file.
        """
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{self.path}: {name} is {tensor.layout} of {tensor.dtype}, and only plain tensors can be exported; make "
                f"it one before it is saved"
            )
        storage = tensor.untyped_storage()
        record = self._by_start.get(offset_in_checkpoint(storage)) if storage.nbytes() else _NOTHING
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
        if record is None or (tensor.numel() and (last + 1) * tensor.itemsize > record.stop - record.start):
            raise CheckpointError(f"{self.path}: {name} lies outside of the file; it is damaged")
        return Placed(
            name, record, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def pieces(self, placed: Placed) -> Iterator[Tensor]:
        """Its elements in order, as 1-D tensors of at most PIECE_BYTES; each is good until the next one is asked for.

        Raises:
            CheckpointError: the file cannot be read, or (at the latest after the last piece) is damaged.
        """
        size = math.prod(placed.shape) * placed.dtype.itemsize
        start = placed.record.start + placed.offset * placed.dtype.itemsize
        if size == 0:
            return
        if not placed.contiguous:
            self._check_once(placed.record)
            yield from self._strided(placed)
        elif (start, start + size) == (placed.record.start, placed.record.stop):
            yield from self._checked_pieces(placed.record, placed.dtype, placed.name)
            self._checked.add(placed.record.name)
        else:
            self._check_once(placed.record)
            for view in _read(self.path, start, start + size):
                yield torch.frombuffer(view, dtype=placed.dtype)

    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        """Compare all records with their checksums. `seen` is told how many more bytes were read.

        Raises:
            CheckpointError: with the record and the range that differ.
        """
        for record in self.records:
            for piece in self._checked_pieces(record, torch.uint8, record.name):
                seen(piece.numel())

    def _checked_pieces(self, record: Record, dtype: torch.dtype, name: str) -> Iterator[Tensor]:
        crc = 0
        for view in _read(self.path, record.start, record.stop):
            crc = zlib.crc32(view, crc)
            yield torch.frombuffer(view, dtype=dtype)
        if crc != record.crc and self.has_checksums:
            raise CheckpointError(
                f"{self.path}: bytes {record.start} to {record.stop}, which are {name}, are not those that were written "
                f"(their checksum differs); use an earlier checkpoint, and check that disk"
            )

    def _check_once(self, record: Record) -> None:
        if record.name not in self._checked:
            for _ in self._checked_pieces(record, torch.uint8, record.name):
                pass
            self._checked.add(record.name)

    def _check_byte_order(self) -> None:
        for record in self.records:
            if record.name.endswith("/byteorder"):
                order = b"".join(map(bytes, _read(self.path, record.start, record.stop))).decode(errors="replace")
                if order != sys.byteorder:
                    raise CheckpointError(
                        f"{self.path} was written on a machine of another byte order ({order}) than this one's "
                        f"({sys.byteorder}); load it with torch.load and save it again here"
                    )

    def _strided(self, placed: Placed) -> Iterator[Tensor]:
        record = placed.record
        begin = record.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            # Private and writable: torch wants memory that could be written to.
            mapping = mmap.mmap(
                file.fileno(),
                record.stop - begin,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=begin,
            )
        whole = torch.frombuffer(mapping, dtype=torch.uint8, offset=record.start - begin)
        view = whole.view(placed.dtype).as_strided(placed.shape, placed.stride, placed.offset)
        for part in _blocks(view):
            yield part.reshape(-1)
            mapping.madvise(mmap.MADV_DONTNEED)  # pages that were read would stay until the last piece


_NOTHING = Record("", 0, 0, 0)


def _record(path: Path, descriptor: int, info: zipfile.ZipInfo) -> Record:
    head = os.pread(descriptor, _LOCAL_HEADER_BYTES, info.header_offset)
    if len(head) < _LOCAL_HEADER_BYTES or not head.startswith(b"PK\3\4"):
        raise CheckpointError(f"{path}: its directory has {info.filename} where it is not; it is damaged")
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{path} is an archive with compressed records, and no file of torch.save; give the path of a checkpoint"
        )
    name, extra = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
    start = info.header_offset + _LOCAL_HEADER_BYTES + name + extra
    return Record(info.filename, start, start + info.file_size, info.CRC)


def _read(path: Path, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) of a file in pieces, all in one buffer."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, stop - start)))
    with path.open("rb", buffering=0) as file:
        for position in range(start, stop, PIECE_BYTES):
            view = buffer[: min(PIECE_BYTES, stop - position)]
            read_fully(file.fileno(), path, view, position)
            yield view


def _blocks(view: Tensor) -> Iterator[Tensor]:
    """A tensor of any strides as contiguous blocks of at most PIECE_BYTES, in the order of its elements."""
    if view.numel() * view.itemsize <= PIECE_BYTES:
        yield view.contiguous()
        return
    rows = max(1, PIECE_BYTES // (view[0].numel() * view.itemsize))
    for first in range(0, view.shape[0], rows):
        if rows > 1:
            yield view[first : first + rows].contiguous()
        else:
            yield from _blocks(view[first])


_BEGINNINGS = (b"PK", b"\x80")
"""Of what torch.save writes: archives, and the pickles of versions before 1.6."""


def unreadable(path: Path, error: Exception, *, weights_only: bool, remedy: str) -> CheckpointError:
    """What torch.load has raised, in our words. `remedy` is what someone who trusts the file may do."""
    if isinstance(error, OSError):
        return unread(path, error)
    with path.open("rb") as file:
        head = file.read(2)
    if head and not head.startswith(_BEGINNINGS):
        return CheckpointError(
            f"{path} was not written by torch.save: it begins with {head!r}; give the path of a checkpoint"
        )
    text = "" if isinstance(error, LookupError) else str(error).strip()  # whose text is a key alone
    first = text.splitlines()[0] if text else type(error).__name__
    if weights_only and "weights_only" in text.lower():
        return CheckpointError(
            f"{path} holds objects that are not loaded from a file that may not be trusted, or is damaged ({first}); if you "
            f"trust it, {remedy}, or name their classes to torch.serialization.add_safe_globals"
        )
    return CheckpointError(f"{path} is no checkpoint, or is damaged ({first}); use an earlier one")
