"""Weights in the layout that Hugging Face's loaders read: `model.safetensors`, or shards with an index of who holds what.

Decides what is written where (`plan`), then writes it, a piece of a tensor at a time (`write`).
I1: a folder under its final name is complete: it is written beside it, synced and renamed (folder.py).
I2: memory does not grow with the model: one piece, its converted copy, and the writer's buffers.
I3: a tensor with several names (tied weights) is written once, under the first of them; the metadata of its file says
    which names were dropped for it, as safetensors' own `save_model` does.
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
    """Reads `"bf16"`, `"bfloat16"` or `"torch.bfloat16"`.

    Raises:
        ConfigError: it is none that weights are exported in.
    """
    for dtype, names in _DTYPES.items():
        if name.lower().removeprefix("torch.") in names:
            return dtype
    raise ConfigError(f"dtype={name!r} is none that weights are exported in; use fp32, bf16 or fp16")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that is written: under which name and dtype, and which further names it would have had."""

    name: str
    weight: Weight
    dtype: torch.dtype
    dropped: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return self.weight.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One file."""

    file: str
    layout: Layout
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """What an export writes.

    Args:
        shards: the files.
        left_out: names of tensors outside of what was asked for.
        others: names of state that is no tensor, which this layout cannot hold.
    """

    shards: tuple[Shard, ...]
    left_out: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def entries(self) -> list[Entry]:
        return [entry for shard in self.shards for entry in shard.entries]

    @property
    def size_bytes(self) -> int:
        """Of the tensors."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def dropped(self) -> dict[str, str]:
        """Names that are not written -> name under which their tensor is."""
        return {name: entry.name for entry in self.entries for name in entry.dropped}


def plan(
    source: Source, *, dtype: torch.dtype | None = None, shard_size: str | int = "5GB", strip: str | None = None
) -> Export:
    """Decide what is written.

    Args:
        dtype: of floating point tensors; None: as they were saved. Others (masks, counters) stay as they are.
        shard_size: bytes of a file's tensors at most, but for a tensor that is larger alone.
        strip: only names below this one (`model`), without it; None: all names as they are.

    Raises:
        ConfigError: no name is below `strip`, or the size is none.
        CheckpointError: there are no weights, or of a dtype that the format has no name for.
    """
    limit = parse_bytes(shard_size, name="shard_size")
    if limit < 1:
        raise ConfigError(f"shard_size={shard_size!r} holds nothing; give a size such as '5GB'")
    if not source.weights:
        raise CheckpointError(f"{source.path} holds no weights: its state_dict has no tensor; give another checkpoint")
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
            f"strip={strip!r}: no name in {source.path} begins with {prefix!r}, so nothing would be written; the names begin "
            f"with {', '.join(firsts[:8])}{'...' if len(firsts) > 8 else ''}"
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
    """Write what was planned into a folder, which must not exist or be empty.

    Args:
        seen: is told how many more bytes were written.
        ops: file calls, for tests.

    Returns:
        How many finite values of which tensors are beyond their new dtype and became infinite.

    Raises:
        CheckpointError: a disk is full or fails, or the checkpoint is damaged. Nothing is left in the folder then.
    """
    target = folder.resolve()  # the folder, where a link to it was given
    if os.path.exists(target) and not target.is_dir():  # a name that no file can have is told by the draft
        raise CheckpointError(f"{folder} is a file, and weights are exported into a folder; give another name")
    if target == Path.cwd():
        raise CheckpointError(
            f"{folder} is the working directory, and an export puts a new folder in its place; give the name of a new folder"
        )
    infinite: dict[str, int] = {}
    with contextlib.ExitStack() as undo:
        draft = Draft(target, replace=False)
        undo.callback(draft.discard)
        writer = RangeWriter(draft.folder, ops)
        undo.callback(writer.abort)
        for shard in chosen.shards:  # all of them first: a disk that is too small is found now
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
