"""Lightning's CheckpointIO plugins: files that are written to a temporary name and renamed, and memory-mapped when they are
read; and for Trainers with another strategy, sharded checkpoints too."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_ptm.checkpoints import sharded
from lightning_ptm.checkpoints.full import read_file
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.storage.archive import Archive
from lightning_ptm.storage.folder import file_draft
from lightning_ptm.storage.user_errors import is_file, is_folder

_WRITTEN_AT_ONCE_BYTES = 64 << 20
_LIGHTNINGS_OWN = TorchCheckpointIO.save_checkpoint


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's CheckpointIO with atomic writes and memory-mapped reads.

    A file is written to a temporary name in its folder, synced, and renamed. Remote paths are left to Lightning's own
    implementation.
    """

    def __init__(self) -> None:
        self.progress = Progress(shown=False)
        """Progress bars for long reads and writes."""

    def show(self, progress: Progress) -> None:
        """Sets the progress bars."""
        self.progress = progress

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        wrapped = TorchCheckpointIO.save_checkpoint is not _LIGHTNINGS_OWN  # a tracer or mock expects to see each save
        if storage_options is not None or "://" in str(path) or wrapped:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        bar = self.progress.bar(f"saving {Path(path).name}", _storage_bytes(checkpoint))
        with file_draft(Path(path)) as draft, draft.open("r+b") as file, bar as seen:
            try:
                # Lightning's own implementation writes to a buffer in memory first: a second copy of the checkpoint.
                torch.save(checkpoint, cast(IO[bytes], _Watched(file, seen)))
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch replaces the system's error by its own
                    raise error.__context__ from error
                raise

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not is_file(Path(path)):
            return super().load_checkpoint(path, map_location, weights_only)
        return read_file(Path(path), weights_only=weights_only, map_location=map_location)

    def check(self, path: Path) -> None:
        """Reads a whole file and compares it with the checksums that torch.save writes and torch.load ignores.

        Raises:
            CheckpointError: names the record and the range that differ.
        """
        if is_file(path) and zipfile.is_zipfile(path):  # files of torch before 1.6 have no checksums
            archive = Archive(path)
            with self.progress.bar(f"checking {path.name}", archive.size_bytes) as seen:
                archive.check(seen)


class _Watched:
    """A file object that reports the bytes written to it; torch.save writes each tensor in one call."""

    def __init__(self, file: IO[bytes], seen: Seen) -> None:
        self._file = file
        self._seen = seen

    def write(self, data: memoryview) -> int:
        for start in range(0, len(data), _WRITTEN_AT_ONCE_BYTES):
            self._seen(self._file.write(data[start : start + _WRITTEN_AT_ONCE_BYTES]))
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _storage_bytes(checkpoint: Mapping[str, Any]) -> int:
    """Returns the bytes of weights and optimizer states, shared storage counted once; sparse tensors are left out."""
    parts = [checkpoint.get("state_dict"), checkpoint.get("optimizer_states")]
    tensors = [tensor for tensor in _tensors(parts) if tensor.layout is torch.strided]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors(value)


class ShardedCheckpointIO(FileCheckpointIO):
    """CheckpointIO for Trainers with another strategy: `Trainer(plugins=[ShardedCheckpointIO()])` also loads sharded
    checkpoints, and writes ordinary files."""

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if is_folder(Path(path)):
            return sharded.load(path, weights_only=weights_only is not False)
        return super().load_checkpoint(path, map_location, weights_only)


def to_file(folder: str | Path, file: str | Path, *, weights_only: bool = True) -> None:
    """Writes a sharded checkpoint as one ordinary file, which `load_from_checkpoint` and any Trainer can read.

    Tensors are copied from file to file: RAM holds one of them at a time.

    Args:
        weights_only: as for `load`.

    Raises:
        CheckpointError: the folder is damaged, or the file cannot be written.
    """
    FileCheckpointIO().save_checkpoint(sharded.load(folder, weights_only=weights_only), file)
