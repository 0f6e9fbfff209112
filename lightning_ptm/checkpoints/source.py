"""An opened checkpoint of either format, to be described or read piece by piece: the folder of a sharded checkpoint
(state_dict_type="sharded"), or a full file of Lightning.

I1: opening a checkpoint reads names, shapes and offsets, and of tensors only those in a folder's lightning.pt
(buffers).
I2: the elements that `pieces` yields are those that were written, as far as the file has checksums; damage is an error
with its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.archive import Archive, blocks
from lightning_ptm.storage.index import LIGHTNING, PARAMETERS, Index
from lightning_ptm.storage.tensors import Stored
from lightning_ptm.storage.user_errors import is_file, is_folder
from lightning_ptm.storage.verified import CheckedFile, CheckedFolder


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model's state dict.

    Args:
        names: names in the state dict, in its order; several for tied weights.
        dtype, shape: as it was saved.
        unit: name of the unit; None if the checkpoint does not say.
        place: its elements: in a file of a folder, or a mapped tensor.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    unit: str | None
    place: _InFolder | Tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _InFolder:
    file: str
    stored: Stored


class Source:
    """An open checkpoint. Maps torch.save's file, and takes memory for one piece at most.

    Args:
        path: a folder or a file.
        weights_only: load no object that could run code. Give False only for checkpoints that you trust.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, incomplete, or of another program.
    """

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        if not is_folder(path) and not is_file(path):
            raise CheckpointError(f"there is no checkpoint {path}; give the path of a file or a folder that was saved")
        self.path = path
        self._folder = CheckedFolder(path) if is_folder(path) else None
        self.index: Index | None = None if self._folder is None else self._folder.index
        self.files: Mapping[str, CheckedFile] = {} if self._folder is None else self._folder.files
        self.archive = Archive(path if self._folder is None else path / LIGHTNING)
        self.dictionary: Mapping[str, Any] = _checked_dictionary(path, self.archive.load(weights_only=weights_only))
        if self._folder is not None:
            self._folder.check_dictionary(self.dictionary)
        self._reading: CheckedFile | None = None
        self._archive_checked = False
        state: Mapping[str, Any] = self.dictionary["state_dict"]
        self.weights = self._full_weights(state) if self.index is None else self._sharded_weights(self.index, state)
        # Extra states of modules that are no tensors.
        self.others = tuple(name for name, value in state.items() if not isinstance(value, Tensor))

    @property
    def size_bytes(self) -> int:
        """Bytes of everything that has checksums."""
        return self.archive.size_bytes + sum(file.layout.size_bytes for file in self.files.values())

    @property
    def has_checksums(self) -> bool:
        return self.index is not None or self.archive.has_checksums

    @property
    def sealed(self) -> bool:
        """Whether everything is under a checksum, names included, so that it is known to be of one save."""
        return self._folder is not None and self._folder.sealed

    def pieces(self, weight: Weight) -> Iterator[Tensor]:
        """Yields a weight's elements in order, as 1-D tensors of a few MiB. Each is valid until the next is requested.

        Raises:
            CheckpointError: it cannot be read, or is damaged (raised at the latest after the last piece).
        """
        if isinstance(weight.place, Tensor):
            if not self._archive_checked:  # all of it: only torch knows which record has this tensor
                self.archive.check()
                self._archive_checked = True
            return (block.view(-1) for block in blocks(weight.place) if block.numel())
        file = self.files[weight.place.file]
        if self._reading is not None and self._reading is not file:
            self._reading.free_buffer()
        self._reading = file
        return file.pieces(weight.place.stored)

    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        """Compares everything with its checksums. `seen` is called with numbers of bytes read.

        Raises:
            CheckpointError: names the file, the tensor and the range that differ.
        """
        self.archive.check(seen)
        self._archive_checked = True
        for file in self.files.values():
            file.check(seen)

    def _full_weights(self, state: Mapping[str, Any]) -> tuple[Weight, ...]:
        names: dict[Any, list[str]] = {}
        found: dict[Any, Tensor] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                _check_plain(self.path, name, value)
                # Names are tied if they have the same elements in the same order; other tensors may share their
                # storage.
                key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else name
                names.setdefault(key, []).append(name)
                found.setdefault(key, value)
        return tuple(
            Weight(tuple(names[key]), each.dtype, tuple(each.shape), None, each) for key, each in found.items()
        )

    def _sharded_weights(self, index: Index, state: Mapping[str, Any]) -> tuple[Weight, ...]:
        parameters = {
            stored.name: (file, stored)
            for file in index.files
            if file.kind == PARAMETERS
            for stored in self.files[file.name].layout.tensors
        }
        rest = {weight.names[0]: weight for weight in self._full_weights(state)}
        names: dict[str, list[str]] = {}
        for name, tensor in index.parameters.items():
            names.setdefault(tensor, []).append(name)
        weights: list[Weight] = []
        for name in index.state:
            if name not in index.parameters:
                weights += [rest[name]] if name in rest else []
                continue
            tensor = index.parameters[name]
            if names[tensor][0] == name:
                file, stored = parameters[tensor]
                place = _InFolder(file.name, stored)
                weights.append(Weight(tuple(names[tensor]), stored.dtype, stored.shape, file.unit, place))
        return tuple(weights)


def _checked_dictionary(path: Path, loaded: Any) -> Mapping[str, Any]:
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        return loaded
    keys = ", ".join(map(str, list(loaded)[:5])) if isinstance(loaded, Mapping) else ""
    holds = f"a dictionary with {keys}..." if keys else f"an object of {type(loaded).__name__}"
    raise CheckpointError(
        f"{path} has {holds}, and a checkpoint of Lightning has a 'state_dict'; give one that a Trainer has saved"
    )


def _check_plain(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{path}: {name} has layout {tensor.layout} and dtype {tensor.dtype}, and only plain tensors can be "
            "exported; convert it before it is saved"
        )
