"""Writes a sharded checkpoint: every rank writes its own ranges straight from its pages, at once or in the background
of training; or, after a run, rank 0 writes all from the restored module and optimizers.

`Saving` is one checkpoint that is being written in a run; save_queue.py has those of a run. The parts of state dicts
that are not in pages go to Lightning's dictionary (`module_remainder`, `optimizer_remainder`).
I1: a failure on any rank is known to all, and all raise; what was at the checkpoint's path is then unchanged.
I2: the run's collectives are issued by the caller's thread only. In the background, tensor-parallel groups exchange
    rows through a channel of their own (row_exchange.py), and ranks learn of each other by the files of the
    folder: each rank writes its list of ranges last, and rank 0 puts the checkpoint in place when all lists exist.
I3: after a run, the folder is the same as that of a checkpoint saved in the run, so any number of ranks can load it.
    Optimizer states whose shape is not the parameter's are stored in Lightning's dictionary.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NoReturn, Protocol
from urllib.parse import quote

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.checkpoints.after_run import EndedRun
from lightning_ptm.checkpoints.module_states import parameters_by_name
from lightning_ptm.checkpoints.optimizer_states import opened, parameters_of, plain_optimizer
from lightning_ptm.checkpoints.row_exchange import BackgroundRowExchange, PagedFlat, RowExchange, Table, not_exchanged
from lightning_ptm.errors import AngelPTMError, CheckpointError, UsageError, one_line
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.memory.core_limits import one_core, use_cores
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.layout import ParameterSpec
from lightning_ptm.progress import Seen, unseen
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.full_params.sharded_states import ShardedFlat, ShardedStates
from lightning_ptm.runtime.full_params.snapshot import SnapshotPart, stretches
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.tensors.page_io import within
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import (
    LIGHTNING,
    PARAMETERS,
    Index,
    OptimizerIndex,
    Seal,
    StateFile,
    all_have_written,
    kind_of,
    write_ranges,
    write_synced,
)
from lightning_ptm.storage.tensors import Layout, lay_out
from lightning_ptm.storage.writer import BUFFER_BYTES, BUFFERS, FileBytes, RangeWriter, SaveOps, failure

_AT_ONCE_BYTES = 16 << 20
"""Bytes that are copied together of pages that are written from where they are: each message to a tensor-parallel group
makes all its ranks wait once."""

_Put = Callable[[str, int, Tensor | FileBytes, bool], None]
"""Writes bytes to a file: (file name, offset, bytes, whether the bytes stay unchanged until all is written)."""


# -- state dicts without tensors of pages --------------------------------------------------------------------------------


def module_remainder(engine: Engine, module: LightningModule) -> dict[str, Any]:
    """Returns the module's state dict without parameters: buffers and extra state."""
    engine.drain("state dict")
    engine.executor.release_all()
    return without_parameters(module)


def without_parameters(module: LightningModule) -> dict[str, Any]:
    """Returns the same for a module that is in no run."""
    parameters = {id(parameter) for parameter in module.parameters()}
    state = parameters_by_name(module)
    for name in [name for name, item in state.items() if isinstance(item, Tensor) and id(item) in parameters]:
        del state[name]
    return {name: item.detach() if isinstance(item, Tensor) else item for name, item in state.items()}


