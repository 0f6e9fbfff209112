"""torch.save's files (zip archives): opened with their tensors mapped, and compared with the checksums that they hold.

torch.load compares no checksums, and zipfile maps nothing, so both are used. I1: opening one reads its directory and its
pickle; tensors' bytes stay in the file until they are read, and then in pages that the system takes back.
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
"""Of a tensor that are handed out at once; a multiple of every dtype's size."""

_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError, OverflowError)
"""What zipfile raises of a damaged archive: names, versions and lengths that cannot be."""


class Archive:
    """The directory of one file.

    Raises:
        CheckpointError: it cannot be read, or torch.save has not written it so.
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
                f"{path} is no file of torch.save, or was cut short ({error}); give the path of a checkpoint (one of a "
                f"torch before 1.6 has to be loaded and saved again first)"
            ) from error
        if not any(record.filename.endswith("/data.pkl") for record in self._records):
            raise CheckpointError(f"{path} is a zip archive, and no file of torch.save; give the path of a checkpoint")
        if any(record.compress_type != zipfile.ZIP_STORED for record in self._records):
            raise CheckpointError(
                f"{path} is an archive with compressed records, and no file of torch.save; give the path of a checkpoint"
            )

    @property
    def size_bytes(self) -> int:
        """Of all records."""
        return sum(record.file_size for record in self._records)

    @property
    def has_checksums(self) -> bool:
        """False where it was saved with torch.serialization.set_crc32_options(False), which leaves zeros."""
        return any(record.CRC for record in self._records)

    def load(self, *, weights_only: bool = True) -> Any:
        """The object that was saved, its pickle compared with its checksum and its tensors mapped.

        Raises:
            CheckpointError: it is damaged, or holds objects that `weights_only` does not load.
        """
        self._compare([record for record in self._records if record.filename.endswith("/data.pkl")])
        remedy = "give weights_only=False (--weights_only=false on the command line)"
        return load_mapped(self.path, weights_only=weights_only, remedy=remedy)

    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        """Reads all records and compares them with their checksums. `seen` is told how many more bytes were read.

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
                    with archive.open(record) as file:  # which compares when its end is read
                        while piece := file.read(PIECE_BYTES):
                            seen(len(piece))
        except OSError as error:
            raise unread(self.path, error) from error
        except _DAMAGED as error:
            raise CheckpointError(
                f"{self.path}: the {record.file_size} bytes of {record.filename} are not those that were written (their "
                f"checksum differs, or the directory does: {error}); use an earlier checkpoint, and check that disk"
            ) from error


def load_mapped(path: Path, *, weights_only: bool | None, remedy: str, map_location: Any = "cpu") -> Any:
    """What torch.save has written. Tensors are mapped where the format allows it, which it does since torch 1.6.

    Args:
        remedy: what someone who trusts the file may do.

    Raises:
        CheckpointError: it is damaged, no checkpoint, or holds what is not loaded from files that may not be trusted.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mapped or None)
    except OSError as error:
        raise unread(path, error) from error
    except Exception as error:  # torch has an error of its own for each way in which a file can be damaged
        raise _unreadable(path, error, weights_only is not False, remedy) from error


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's elements in order, whatever its strides, as contiguous tensors of at most PIECE_BYTES."""
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
"""Of what torch.save writes: archives, and the pickles of versions before 1.6."""


def _unreadable(path: Path, error: Exception, weights_only: bool, remedy: str) -> CheckpointError:
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
