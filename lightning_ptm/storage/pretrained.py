"""Weight files of other programs: finds the safetensors files of a path, and lists their tensors.

Reads headers and indexes only; callers read tensors from the mapped files. Downloads nothing, and opens no file that
could run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_ptm.errors import CheckpointError, ConfigError, some
from lightning_ptm.storage.tensors import Mapped
from lightning_ptm.storage.user_errors import unread

SINGLE = "model.safetensors"
SHARDED = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CONVERT = (
    "only safetensors files are read, since the others can run code when they are opened; convert it if you trust it: "
    "`lightning-ptm export` for a checkpoint of Lightning, from_pretrained(folder).save_pretrained(folder) of "
    "transformers for its models, safetensors.torch.save_file(torch.load(path, weights_only=True), "
    "'model.safetensors') for a state dict"
)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file.

    Args:
        read: returns it as a view of the mapped file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def find(path: Path) -> dict[str, FileTensor]:
    """Returns all tensors of a path by name. The path is a safetensors file, an index of shards, or a folder with
    `model.safetensors`, with an index and shards, or with one safetensors file of any name.

    Raises:
        ConfigError: there is no file, none that may be opened, or more than one candidate.
        CheckpointError: a file is damaged or unreadable, or an index lists what does not exist.
    """
    try:
        return _find(path)
    except PermissionError as error:
        raise unread(Path(error.filename or path), error) from error


def _find(path: Path) -> dict[str, FileTensor]:
    if path.is_file():
        if path.name.endswith(_INDEX_SUFFIX):
            return _indexed(path)
        if path.suffix in _PICKLES:
            raise ConfigError(f"weights: {path} is no safetensors file by its name; {_CONVERT}")
        return _tensors(path)
    if not path.is_dir():
        raise ConfigError(
            f"weights: {path} does not exist, so there is nothing to start from; give a safetensors file, or a folder "
            f"with {SINGLE} or {SHARDED} (nothing is downloaded: fetch a model of a hub first and give its folder)"
        )
    if (path / SINGLE).is_file():
        return _tensors(path / SINGLE)
    if (path / SHARDED).is_file():
        return _indexed(path / SHARDED)
    files = sorted(file for file in path.iterdir() if file.suffix == _SUFFIX and file.is_file())
    if len(files) == 1:
        return _tensors(files[0])
    if files:
        raise ConfigError(
            f"weights: {path} has neither {SINGLE} nor {SHARDED}, and {len(files)} other safetensors files "
            f"({some([file.name for file in files])}); give one of them, or an index"
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ConfigError(f"weights: {path} has {some(pickles)} and no safetensors file; {_CONVERT}")
    raise ConfigError(
        f"weights: {path} has no safetensors file, so there is nothing to start from; give a folder with {SINGLE} or "
        f"{SHARDED}, or a file"
    )


def _tensors(path: Path) -> dict[str, FileTensor]:
    mapped = Mapped(path)
    return {
        tensor.name: FileTensor(tensor.dtype, tensor.shape, partial(mapped.tensor, tensor.name))
        for tensor in mapped.layout.tensors
    }


def _indexed(path: Path) -> dict[str, FileTensor]:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(places, Mapping) or not all(isinstance(file, str) for file in places.values()):
            raise TypeError("its weight_map does not give a file for each name")
    except OSError as error:
        raise unread(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no index of safetensors files, or is damaged ({error}); fetch it again"
        ) from error
    missing = sorted({file for file in places.values() if not (path.parent / file).is_file()})
    if missing:
        raise CheckpointError(
            f"{path} lists {len(missing)} file(s) that are not in its folder: {some(missing)}; the weights are "
            "incomplete, so fetch these files again"
        )
    files = {file: _tensors(path.parent / file) for file in sorted(set(places.values()))}
    absent = [f"{name} ({file})" for name, file in places.items() if name not in files[file]]
    if absent:
        raise CheckpointError(
            f"{path} lists {len(absent)} tensor(s) that are not in their files: {some(absent)}; the files are of "
            "different models, or incomplete: fetch them again"
        )
    return {name: files[file][name] for name, file in places.items()}
