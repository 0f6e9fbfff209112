"""Sharded checkpoints: every rank writes its own stretches of the model's states, straight from its pages, and nothing is
gathered; any number of ranks reads them back (`state_dict_type="sharded"`).

Between Lightning's dictionary and the folder of storage/folder.py. What it loads is an ordinary Lightning checkpoint whose
tensors are mapped files, so loading is what it is for any checkpoint (checkpoint.py): each rank reads what it owns.
I1: all ranks know of a failure on any of them, and raise; the folder under the final name is then as it was before.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.checkpoint import plain_optimizer
from lightning_ptm.errors import AngelPTMError, CheckpointError
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.values import PARAMETERS, ShardedKind
from lightning_ptm.storage.folder import (
    LIGHTNING,
    Draft,
    Index,
    OptimizerIndex,
    StateFile,
    all_ranges,
    read_index,
    write_ranges,
    write_synced,
)
from lightning_ptm.storage.tensors import Layout, Mapped, lay_out
from lightning_ptm.storage.writer import RangeWriter, SaveOps, read_ranges

# -- what Lightning's dictionary holds instead of tensors ------------------------------------------------------------------


def module_remainder(engine: Engine, module: LightningModule) -> dict[str, Any]:
    """The module's state dict without parameters: buffers and extra state."""
    engine.drain()
    engine.executor.release_all()
    parameters = {id(parameter) for parameter in module.parameters()}
    state = module.state_dict(keep_vars=True)
    for name in [name for name, item in state.items() if isinstance(item, Tensor) and id(item) in parameters]:
        del state[name]
    return {name: item.detach() if isinstance(item, Tensor) else item for name, item in state.items()}


