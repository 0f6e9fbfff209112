"""Lightning's checkpoint files: written beside their place, mapped when they are read."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_ptm.errors import CheckpointError
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.storage.archive import Archive, load_mapped
from lightning_ptm.storage.folder import file_draft
from lightning_ptm.storage.user_errors import is_file

_WRITTEN_AT_ONCE_BYTES = 64 << 20
_VERSION = "pytorch-lightning_version"
_LIGHTNINGS_OWN = TorchCheckpointIO.save_checkpoint


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their place, synced, and renamed into it; read as they are needed.

    A file that is not local is Lightning's own business.
    """

    def __init__(self) -> None:
        self.progress = Progress(shown=False)
        """Of what takes long."""

    def show(self, progress: Progress) -> None:
        """Where what takes long is shown from now on."""
        self.progress = progress

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        wrapped = TorchCheckpointIO.save_checkpoint is not _LIGHTNINGS_OWN  # by a tracer, a mock: they see each save
        if storage_options is not None or "://" in str(path) or wrapped:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        bar = self.progress.bar(f"saving {Path(path).name}", _storage_bytes(checkpoint))
        with file_draft(Path(path)) as draft, draft.open("r+b") as file, bar as seen:
            try:
                # Not through a buffer in memory, as Lightning's own does, which would hold the checkpoint a second time.
                torch.save(checkpoint, cast(IO[bytes], _Watched(file, seen)))
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch hides what the system has said
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
        """Compares a file with the checksums that torch.save has put into it, which torch.load does not look at. Reads all
        of it.

        Raises:
            CheckpointError: with the record and the range that differ.
        """
        if is_file(path) and zipfile.is_zipfile(path):  # what torch wrote before 1.6 has none
            archive = Archive(path)
            with self.progress.bar(f"checking {path.name}", archive.size_bytes) as seen:
                archive.check(seen)


class _Watched:
    """A file for torch.save, which writes each tensor in one call, that tells how many more bytes are written."""

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
    """Of weights and optimizer states, those that share storage counted once; sparse ones and users' own things are not."""
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


def read_file(path: Path, *, weights_only: bool | None, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's dictionary. Its tensors are mapped, where the format allows it: each rank reads what it owns.

    Raises:
        CheckpointError: it is damaged, no checkpoint, or holds what is not loaded from files that may not be trusted.
    """
    remedy = "give weights_only=False to the Trainer's method"
    loaded = load_mapped(path, weights_only=weights_only, map_location=map_location, remedy=remedy)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} is no checkpoint, or is damaged (it holds a {type(loaded).__name__}); give one that a Trainer has saved"
        )
    return dict(loaded)


def check_lightnings(path: str | Path, checkpoint: Mapping[str, Any]) -> None:
    """Refuses what torch.save has written, and no Trainer. Raises CheckpointError."""
    if _VERSION not in checkpoint:
        keys = ", ".join(map(str, list(checkpoint)[:5]))
        raise CheckpointError(
            f"{path} holds a dictionary with {keys or 'nothing'}, and a checkpoint of Lightning has a {_VERSION!r}; give "
            f"one that a Trainer has saved"
        )
