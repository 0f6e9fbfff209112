"""Weight files of other programs: folders of safetensors files in the layout of Hugging Face, read and written.

Reading: `find` lists the tensors of a path's safetensors files, from headers and indexes only; callers read tensors
from the mapped files. It downloads nothing, and opens no file that could run code.

Writing (`lightning-ptm export`): `plan` decides which tensor of a checkpoint is written to which file,
`model.safetensors` or shards with an index; `write` writes the files, a piece of a tensor at a time.
I1: a folder under its final name is complete: it is written under another name, synced and renamed
    (storage/folder.py).
I2: memory does not grow with the model: one piece, its converted copy, and the writer's buffers.
I3: a tensor with several names (tied weights) is written once, under the first of them; the metadata of its file
    lists the other names, as safetensors' own `save_model` does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ptm.checkpoints.opened import Opened, Weight
from lightning_ptm.checkpoints.protocol import FileTensor, WeightFormat
from lightning_ptm.config import parse_bytes
from lightning_ptm.errors import CheckpointError, ConfigError, some
from lightning_ptm.progress import Progress
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import write_synced
from lightning_ptm.storage.tensors import Layout, Mapped, lay_out
from lightning_ptm.storage.user_errors import unread
from lightning_ptm.storage.writer import RangeWriter, SaveOps

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CONVERT = (
    "only safetensors files are read, since the others can run code when they are opened; convert it if you trust it: "
    "`lightning-ptm export` for a checkpoint of Lightning, from_pretrained(folder).save_pretrained(folder) of "
    "transformers for its models, safetensors.torch.save_file(torch.load(path, weights_only=True), "
    "'model.safetensors') for a state dict"
)


class PretrainedFormat(WeightFormat):
    """A safetensors file, an index of shards, or a folder with either."""

    @override
    def tensors(self, path: Path, share: slice, progress: Progress | None) -> Mapping[str, FileTensor]:
        return find(path)  # these files have no checksums to be verified


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
            f"with {SINGLE} or {INDEX} (nothing is downloaded: fetch a model of a hub first and give its folder)"
        )
    if (path / SINGLE).is_file():
        return _tensors(path / SINGLE)
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    files = sorted(file for file in path.iterdir() if file.suffix == _SUFFIX and file.is_file())
    if len(files) == 1:
        return _tensors(files[0])
    if files:
        raise ConfigError(
            f"weights: {path} has neither {SINGLE} nor {INDEX}, and {len(files)} other safetensors files "
            f"({some([file.name for file in files])}); give one of them, or an index"
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ConfigError(f"weights: {path} has {some(pickles)} and no safetensors file; {_CONVERT}")
    raise ConfigError(
        f"weights: {path} has no safetensors file, so there is nothing to start from; give a folder with {SINGLE} or "
        f"{INDEX}, or a file"
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


SHARD = "model-{number:05d}-of-{count:05d}.safetensors"

_DTYPES = {
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half"),
}


def parse_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a name such as `"bf16"`, `"bfloat16"` or `"torch.bfloat16"`.

    Raises:
        ConfigError: it is no dtype for export.
    """
    for dtype, names in _DTYPES.items():
        if name.lower().removeprefix("torch.") in names:
            return dtype
    raise ConfigError(f"dtype={name!r} is no dtype in which weights are exported; use fp32, bf16 or fp16")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: its name and dtype, and its other names, which are dropped."""

    name: str
    weight: Weight
    dtype: torch.dtype
    dropped: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return self.weight.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of an export."""

    file: str
    layout: Layout
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """The files of an export and their tensors.

    Args:
        shards: the files.
        left_out: names of tensors that were not selected.
        others: names of states that are no tensors, which this layout cannot hold.
    """

    shards: tuple[Shard, ...]
    left_out: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def entries(self) -> list[Entry]:
        return [entry for shard in self.shards for entry in shard.entries]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def dropped(self) -> dict[str, str]:
        """Names that are not written, each with the name under which its tensor is written."""
        return {name: entry.name for entry in self.entries for name in entry.dropped}


