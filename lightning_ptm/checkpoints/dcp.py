"""Checkpoints of `torch.distributed.checkpoint` (DCP): first weights from them, and a reader of ours for DCP's `load`.

Lightning's FSDP and ModelParallel strategies, FSDP2's examples and torchtitan save folders of DCP. Only weights are read
here, through DCP's public reader and planner; it assembles each tensor from the parts that ranks have saved.

I1: no object that could run code is loaded. DCP's `.metadata` is a pickle, of which only DCP's own records, sizes and
    dtypes are accepted.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from lightning_ptm.checkpoints.protocol import FileTensor, WeightFormat
from lightning_ptm.checkpoints.sharded import load
from lightning_ptm.errors import CheckpointError
from lightning_ptm.progress import Progress
from lightning_ptm.storage.index import DCP_METADATA
from lightning_ptm.storage.user_errors import unread

_MODELS = ("model", "state_dict")
"""First component of weights' names in checkpoints that have optimizers, too, such as those of Lightning's strategies."""
_OPTIMIZERS = "optim"
"""How the first component of optimizer states begins, where weights have no such component."""


class DcpFormat(WeightFormat):
    """A folder of DCP, as first weights (`weights=`)."""

    @override
    def tensors(self, path: Path, share: slice, progress: Progress | None) -> Mapping[str, FileTensor]:
        metadata = _Reader(path).read_metadata()
        found = {
            name: FileTensor(entry.properties.dtype, tuple(entry.size), partial(_read, path, name, entry))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        for prefix in _MODELS:
            of_model = {name: each for name, each in found.items() if name.startswith(f"{prefix}.")}
            if of_model and len(of_model) < len(found):
                return of_model
        return {name: each for name, each in found.items() if not name.partition(".")[0].startswith(_OPTIMIZERS)}


def _read(path: Path, name: str, entry: TensorStorageMetadata) -> Tensor:
    """Reads one tensor, whole."""
    value = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        dcp_load({name: value}, storage_reader=_Reader(path), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{name} of the checkpoint {path} cannot be read ({error}), so training does not start; use another checkpoint"
        ) from error
    return value


class _Reader(FileSystemReader):
    """DCP's reader of folders, whose metadata can run no code (I1)."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / DCP_METADATA
        try:
            with file.open("rb") as stream:
                metadata = _Records(stream).load()
        except OSError as error:
            raise unread(file, error) from error
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{file} is no metadata of torch.distributed.checkpoint, or is damaged ({error}); use another checkpoint"
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{file} is no metadata of torch.distributed.checkpoint; use another checkpoint")
        return metadata


class _Records(pickle.Unpickler):
    """Unpickler of DCP's records."""

    _KNOWN = frozenset(
        (
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "Path"),
            ("pathlib", "PosixPath"),
        )
    )

    @override
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if self._is_known(module, name) else None
        if found is None or not (isinstance(found, (type, torch.dtype)) or (module, name) in self._KNOWN):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which could run code")
        return found

    def _is_known(self, module: str, name: str) -> bool:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        return is_dtype or module.startswith("torch.distributed.checkpoint.") or (module, name) in self._KNOWN


class DCPReader(StorageReader):
    """Reader of the weights of a sharded checkpoint for `torch.distributed.checkpoint.load`, under the names of the
    LightningModule's `state_dict`.

    `dcp.load(module.state_dict(), storage_reader=DCPReader(folder))` fills ordinary tensors and DTensors, on any number of
    ranks. Checksums of the files are not verified (`lightning-ptm inspect` does).

    Args:
        path: the folder.

    Raises:
        CheckpointError: it is incomplete, or no sharded checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        # state
        self._tensors: Mapping[str, Tensor] = {}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
        self._tensors = {}

    def _opened(self) -> Mapping[str, Tensor]:
        if not self._tensors:
            state = load(self._path, optimizers=False, verify=None)["state_dict"]
            self._tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        return self._tensors

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _described(value) for name, value in self._opened().items()})

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass  # the metadata says nothing that the files do not

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors = self._opened()
        for item in plan.items:
            wanted = _part(tensors[item.storage_index.fqn], item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(wanted)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def _described(value: Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [whole])


def _part(value: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        value = value.narrow(dimension, offset, length)
    return value