def optimizer_remainder(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict without element-wise state: groups, and scalars such as `step`."""
    engine.drain()
    optimizer = plain_optimizer(optimizer)
    result = optimizer.state_dict()
    result["state"] = engine.values.optimizer_scalars(engine.updates.index_of(optimizer), _parameters_of(optimizer))
    return result


def _parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- saving ---------------------------------------------------------------------------------------------------------------


def save(
    engine: Engine,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    path: Path,
    *,
    ops: SaveOps | None = None,
) -> None:
    """Write a checkpoint. Collective; on return it is durable and in place.

    Args:
        checkpoint: Lightning's, with `module_remainder` and `optimizer_remainder` in the places of state dicts.
        ops: file calls, for tests.

    Raises:
        CheckpointError: on all ranks, when any could not write; what was at `path` is still there.
    """
    engine.drain()
    engine.executor.release_all()
    with_optimizers = "optimizer_states" in checkpoint
    kinds = [kind for kind in engine.values.kinds(optimizers=with_optimizers) if kind.tensors]
    layouts = [lay_out(kind.tensors, {"format": "pt", "unit": kind.unit, "kind": kind.kind}) for kind in kinds]
    names = _file_names(kinds)
    rank = engine.communicator.rank
    draft: Draft | None = None
    writer: RangeWriter | None = None
    try:
        with together(engine):
            if rank == 0:
                draft = Draft(path)
        folder = Path(engine.communicator.broadcast_object(str(draft.folder) if draft is not None else None))
        writer = RangeWriter(folder, ops)
        with together(engine):
            if rank == 0:
                for name, layout in zip(names, layouts, strict=True):
                    writer.create(name, layout.header, layout.size_bytes)
        with together(engine):
            for name, layout, kind in zip(names, layouts, kinds, strict=True):
                _write_kind(writer, name, layout, kind)
            ranges = writer.finish()
            write_ranges(folder, rank, ranges)
        with together(engine):
            if draft is not None:
                _write_dictionary(folder / LIGHTNING, checkpoint)
                files = [
                    StateFile(name, kind.unit, kind.kind, layout.size_bytes)
                    for name, layout, kind in zip(names, layouts, kinds, strict=True)
                ]
                _index(engine, module, optimizers if with_optimizers else (), checkpoint, files).write(folder)
                draft.commit()
                draft = None
    finally:
        if writer is not None:
            writer.abort()
        if draft is not None:
            draft.discard()


def _file_names(kinds: Sequence[ShardedKind]) -> list[str]:
    units = {kind.unit: None for kind in kinds}
    places = {unit: place for place, unit in enumerate(units)}
    return [f"{places[kind.unit]:04d}.{kind.kind}.safetensors" for kind in kinds]


def _write_kind(writer: RangeWriter, name: str, layout: Layout, kind: ShardedKind) -> None:
    places = {tensor.name: tensor for tensor in layout.tensors}
    for parameter, start, values in kind.stretches():
        writer.put(name, places[parameter].start + start * values.dtype.itemsize, values)


def _write_dictionary(path: Path, checkpoint: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    write_synced(path, buffer.getvalue())


def _index(
    engine: Engine,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    files: Sequence[StateFile],
) -> Index:
    names = {id(parameter): name for name, parameter in engine.values.names()}
    state = module.state_dict(keep_vars=True)
    return Index(
        step=int(checkpoint.get("global_step", 0)),
        world_size=engine.communicator.world_size,
        page_size=engine.allocator.page_size,
        writer=f"lightning_ptm {_own_version()}",
        files=tuple(files),
        parameters={name: names[id(item)] for name, item in state.items() if id(item) in names},
        state=tuple(state),
        optimizers=tuple(
            OptimizerIndex(
                type(plain_optimizer(optimizer)).__qualname__,
                tuple(names[id(parameter)] for parameter in _parameters_of(plain_optimizer(optimizer))),
            )
            for optimizer in optimizers
        ),
    )


def _own_version() -> str:
    try:
        return version("lightning-ptm")
    except PackageNotFoundError:
        return "(not installed)"


@contextmanager
def together(engine: Engine) -> Iterator[None]:
    """What fails inside on one rank raises on all of them (I1). Collective."""
    error: BaseException | None = None
    try:
        yield
    except (AngelPTMError, OSError) as caught:
        error = caught
    rank, ranks = engine.communicator.rank, engine.communicator.world_size
    if ranks > 1:
        failed = torch.tensor([0 if error is None else rank + 1], dtype=torch.int64)
        first = int(engine.communicator.all_reduce(failed, maximum=True).item())
        if first and error is None:
            text = engine.communicator.broadcast_object(None, first - 1)
            raise CheckpointError(f"rank {first - 1}: {text}")
        if first:
            engine.communicator.broadcast_object(str(error), first - 1)
    if error is not None:
        raise error


# -- loading --------------------------------------------------------------------------------------------------------------


def load(
    path: Path,
    *,
    weights_only: bool = True,
    optimizers: bool = True,
    verify: Callable[[Index], Sequence[StateFile]] | None = lambda index: index.files,
) -> dict[str, Any]:
    """Read a sharded checkpoint as an ordinary Lightning one. Its tensors are mapped files, read as they are needed.

    Args:
        path: the folder.
        weights_only: as for `torch.load`, for Lightning's own dictionary; the tensors' files hold no code in any case.
        optimizers: with the optimizers' states.
        verify: chooses the files whose checksums are compared here; None: no file's.

    Raises:
        CheckpointError: it is incomplete, damaged (with file, tensor and range), or of a newer version.
    """
    index = read_index(path)
    layouts = {file.name: Mapped(path / file.name) for file in index.files}
    if verify is not None:
        check(path, index, verify(index))
    checkpoint = _read_dictionary(path / LIGHTNING, weights_only=weights_only)
    weights = {
        name: mapped
        for file in index.files
        if file.kind == PARAMETERS
        for mapped in [layouts[file.name]]
        for name in mapped.names()
    }
    rest = checkpoint.get("state_dict", {})
    missing = sorted(set(index.parameters.values()) - set(weights))
    if missing:
        raise CheckpointError(
            f"{path} has no file with {', '.join(missing[:5])}; it is damaged, use an earlier checkpoint"
        )
    checkpoint["state_dict"] = {
        name: weights[index.parameters[name]].tensor(index.parameters[name]) if name in index.parameters else rest[name]
        for name in index.state
        if name in index.parameters or name in rest
    }
    if optimizers and index.optimizers:
        slots = [(file.kind, layouts[file.name]) for file in index.files if file.kind != PARAMETERS]
        for state, known in zip(checkpoint["optimizer_states"], index.optimizers, strict=True):
            _add_slots(state["state"], known, slots)
    return checkpoint


def _add_slots(state: dict[int, dict[str, Any]], known: OptimizerIndex, slots: Sequence[tuple[str, Mapped]]) -> None:
    places = {name: place for place, name in enumerate(known.parameters)}
    for kind, mapped in slots:
        for name in mapped.names():
            if name in places and places[name] in state:
                state[places[name]][kind] = mapped.tensor(name)


def _read_dictionary(path: Path, *, weights_only: bool) -> dict[str, Any]:
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=weights_only))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch has an error of its own for each way in which a file can be damaged
        if weights_only and "weights_only" in str(error).lower():
            raise CheckpointError(
                f"{path} holds objects that are not loaded from a file that may not be trusted ({_first_line(error)}); if "
                f"you trust it, give weights_only=False to the Trainer's method, or name their classes to "
                f"torch.serialization.add_safe_globals"
            ) from error
        raise CheckpointError(f"{path} is damaged ({_first_line(error)}); use an earlier checkpoint") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def check(path: Path, index: Index, files: Sequence[StateFile]) -> None:
    """Compare the bytes of these files with the checksums of those that were written.

    Raises:
        CheckpointError: with the file, the tensor and the range that differ.
    """
    written = all_ranges(path, index)
    for file in files:
        mapped = Mapped(path / file.name)
        ranges = written[file.name]
        position = mapped.layout.tensors[0].start if mapped.layout.tensors else file.size_bytes
        for each in ranges:
            if each.start != position:
                raise CheckpointError(f"{path / file.name}: nobody has written bytes {position} to {each.start}")
            position = each.stop
        if position != mapped.layout.size_bytes or mapped.layout.size_bytes != file.size_bytes:
            raise CheckpointError(
                f"{path / file.name} has {mapped.layout.size_bytes} bytes, of {file.size_bytes} that were written"
            )
        bad = read_ranges(path / file.name, ranges)
        if bad is not None:
            raise CheckpointError(
                f"{path / file.name}: bytes {bad.start} to {bad.stop}, in {mapped.layout.tensor_at(bad.start)}, are not "
                f"those that were written (their checksum differs); use an earlier checkpoint, and check that disk"
            )