def optimizer_remainder(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state dict without element-wise states: groups, and scalars such as `step`."""
    engine.drain("optimizer state")
    optimizer = plain_optimizer(optimizer)
    if outside_module := engine.changes.outside_module(optimizer):
        raise UsageError(
            f"a parameter of shape {tuple(outside_module[0].shape)} is in a group of {type(optimizer).__name__} and in no "
            "module, so a sharded checkpoint has no name for it; take it out of the group, or use "
            "checkpoints=Checkpoints(state_dict_type='full')"
        )
    with opened(optimizer):
        result = optimizer.state_dict()
    scalars = engine.optimizer_values.scalars_in_order(
        engine.updates.groups.index_of(optimizer), parameters_of(optimizer)
    )
    if scalars:  # Lightning's mock optimizer, where configure_optimizers returns none, has no states
        result["state"] |= (
            scalars  # states that the optimizer itself holds are of parameters that this run does not train
        )
    return result


def optimizer_remainder_after_run(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state dict without element-wise states: groups, and states of other shapes (I3)."""
    optimizer = plain_optimizer(optimizer)
    result = optimizer.state_dict()
    parameters = parameters_of(optimizer)
    result["state"] = {
        place: {name: value for name, value in state.items() if not _is_slot(parameters[place], value)}
        for place, state in result["state"].items()
    }
    return result


# -- the folder's files, and which bytes of them this rank writes --------------------------------------------------------


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
    """Joins two parts that read the same pages: their flat has parameters of several units, whose files differ. These
    parameters are 1-D. Tensor parallelism exchanges only rows of parameters cut by columns, so none of theirs."""

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


# -- saving in a run -----------------------------------------------------------------------------------------------------


_COPIES_SHARE = 8
"""Copies of elements that updates change during a save may take one part in this many of the free RAM."""

_LOOK_S = 0.05
"""Interval at which rank 0 checks whether the other ranks have written."""

_LAST_WAIT_S = 30.0
"""Time that rank 0 waits for the others' files after the run has failed, when there can be no collectives."""


class Saving:
    """A sharded checkpoint that this rank is writing, from its construction on. Collective, as is `finish`.

    Args:
        checkpoint: Lightning's dictionary, with the results of `module_remainder` and `optimizer_remainder` in
            place of state dicts.
        path: the checkpoint's folder.
        in_background: write in a background thread; training may go on.
        ranks_here: number of ranks that share this machine's RAM.
        ops: file calls, for tests.

    Raises:
        CheckpointError: on all ranks, if any could not begin (or, unless `in_background`, write).
    """

    def __init__(
        self,
        engine: Engine,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        checkpoint: Mapping[str, Any],
        path: Path,
        *,
        in_background: bool = False,
        ranks_here: int = 1,
        ops: SaveOps | None = None,
    ) -> None:
        started = self._started_s = perf_counter()
        self.path = path
        self._engine = engine
        self._ops = ops or SaveOps()
        self._in_background = in_background
        with_optimizers = "optimizer_states" in checkpoint
        engine.drain("sharded checkpoint")
        kinds = [kind for kind in engine.sharded_kinds.kinds(optimizers=with_optimizers) if kind.tensors]
        files = StateFiles.of(kinds)
        self._index = index_of(
            module,
            optimizers if with_optimizers else (),
            checkpoint,
            files,
            names={id(parameter): name for name, parameter in engine.gathered_flats.names()},
            world_size=engine.communicator.world_size,
            page_size=engine.allocator.page_size,
        )
        self._total_bytes = sum(map(bytes_here, kinds))
        """Bytes of tensors that this rank writes."""

        # State. The draft is rank 0's; `finish` raises the thread's errors.
        self._done_bytes = 0
        self._watch: Seen = unseen
        self._draft: Draft | None = None
        self._error: BaseException | None = None
        self._error_of_commit: Exception | None = None
        self._committing = threading.Lock()
        self._written = threading.Event()
        self._given_up = threading.Event()
        self._then: list[tuple[Path | None, Callable[[], None]]] = []
        self._writer: RangeWriter | None = None
        self._thread: threading.Thread | None = None
        self._exchange: RowExchange | BackgroundRowExchange | None = None
        self._putting = threading.Lock()
        try:
            copies = int(free_host_bytes()) // _COPIES_SHARE // ranks_here // BUFFER_BYTES if in_background else 0
            rows = 0 if engine.with_other_parts.alone else copies // 2
            self._begin(checkpoint, files, copies - rows)
            self._begin_snapshot(files, kinds, rows * BUFFER_BYTES, in_background=in_background)
            if in_background:
                self._start_thread()
        except BaseException:
            self._clean_up()
            raise
        if in_background:
            engine.add_save_stall(perf_counter() - started)
        else:
            self._write_now()

    def _begin(self, checkpoint: Mapping[str, Any], files: StateFiles, copies: int) -> None:
        """Creates the folder, with all that is known before any state is written. Collective.

        Args:
            copies: number of the writer's buffers for which RAM is free.
        """
        engine = self._engine
        with engine.barriers.errors_on_all_ranks():
            if engine.communicator.rank == 0:
                self._draft = Draft(self.path)
        folder = self._draft.folder if self._draft is not None else None
        self._folder = Path(engine.barriers.broadcast(None if folder is None else str(folder)))
        with engine.barriers.errors_on_all_ranks(), self._as_checkpoint_errors():
            self._writer = RangeWriter(self._folder, self._ops, buffers=max(BUFFERS, copies))
            if self._draft is not None:
                files.create(self._writer)
                dictionary = write_dictionary(self._folder / LIGHTNING, checkpoint, self._ops)
                self._index = replace(self._index, seals={LIGHTNING: dictionary, **files.seals()})

    def _begin_snapshot(
        self, files: StateFiles, kinds: Sequence[ShardedStates], room_bytes: int, *, in_background: bool
    ) -> None:
        """Begins the snapshot of the present states, which is written. Collective.

        Args:
            room_bytes: free RAM for pages that wait to be exchanged in the background.
        """
        engine, cell_numel = self._engine, self._engine.snapshots.at_once
        channel = engine.communicators.background if in_background else None
        with engine.barriers.errors_on_all_ranks():
            flats = [pages_of(flat, cell_numel, changing=in_background) for kind in kinds for flat in kind.flats]
            rows = RowExchange(engine.with_other_parts, flats, channel)
        background: BackgroundRowExchange | None = None
        if channel is not None:
            background = BackgroundRowExchange(rows, room_bytes, lambda error: self._snapshot.fail(error))
        exchange = rows if background is None else background
        parts, self._outside = parts_of(
            self._put, files, kinds, exchange, cell_numel=cell_numel, changing=in_background
        )
        self._snapshot = engine.snapshots.begin(parts, None if background is None else background.abandon)
        self._exchange = exchange

    def _start_thread(self) -> None:
        """Starts the thread that writes."""
        thread = threading.Thread(target=self._write_in_background, name="lightning_ptm save", daemon=True)
        with self._engine.barriers.errors_on_all_ranks(), self._as_checkpoint_errors():
            self._thread = thread  # before it starts: a second Ctrl-C may come at once
            try:
                thread.start()
            except RuntimeError:  # no room for another thread
                self._thread = None
                raise

    @contextmanager
    def _as_checkpoint_errors(self) -> Iterator[None]:
        """Context in which an error, as of a system without room for a thread or a buffer, is one of the checkpoint."""
        try:
            yield
        except Exception as error:
            self._raise(error)

    def _write_now(self) -> None:
        try:
            # One core: OpenMP's other threads would spin for the next copy on the cores of the threads that write.
            with one_core(), self._engine.bars.bar(f"saving {self.path.name}", self._total_bytes) as self._watch:
                self._write()
            self._engine.add_save_stall(perf_counter() - self._started_s)
            self.finish()
        except BaseException:  # Ctrl-C, too: SaveQueue does not know this save yet
            self._clean_up()
            raise

    def afterwards(self, removes: Path | None, act: Callable[[], None]) -> None:
        """Calls `act` when the checkpoint is in place, at once if it is; never if it fails. Rank 0 only.

        Args:
            removes: the earlier checkpoint that `act` removes, if it removes one.
        """
        with self._committing:
            if self._draft is not None:
                self._then.append((removes, act))
                return
        act()

    def finish(self) -> None:
        """Waits until the checkpoint is in place. Collective.

        Raises:
            CheckpointError: on all ranks, if any could not write.
        """
        started = perf_counter()
        try:
            with self._engine.barriers.errors_on_all_ranks():
                self._wait()
                if self._error is not None:
                    self._raise(self._error)
            with self._engine.barriers.errors_on_all_ranks():
                self._commit()
                if self._error_of_commit is not None:
                    self._raise(self._error_of_commit)
        except AngelPTMError:
            self._end(started)
            raise
        # Other exceptions, such as Ctrl-C, leave the save in progress: `end_after_failure` may still finish it.
        self._end(started)

    def _wait(self) -> None:
        """Waits until this rank has written, with a progress bar of the rest; the background thread shows none."""
        done_bytes = self._done_bytes
        with self._engine.bars.bar(f"saving {self.path.name}", self._total_bytes, done_bytes) as seen:
            while not self._written.wait(_LOOK_S):
                before, done_bytes = done_bytes, self._done_bytes
                seen(done_bytes - before)

    def _raise(self, error: BaseException) -> NoReturn:
        """Raises an error of any thread as a CheckpointError, whatever it is: only this checkpoint is lost."""
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise error
        if isinstance(error, OSError):
            raise failure(self.path, error) from error
        raise CheckpointError(
            f"{self.path} could not be written: {one_line(error)}; earlier checkpoints are untouched; remove the cause, or "
            f"set Checkpoints(on_failure='warn') to go on without this checkpoint"
        ) from error

    def _end(self, started: float) -> None:
        self._clean_up()
        self._engine.add_save_stall(perf_counter() - started)

    def end_after_failure(self) -> None:
        """Ends the save after the run has failed, without collectives. Never raises."""
        self._written.wait()
        if self._error is None and self._draft is not None:
            until = monotonic() + _LAST_WAIT_S
            world_size = self._engine.communicator.world_size
            while not all_have_written(self._folder, world_size) and monotonic() < until:
                time.sleep(_LOOK_S)
            if all_have_written(self._folder, world_size):
                self._commit()
        if self._draft is not None or self._error is not None:
            reason = self._error or self._error_of_commit or "not all ranks have written their part"
            rank_zero_warn(f"the checkpoint {self.path} could not be completed after the run had failed: {reason}")
        self._clean_up()

    def abandon(self) -> None:
        """Ends the save without waiting for what is not written, and without collectives. Never raises."""
        self._clean_up()

    @property
    def pending_removals(self) -> dict[Path, Callable[[], None]]:
        """Removals of earlier checkpoints that were not done because the save has failed."""
        return {path: act for path, act in self._then if path is not None}

    # -- writing, in the background thread if there is one ------------------------------------------------------------

    def _write_in_background(self) -> None:
        use_cores(1)
        self._write()

    def _write(self) -> None:
        assert self._writer is not None
        try:
            if isinstance(self._exchange, BackgroundRowExchange):
                self._exchange.start()
            self._snapshot.copy_all()
            if self._exchange is not None:
                self._exchange.finish()
            for write in self._outside:  # after all other threads that call `_put`
                write()
            write_ranges(self._folder, self._engine.communicator.rank, self._writer.finish(), self._ops)
        except BaseException as error:
            self._error = error
            self._snapshot.fail(error)
            if self._exchange is not None:
                self._exchange.give_up()
            return
        finally:
            self._written.set()
        if self._in_background and self._draft is not None:
            while not all_have_written(self._folder, self._engine.communicator.world_size):
                if self._given_up.wait(_LOOK_S):
                    return
            self._commit()

    def _put(self, name: str, start: int, values: Tensor | FileBytes, stays: bool) -> None:
        """Writes bytes to a file. Called by the threads of the snapshot, and by the one that exchanges rows."""
        assert self._writer is not None
        with self._putting:
            self._writer.put(name, start, values, stays=stays)
            self._done_bytes += values.nbytes
            self._watch(values.nbytes)

    def _commit(self) -> None:
        """Puts the checkpoint in place, once."""
        with self._committing:
            if self._draft is None or self._error_of_commit is not None:
                return
            try:
                self._index.write(self._draft.folder, self._ops)
                self._draft.commit()
            except Exception as error:
                self._error_of_commit = error
                return
            self._draft = None
            then, self._then = self._then, []
        for _, act in then:
            act()
        if self._in_background:
            self._report()

    def _report(self) -> None:
        """Prints that a background save has ended, with its size and speed."""
        seconds = perf_counter() - self._started_s
        bars = self._engine.bars
        if seconds >= bars.after_s:
            count = sum(file.size_bytes for file in self._index.files)
            rate = f"{count / seconds / 1e6:,.0f} MB/s"
            bars.line(f"{self.path} is written: {count / 1e9:.3g} GB in {seconds:.1f} s, {rate}")

    def _clean_up(self) -> None:
        self._given_up.set()
        if self._thread is not None:
            if not self._written.is_set():
                self._snapshot.fail(
                    CheckpointError(
                        f"{self.path} was not completed, since the run has failed; earlier checkpoints are untouched; look "
                        "for the run's first error"
                    )
                )
            self._thread.join()
        if self._writer is not None:
            self._writer.abort()
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.discard()
        self._engine.snapshots.end()


# -- saving after a run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _States:
    unit: str
    kind: str
    values: dict[str, Tensor]

    @property
    def tensors(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, value.dtype, tuple(value.shape)) for name, value in self.values.items()]


