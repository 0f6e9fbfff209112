"""Export of weights in the layout that Hugging Face's loaders read: `model.safetensors`, or shards with an index.

Decides which tensor is written to which file (`plan`), then writes the files, a piece of a tensor at a time (`write`).
I1: a folder under its final name is complete: it is written under another name, synced and renamed (folder.py).
I2: memory does not grow with the model: one piece, its converted copy, and the writer's buffers.
I3: a tensor with several names (tied weights) is written once, under the first of them; the metadata of its file lists
    the other names, as safetensors' own `save_model` does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_ptm.config import parse_bytes
from lightning_ptm.errors import CheckpointError, ConfigError
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import write_synced
from lightning_ptm.storage.source import Source, Weight
from lightning_ptm.storage.tensors import Layout, lay_out
from lightning_ptm.storage.writer import RangeWriter, SaveOps

SINGLE = "model.safetensors"
SHARD = "model-{number:05d}-of-{count:05d}.safetensors"
SHARD_INDEX = "model.safetensors.index.json"

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
    source: Source, *, dtype: torch.dtype | None = None, shard_size: str | int = "5GB", strip: str | None = None
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


def _named(source: Source, dtype: torch.dtype | None, strip: str | None) -> tuple[list[Entry], list[str]]:
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
    source: Source,
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
            write_synced(draft.folder / SHARD_INDEX, _shard_index(chosen), ops)
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
