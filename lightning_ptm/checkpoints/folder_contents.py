"""The contents of a sharded checkpoint's folder: its files, which bytes of them this rank writes, and the index."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.checkpoints.background_row_exchange import BackgroundRowExchange
from lightning_ptm.checkpoints.module_states import parameters_by_name
from lightning_ptm.checkpoints.optimizer_states import parameters_of, plain_optimizer
from lightning_ptm.checkpoints.row_exchange import PagedFlat, RowExchange, Table, not_exchanged
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.layout import ParameterSpec
from lightning_ptm.runtime.full_params.sharded_states import ShardedFlat, ShardedStates
from lightning_ptm.runtime.full_params.snapshot import SnapshotPart, stretches
from lightning_ptm.runtime.tensors.page_io import within
from lightning_ptm.storage.index import Index, OptimizerIndex, Seal, StateFile, write_synced
from lightning_ptm.storage.tensors import Layout, lay_out
from lightning_ptm.storage.writer import FileBytes, RangeWriter, SaveOps

_AT_ONCE_BYTES = 16 << 20
"""Bytes that are copied together of pages that are written from where they are: each message to a tensor-parallel group
makes all its ranks wait once."""

_Put = Callable[[str, int, Tensor | FileBytes, bool], None]
"""Writes bytes to a file: (file name, offset, bytes, whether the bytes stay unchanged until all is written)."""


class KindOfStates(Protocol):
    """One kind of one unit's states: names, dtypes and shapes of its tensors."""

    @property
    def unit(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def tensors(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]: ...


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The safetensors files of a folder, one for each kind of each unit's states."""

    files: tuple[StateFile, ...]
    layouts: tuple[Layout, ...]

    @staticmethod
    def of(kinds: Sequence[KindOfStates]) -> StateFiles:
        """Lays out the files of these kinds of states. Raises CheckpointError if a dtype has no name in safetensors
        files."""
        places = {unit: place for place, unit in enumerate(dict.fromkeys(each.unit for each in kinds))}
        files, layouts = [], []
        for each in kinds:
            layout = lay_out(each.tensors, {"format": "pt", "unit": each.unit, "kind": each.kind})
            name = f"{places[each.unit]:04d}.{quote(each.kind, safe=' ')}.safetensors"
            files.append(StateFile(name, each.unit, each.kind, layout.size_bytes))
            layouts.append(layout)
        return StateFiles(tuple(files), tuple(layouts))

    def create(self, writer: RangeWriter) -> None:
        """Creates the files, with their headers."""
        for file, layout in zip(self.files, self.layouts, strict=True):
            writer.create(file.name, layout.header, layout.size_bytes)

    def seals(self) -> dict[str, Seal]:
        """Returns the seals of the files' headers, by file name."""
        return {file.name: Seal.of(layout.header) for file, layout in zip(self.files, self.layouts, strict=True)}


def bytes_here(kind: ShardedStates) -> int:
    """Returns the bytes of one kind of states that this rank writes."""
    paged = sum(segment.numel * flat.paged.dtype.itemsize for flat in kind.flats for segment in flat.segments)
    return paged + sum(values.nbytes for flat in kind.flats for _, _, values in flat.outside)


def pages_of(flat: ShardedFlat, cell_numel: int, *, changing: bool) -> PagedFlat:
    """Returns the ranges of a flat's elements that a save copies together.

    Args:
        cell_numel: length of ranges that are read through buffers, are dequantized, or may change during the save.
        changing: whether training goes on during the save.
    """
    cells, at_once = _cells_of(flat, cell_numel, changing=changing)
    return PagedFlat(flat, list(stretches(flat.paged.numel, cells, at_once)))


def _cells_of(flat: ShardedFlat, cell_numel: int, *, changing: bool) -> tuple[Sequence[int] | None, int]:
    """Returns the starts of the cells, if their lengths differ, and the number of elements that are read together."""
    if not _stays(flat, changing=changing):
        return flat.cells, cell_numel
    return None, max(cell_numel, _AT_ONCE_BYTES // flat.paged.dtype.itemsize)


def _stays(flat: ShardedFlat, *, changing: bool) -> bool:
    """Returns whether the flat's elements are in RAM in the form of the file, and stay unchanged until all is
    written."""
    paged = flat.paged
    return not changing and isinstance(paged, PagedTensor) and paged.tier.addressable and in_ram(paged.tensor())


def parts_of(
    put: _Put,
    files: StateFiles,
    kinds: Sequence[ShardedStates],
    exchange: RowExchange | BackgroundRowExchange,
    *,
    cell_numel: int,
    changing: bool,
) -> tuple[list[SnapshotPart], list[Callable[[], None]]]:
    """Returns what writes paged elements (snapshot parts), and functions that write those outside of pages, which do
    not change.

    Args:
        exchange: exchanges whole rows of parameters that are cut by columns.
        cell_numel, changing: see `pages_of`.
    """
    parts: dict[int, SnapshotPart] = {}
    outside: list[Callable[[], None]] = []
    for file, layout, kind in zip(files.files, files.layouts, kinds, strict=True):
        starts = {tensor.name: tensor.start for tensor in layout.tensors}
        for flat in kind.flats:
            if flat.segments:
                stays = _stays(flat, changing=changing)
                write = partial(_put, put, file.name, starts, flat, exchange, stays)
                room = partial(exchange.wait_for_room, flat) if isinstance(exchange, BackgroundRowExchange) else None
                part = SnapshotPart(flat.paged, write, *_cells_of(flat, cell_numel, changing=changing), room)
                known = parts.get(flat.paged.id)
                parts[flat.paged.id] = part if known is None else _with(known, part)
            for parameter, first, values in flat.outside:
                outside.append(partial(_put_stretches, put, file.name, starts, parameter, first, values, False))
    return list(parts.values()), outside


def _with(part: SnapshotPart, other: SnapshotPart) -> SnapshotPart:
    """Joins two parts with the same pages, whose flat has parameters of several units. Such flats have 1-D parameters,
    which are not cut, so that nothing of them is exchanged."""

    def put(start: int, values: Tensor) -> None:
        part.put(start, values)
        other.put(start, values)

    return replace(part, put=put)


def _put(
    put: _Put,
    name: str,
    starts: Mapping[str, int],
    flat: ShardedFlat,
    exchange: RowExchange | BackgroundRowExchange,
    stays: bool,
    start: int,
    values: Tensor,
) -> None:
    item_bytes = values.dtype.itemsize

    def write(parameter: str, first: int, rows: Table) -> None:
        put(name, starts[parameter] + first * item_bytes, rows, False)

    exchange.begin(flat, start, values, write, stays=stays)
    for segment in within(flat.segments, start, start + values.numel()):
        spec, first = flat.parameters[segment.parameter], segment.parameter_start
        part = values[segment.start - start : segment.stop - start]
        for begin, end in not_exchanged(segment, spec.box):
            _put_stretches(put, name, starts, spec, first + begin, part[begin:end], stays)


def _put_stretches(
    put: _Put,
    name: str,
    starts: Mapping[str, int],
    parameter: ParameterSpec,
    first: int,
    values: Tensor,
    stays: bool,
) -> None:
    """Writes elements of a parameter, from its element `first` on, to their places in the whole tensor of the file."""
    for stretch in parameter.stretches(first, values.numel()):
        offset = starts[parameter.name] + stretch.whole_start * values.dtype.itemsize
        put(name, offset, values.narrow(0, stretch.start - first, stretch.numel), stays)


def write_dictionary(path: Path, checkpoint: Mapping[str, Any], ops: SaveOps) -> Seal:
    """Writes Lightning's own dictionary, synced. Raises CheckpointError."""
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    content = buffer.getvalue()
    write_synced(path, content, ops)
    return Seal.of(content)


def index_of(
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    files: StateFiles,
    *,
    names: Mapping[int, str],
    world_size: int,
    page_size: int,
) -> Index:
    """Returns the index of a checkpoint.

    Args:
        optimizers: the optimizers whose states are in it.
        names: names of the tensors in the files, by id of parameter.
        world_size: number of ranks that write.
        page_size: the run's, in bytes.
    """
    state = parameters_by_name(module)
    return Index(
        step=int(checkpoint.get("global_step", 0)),
        world_size=world_size,
        page_size=page_size,
        writer=f"lightning_ptm {_own_version()}",
        files=files.files,
        parameters={name: names[id(item)] for name, item in state.items() if id(item) in names},
        state=tuple(state),
        optimizers=tuple(
            OptimizerIndex(
                type(plain_optimizer(optimizer)).__qualname__,
                tuple(names[id(each)] for each in parameters_of(plain_optimizer(optimizer)) if id(each) in names),
            )
            for optimizer in optimizers
        ),
    )


def _own_version() -> str:
    try:
        return version("lightning-ptm")
    except PackageNotFoundError:
        return "(not installed)"