def save_after_run(
    ended: EndedRun,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    path: Path,
    ops: SaveOps | None = None,
) -> None:
    """Writes the folder of a sharded checkpoint. Rank 0 only.

    Args:
        checkpoint: Lightning's dictionary, with the results of `without_parameters` and `optimizer_remainder_after_run`
            in place of state dicts.

    Raises:
        CheckpointError: it cannot be written; what was at `path` before is unchanged.
    """
    ops = ops or SaveOps()
    chosen = optimizers if "optimizer_states" in checkpoint else ()
    parameters = module.named_parameters()
    names = {id(parameter): name for name, parameter in parameters if not isinstance(parameter, GuardedParameter)}
    kinds = list(_kinds(ended, module, names, chosen))
    files = StateFiles.of(kinds)
    index = index_of(module, chosen, checkpoint, files, names=names, world_size=1, page_size=ended.page_size)
    draft = Draft(path)
    try:
        writer = RangeWriter(draft.folder, ops)
        try:
            files.create(writer)
            for file, layout, each in zip(files.files, files.layouts, kinds, strict=True):
                for stored, value in zip(layout.tensors, each.values.values(), strict=True):
                    writer.put(file.name, stored.start, value.detach().cpu().reshape(-1))
            ranges = writer.finish()
        finally:
            writer.abort()
        dictionary = write_dictionary(draft.folder / LIGHTNING, checkpoint, ops)
        write_ranges(draft.folder, 0, ranges, ops)
        replace(index, seals={LIGHTNING: dictionary, **files.seals()}).write(draft.folder, ops)
        draft.commit()
    except BaseException:
        draft.discard()
        raise


