"""Files of torch.save (zip archives): loaded with memory-mapped tensors, and verified against their checksums.

torch.load verifies no checksums, and zipfile maps no memory, so both are used. I1: opening a file reads its directory
and its pickle. Bytes of tensors are read when they are accessed, into pages that the system can evict.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.user_errors import unread

PIECE_BYTES = 4 << 20
"""Size of the pieces in which tensors are read; a multiple of every dtype's size."""

_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError, OverflowError)
"""Exceptions of zipfile for damaged archives: impossible names, versions and lengths."""


class Archive:
    """The directory of one file.

    Raises:
        CheckpointError: the file cannot be read, or was not written by torch.save.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._records = archive.infolist()
        except OSError as error:
            raise unread(path, error) from error
        except _DAMAGED as error:
            raise CheckpointError(
                f"{path} is no file of torch.save, or was cut short ({error}); give the path of a checkpoint (a file "
                "of torch before 1.6 has to be loaded and saved again first)"
            ) from error
        if not any(record.filename.endswith("/data.pkl") for record in self._records):
            raise CheckpointError(f"{path} is a zip archive, and no file of torch.save; give the path of a checkpoint")
        if any(record.compress_type != zipfile.ZIP_STORED for record in self._records):
            raise CheckpointError(
                f"{path} is an archive with compressed records, and no file of torch.save; give the path of a "
                "checkpoint"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of all records."""
        return sum(record.file_size for record in self._records)

    @property
    def has_checksums(self) -> bool:
        """Whether the records have checksums: torch.serialization.set_crc32_options(False) leaves zeros."""
        return any(record.CRC for record in self._records)

    def load(self, *, weights_only: bool = True) -> Any:
        """Returns the object that was saved. Its pickle is verified, and its tensors are memory-mapped.

        Raises:
            CheckpointError: it is damaged, or holds objects that `weights_only` does not load.
        """
        self._compare([record for record in self._records if record.filename.endswith("/data.pkl")])
        remedy = "give weights_only=False (--weights_only=false on the command line)"
        return load_mapped(self.path, weights_only=weights_only, remedy=remedy)

    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        """Reads all records and compares them with their checksums. `seen` is called with numbers of bytes read.

        Raises:
            CheckpointError: names the record that differs.
        """
        self._compare(self._records, seen)

    def _compare(self, records: list[zipfile.ZipInfo], seen: Callable[[int], None] = lambda count: None) -> None:
        if not self.has_checksums:
            return
        try:
            with zipfile.ZipFile(self.path) as archive:
                for record in records:
                    with archive.open(record) as file:  # verifies the checksum when its end is read
                        while piece := file.read(PIECE_BYTES):
                            seen(len(piece))
        except OSError as error:
            raise unread(self.path, error) from error
        except _DAMAGED as error:
            raise CheckpointError(
                f"{self.path}: the {record.file_size} bytes of {record.filename} are not those that were written "
                f"(their checksum differs, or the directory: {error}); use an earlier checkpoint, and check that disk"
            ) from error


def load_mapped(path: Path, *, weights_only: bool | None, remedy: str, map_location: Any = "cpu") -> Any:
    """Loads a file of torch.save. Tensors are memory-mapped if the format allows it (since torch 1.6).

    Args:
        remedy: what the error tells a user to do who trusts the file.

    Raises:
        CheckpointError: the file is damaged, no checkpoint, or has objects that `weights_only` does not load.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mapped or None)
    except OSError as error:
        raise unread(path, error) from error
    except Exception as error:  # torch raises many kinds of errors for damaged files
        raise _unreadable(path, error, weights_only is not False, remedy) from error


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor's elements in order, whatever its strides, as contiguous tensors of at most PIECE_BYTES."""
    if tensor.numel() * tensor.itemsize <= PIECE_BYTES:
        yield tensor.contiguous()
        return
    rows = max(1, PIECE_BYTES // (tensor[0].numel() * tensor.itemsize))
    for first in range(0, tensor.shape[0], rows):
        if rows > 1:
            yield tensor[first : first + rows].contiguous()
        else:
            yield from blocks(tensor[first])


_BEGINNINGS = (b"PK", b"\x80")
"""First bytes of what torch.save writes: zip archives, and the pickles of versions before 1.6."""


def _unreadable(path: Path, error: Exception, weights_only: bool, remedy: str) -> CheckpointError:
    with path.open("rb") as file:
        head = file.read(2)
    if head and not head.startswith(_BEGINNINGS):
        return CheckpointError(
            f"{path} was not written by torch.save: it begins with {head!r}; give the path of a checkpoint"
        )
    text = "" if isinstance(error, LookupError) else str(error).strip()  # the text of a LookupError is only a key
    first = text.splitlines()[0] if text else type(error).__name__
    if weights_only and "weights_only" in text.lower():
        return CheckpointError(
            f"{path} has objects that weights_only does not load, since they could run code, or is damaged ({first}); "
            f"if you trust it, {remedy}, or name their classes to torch.serialization.add_safe_globals"
        )
    return CheckpointError(f"{path} is no checkpoint, or is damaged ({first}); use an earlier one")