def plan(
    source: Opened, *, dtype: torch.dtype | None = None, shard_size: str | int = "5GB", strip: str | None = None
) -> Export:
    """Decides which tensors are written to which files.

    Args:
        dtype: dtype of floating point tensors; None: as they were saved. Others (masks, counters) keep theirs.
        shard_size: most bytes of a file's tensors; a larger tensor gets a file of its own.
        strip: export only names below this one (`model`), without it; None: all names unchanged.

    Raises:
        ConfigError: no name is below `strip`, or `shard_size` is no size.
        CheckpointError: there are no weights, or one has a dtype that the format cannot hold.
    """
    limit = parse_bytes(shard_size, name="shard_size")
    if limit < 1:
        raise ConfigError(f"shard_size={shard_size!r} has no room for a tensor; give a size such as '5GB'")
    if not source.weights:
        raise CheckpointError(f"{source.path} has no weights: its state_dict has no tensor; give another checkpoint")
    entries, left_out = _named(source, dtype, strip)
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.size_bytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.size_bytes
    shards = []
    for number, group in enumerate(groups, 1):
        # Largest elements first, so that every tensor starts at a multiple of its element's size.
        ordered = sorted(group, key=lambda entry: -entry.dtype.itemsize)
        metadata = {"format": "pt", **{name: entry.name for entry in ordered for name in entry.dropped}}
        layout = lay_out([(entry.name, entry.dtype, entry.weight.shape) for entry in ordered], metadata)
        file = SINGLE if len(groups) == 1 else SHARD.format(number=number, count=len(groups))
        shards.append(Shard(file, layout, tuple(ordered)))
    return Export(tuple(shards), tuple(left_out), source.others)


def _named(source: Opened, dtype: torch.dtype | None, strip: str | None) -> tuple[list[Entry], list[str]]:
    prefix = "" if not strip else strip.rstrip(".") + "."
    entries: list[Entry] = []
    left_out: list[str] = []
    for weight in source.weights:
        names = [name.removeprefix(prefix) for name in weight.names if name.startswith(prefix) and name != prefix]
        left_out += [name for name in weight.names if not name.startswith(prefix) or name == prefix]
        if names:
            wanted = weight.dtype if dtype is None or not weight.dtype.is_floating_point else dtype
            entries.append(Entry(names[0], weight, wanted, tuple(names[1:])))
    if not entries:
        firsts = sorted({name.split(".")[0] for weight in source.weights for name in weight.names})
        raise ConfigError(
            f"strip={strip!r}: no name in {source.path} begins with {prefix!r}, so nothing would be written; the "
            f"names begin with {', '.join(firsts[:8])}{'...' if len(firsts) > 8 else ''}"
        )
    return entries, left_out


def write(
    source: Opened,
    chosen: Export,
    folder: Path,
    *,
    seen: Callable[[int], None] = lambda count: None,
    ops: SaveOps | None = None,
) -> Mapping[str, int]:
    """Writes a planned export into a folder, which must not exist or be empty.

    Args:
        seen: called with numbers of bytes written.
        ops: file calls, for tests.

    Returns:
        By name of a tensor, how many finite values are out of range of the new dtype and became infinite.

    Raises:
        CheckpointError: a disk is full or fails, or the checkpoint is damaged. The folder is unchanged then.
    """
    target = folder.resolve()  # the folder itself if `folder` is a link
    if os.path.exists(target) and not target.is_dir():  # names that no file can have are errors of the draft
        raise CheckpointError(f"{folder} is a file, and weights are exported into a folder; give another name")
    if target == Path.cwd():
        raise CheckpointError(
            f"{folder} is the working directory, which an export would replace by a new folder; give the name of a "
            "new folder"
        )
    infinite: dict[str, int] = {}
    with contextlib.ExitStack() as undo:
        draft = Draft(target, replace=False)
        undo.callback(draft.discard)
        writer = RangeWriter(draft.folder, ops)
        undo.callback(writer.abort)
        for shard in chosen.shards:  # all of them first, so that a disk that is too small is found now
            writer.create(shard.file, shard.layout.header, shard.layout.size_bytes)
        for shard in chosen.shards:
            for entry, stored in zip(shard.entries, shard.layout.tensors, strict=True):
                position = stored.start
                for piece in source.pieces(entry.weight):
                    converted = piece.to(entry.dtype)
                    if count := _became_infinite(piece, converted):
                        infinite[entry.name] = infinite.get(entry.name, 0) + count
                    writer.put(shard.file, position, converted)
                    position += converted.numel() * entry.dtype.itemsize
                    seen(converted.numel() * entry.dtype.itemsize)
        writer.finish()
        if len(chosen.shards) > 1:
            write_synced(draft.folder / INDEX, _shard_index(chosen), ops)
        draft.commit()
        undo.pop_all()
    return infinite


def _shard_index(chosen: Export) -> bytes:
    weight_map = {entry.name: shard.file for shard in chosen.shards for entry in shard.entries}
    return json.dumps({"metadata": {"total_size": chosen.size_bytes}, "weight_map": weight_map}, indent=2).encode()


def _became_infinite(before: Tensor, after: Tensor) -> int:
    if before.dtype == after.dtype or not after.dtype.is_floating_point:
        return 0
    infinite = after.isinf()
    return int((infinite & before.isfinite()).sum()) if infinite.any() else 0