def _kinds(
    ended: EndedRun, module: nn.Module, names: Mapping[int, str], optimizers: Sequence[Optimizer]
) -> Iterator[_States]:
    """Yields every kind of every unit's states, unit by unit, as `AllShardedStates.kinds` does in a run."""
    slots: dict[int, dict[str, Tensor]] = {}
    of_earlier: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        for owner, state in plain_optimizer(optimizer).state.items():
            of = number if id(owner) in of_earlier else None
            its = {kind_of(slot, of): value for slot, value in state.items() if _is_slot(owner, value)}
            slots.setdefault(id(owner), {}).update(its)
        of_earlier |= {id(parameter) for parameter in parameters_of(plain_optimizer(optimizer))}
    of_unit: dict[str, list[nn.Parameter]] = {unit: [] for unit in dict.fromkeys(ended.units.values())}
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, GuardedParameter):
            of_unit.setdefault(ended.units.get(name, ""), []).append(parameter)
    for unit, parameters in of_unit.items():
        if parameters:
            yield _States(unit, PARAMETERS, {names[id(parameter)]: parameter for parameter in parameters})
        known = {names[id(parameter)]: slots.get(id(parameter), {}) for parameter in parameters}
        for slot in dict.fromkeys(slot for state in known.values() for slot in state):
            yield _States(unit, slot, {name: state[slot] for name, state in known.items() if slot in state})


def _is_slot(parameter: Tensor, value: Any) -> bool:
    """Returns whether a state is element-wise. A 0-d state is not: a step count has the shape of a 0-d parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
