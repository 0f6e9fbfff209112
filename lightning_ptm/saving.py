"""Writing sharded checkpoints: every rank its own stretches, straight from its pages, at once or while training goes on.

`Saving` is one checkpoint on its way to the disk; `Saves` are those of a run, one after the other.
I1: all ranks know of a failure on any of them, and raise; what was under the final name is then as it was before.
I2: collectives are issued by the caller's thread only. Behind its back, ranks know of each other by the files of the folder:
    each rank's list of ranges is its last act, and rank 0 puts the checkpoint in place when all are there.
I3: a checkpoint that is to be removed stays until the one that is being written is in place.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Literal
from urllib.parse import quote

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.checkpoint import parameters_by_name, parameters_of, plain_optimizer
from lightning_ptm.errors import AngelPTMError, CheckpointError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.progress import Seen, unseen
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.interrupts import interrupted_later
from lightning_ptm.runtime.machine import free_host_bytes
from lightning_ptm.runtime.pieces import within
from lightning_ptm.runtime.snapshot import Part
from lightning_ptm.runtime.values import ShardedFlat, ShardedKind
from lightning_ptm.storage.folder import (
    LIGHTNING,
    Draft,
    Index,
    OptimizerIndex,
    Seal,
    StateFile,
    all_have_written,
    write_ranges,
    write_synced,
)
from lightning_ptm.storage.tensors import Layout, lay_out
from lightning_ptm.storage.writer import BUFFER_BYTES, BUFFERS, RangeWriter, SaveOps, failure
from lightning_ptm.terms import Tier
from lightning_ptm.update.threads import one_core, use_cores

_COPIES_SHARE = 8
"""One part in this many of the free RAM may hold copies of what updates have changed since."""

_LOOK_S = 0.05
"""How often rank 0 looks whether the others have written."""

_FAREWELL_S = 30.0
"""How long rank 0 waits for the others when the run has failed, so that nobody can be asked."""


class Saving:
    """One sharded checkpoint of this rank, from now on. Collective, as is `finish`.

    Args:
        checkpoint: Lightning's, with `sharded.module_remainder` and `optimizer_remainder` in the places of state dicts.
        path: the folder to be.
        behind: write in a thread; training may go on.
        ranks_here: of this machine, which share its free RAM.
        ops: file calls, for tests.

    Raises:
        CheckpointError: on all ranks, when any could not begin (or, unless `behind`, write).
    """

    def __init__(
        self,
        engine: Engine,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        checkpoint: Mapping[str, Any],
        path: Path,
        *,
        behind: bool = False,
        ranks_here: int = 1,
        ops: SaveOps | None = None,
    ) -> None:
        started = self._started_s = perf_counter()
        self.path = path
        self._engine = engine
        self._ops = ops or SaveOps()
        with_optimizers = "optimizer_states" in checkpoint
        engine.drain("sharded checkpoint")
        kinds = [kind for kind in engine.values.kinds(optimizers=with_optimizers) if kind.tensors]
        layouts = [lay_out(kind.tensors, {"format": "pt", "unit": kind.unit, "kind": kind.kind}) for kind in kinds]
        names = file_names([kind.unit for kind in kinds], [kind.kind for kind in kinds])
        files = [
            StateFile(name, kind.unit, kind.kind, layout.size_bytes)
            for name, layout, kind in zip(names, layouts, kinds, strict=True)
        ]
        self._index = index_of(
            module,
            optimizers if with_optimizers else (),
            checkpoint,
            files,
            names={id(parameter): name for name, parameter in engine.values.names()},
            world_size=engine.communicator.world_size,
            page_size=engine.allocator.page_size,
        )

        self._total_bytes = sum(map(_bytes_here, kinds))
        """What this rank writes of tensors."""

        # State. The draft is rank 0's; the thread's errors are for `finish` to raise.
        self._done_bytes = 0
        self._watch: Seen = unseen
        self._draft: Draft | None = None
        self._error: BaseException | None = None
        self._error_of_commit: AngelPTMError | OSError | None = None
        self._committing = threading.Lock()
        self._written = threading.Event()
        self._given_up = threading.Event()
        self._then: list[tuple[Path | None, Callable[[], None]]] = []
        self._writer: RangeWriter | None = None
        self._thread: threading.Thread | None = None
        try:
            with engine.together():
                if engine.communicator.rank == 0:
                    self._draft = Draft(path)
            folder = self._draft.folder if self._draft is not None else None
            self._folder = Path(engine.told(None if folder is None else str(folder)))
            copies = int(free_host_bytes()) // _COPIES_SHARE // ranks_here // BUFFER_BYTES if behind else 0
            self._writer = RangeWriter(self._folder, ops, buffers=max(BUFFERS, copies))
            with engine.together():
                if self._draft is not None:
                    for name, layout in zip(names, layouts, strict=True):
                        self._writer.create(name, layout.header, layout.size_bytes)
                    self._index = replace(
                        self._index,
                        seals={
                            LIGHTNING: write_dictionary(self._folder / LIGHTNING, checkpoint, self._ops),
                            **{name: Seal.of(layout.header) for name, layout in zip(names, layouts, strict=True)},
                        },
                    )
            parts, self._outside = _parts(self._put, names, layouts, kinds, changing=behind)
            self._snapshot = engine.begin_snapshot(parts)
        except BaseException:
            self._clean_up()
            raise
        if behind:
            self._thread = threading.Thread(target=self._write_behind, name="lightning_ptm save", daemon=True)
            self._thread.start()
            engine.save_stall_s += perf_counter() - started
        else:
            try:
                # OpenMP's other threads would wait for the next copy on the cores of those that write.
                with one_core(), engine.bars.bar(f"saving {path.name}", self._total_bytes) as self._watch:
                    self._write()
                engine.save_stall_s += perf_counter() - started
                self.finish()
            except BaseException:  # Ctrl-C, too: nobody else knows of it yet
                self._clean_up()
                raise

    def afterwards(self, removes: Path | None, act: Callable[[], None]) -> None:
        """Do it when the checkpoint is in place, or now if it is; never if it fails. Rank 0 only.

        Args:
            removes: the earlier checkpoint that is to be removed, if that is what it does.
        """
        with self._committing:
            if self._draft is not None:
                self._then.append((removes, act))
                return
        act()

    def finish(self) -> None:
        """Wait until it is in place. Collective.

        Raises:
            CheckpointError: on all ranks, when any could not write.
        """
        started = perf_counter()
        try:
            with self._engine.together():
                self._wait()
                if self._error is not None:
                    raise self._told(self._error)
            with self._engine.together():
                self._commit()
                if self._error_of_commit is not None:
                    raise self._told(self._error_of_commit)
        except (AngelPTMError, OSError):
            self._end(started)
            raise
        # Anything else, such as Ctrl-C, leaves it in progress: `farewell` may still finish it.
        self._end(started)

    def _wait(self) -> None:
        """Until this rank has written. What is left of it is shown; the thread that writes shows nothing."""
        done_bytes = self._done_bytes
        with self._engine.bars.bar(f"saving {self.path.name}", self._total_bytes, done_bytes) as seen:
            while not self._written.wait(_LOOK_S):
                before, done_bytes = done_bytes, self._done_bytes
                seen(done_bytes - before)

    def _told(self, error: BaseException) -> BaseException:
        return failure(self.path, error) if isinstance(error, OSError) else error

    def _end(self, started: float) -> None:
        self._clean_up()
        self._engine.end_snapshot()
        self._engine.save_stall_s += perf_counter() - started

    def farewell(self) -> None:
        """The run has failed and no rank can be asked: finish what this rank can; never raises."""
        self._written.wait()
        if self._error is None and self._draft is not None:
            until = monotonic() + _FAREWELL_S
            world_size = self._engine.communicator.world_size
            while not all_have_written(self._folder, world_size) and monotonic() < until:
                time.sleep(_LOOK_S)
            if all_have_written(self._folder, world_size):
                self._commit()
        if self._draft is not None or self._error is not None:
            reason = self._error or self._error_of_commit or "not all ranks have written their part"
            rank_zero_warn(f"the checkpoint {self.path}, which was being written, is given up: {reason}")
        self._clean_up()

    @property
    def left_undone(self) -> dict[Path, Callable[[], None]]:
        """The removals that were to be done afterwards, when it has failed."""
        return {path: act for path, act in self._then if path is not None}

    # -- the thread's side, if there is one ---------------------------------------------------------------------------

    def _write_behind(self) -> None:
        use_cores(1)
        self._write()

    def _write(self) -> None:
        assert self._writer is not None
        try:
            self._snapshot.take_all()
            for write in self._outside:  # now that nobody else puts anything
                write()
            write_ranges(self._folder, self._engine.communicator.rank, self._writer.finish(), self._ops)
        except BaseException as error:
            self._error = error
            self._snapshot.fail(error)
            return
        finally:
            self._written.set()
        if self._thread is not None and self._draft is not None:
            while not all_have_written(self._folder, self._engine.communicator.world_size):
                if self._given_up.wait(_LOOK_S):
                    return
            self._commit()

    def _put(self, name: str, start: int, values: Tensor, stays: bool) -> None:
        """Called by one thread at a time: see `Snapshot`."""
        assert self._writer is not None
        self._writer.put(name, start, values, stays=stays)
        self._done_bytes += values.nbytes
        self._watch(values.nbytes)

    def _commit(self) -> None:
        """Put it in place, once."""
        with self._committing:
            if self._draft is None or self._error_of_commit is not None:
                return
            try:
                self._index.write(self._draft.folder, self._ops)
                self._draft.commit()
            except (AngelPTMError, OSError) as error:
                self._error_of_commit = error
                return
            self._draft = None
            then, self._then = self._then, []
        for _, act in then:
            act()
        if self._thread is not None:
            self._tell()

    def _tell(self) -> None:
        """What was written behind training, now that it is there."""
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
                self._snapshot.fail(CheckpointError(f"{self.path} was given up, since the run has failed"))
            self._thread.join()
        if self._writer is not None:
            self._writer.abort()
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.discard()


class Saves:
    """The checkpoints of a run, one after the other, and what waits for them: the removal of earlier ones (I3), and links.

    Args:
        failed_save: see `Settings.failed_save`.
    """

    def __init__(self, failed_save: Literal["stop", "go_on"]) -> None:
        self._failed_save = failed_save

        self._current: Saving | None = None
        self._last_failed = False
        self._to_remove: dict[Path, Callable[[], None]] = {}
        """After the next save that succeeds."""

    def save(self, path: str | Path, begin: Callable[[], Saving | None], *, behind: bool = False) -> None:
        """Start a save when the one before is in place. Collective.

        Args:
            begin: starts it; returns it while it is in progress, None if it is done.
            behind: it will be in progress; Ctrl-C waits until it is known here, since its thread reads pages, which must
                not end before it.

        Raises:
            CheckpointError: it, or the one before, failed, and that is to stop the run.
        """
        self.finish()
        try:
            with interrupted_later() if behind else nullcontext():
                saving = self._current = begin()
        except CheckpointError as error:
            self._failed(path, error)
            return
        self._last_failed = False
        self._to_remove.pop(Path(path), None)  # it has been replaced instead
        waiting, self._to_remove = self._to_remove, {}
        for earlier, act in waiting.items():
            if saving is not None:
                saving.afterwards(earlier, act)
            else:
                act()

    def finish(self) -> None:
        """Wait for the save in progress, if there is one. Collective. Raises as `save` does."""
        saving = self._current
        if saving is None:
            return
        try:
            saving.finish()
        except CheckpointError as error:
            self._current = None
            self._to_remove |= saving.left_undone
            self._failed(saving.path, error)
        self._current = None

    def remove(self, path: Path, remove: Callable[[Path], None]) -> None:
        """Remove an earlier checkpoint once there is a later one. Rank 0 only."""
        act = partial(_remove, path, remove)
        if self._last_failed:
            self._to_remove[path] = act
        elif self._current is not None:
            self._current.afterwards(path, act)
        else:
            remove(path)

    def link(self, path: Path, name: Path, link: Callable[[Path, Path], None]) -> None:
        """Make `name` name a checkpoint, once that is in place; never if it failed. Rank 0 only."""
        if self._current is not None:
            self._current.afterwards(None, partial(_link, path, name, link))
        elif not self._last_failed:
            link(path, name)

    def farewell(self) -> None:
        """The run has failed: finish what this rank can. Never raises."""
        saving, self._current = self._current, None
        if saving is not None:
            saving.farewell()

    def forget(self) -> None:
        """The run is over: the next one's saves remove nothing of this one's."""
        self._to_remove.clear()
        self._last_failed = False

    def _failed(self, path: str | Path, error: CheckpointError) -> None:
        self._last_failed = True
        if self._failed_save == "stop":
            raise error
        rank_zero_warn(f"there is no checkpoint {path}, and the run goes on (failed_save='go_on'): {error}")


def _link(path: Path, name: Path, link: Callable[[Path, Path], None]) -> None:
    """`link(path, name)` at a time when nobody would see an error."""
    try:
        link(path, name)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        rank_zero_warn(f"{name} could not be made a link to {path}: {reason}; use save_last=True")


def _remove(path: Path, remove: Callable[[Path], None]) -> None:
    """`remove(path)` at a time when nobody would see an error."""
    try:
        remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        rank_zero_warn(f"{path}, an earlier checkpoint, could not be removed: {error.strerror or error}")


# -- what is written where ------------------------------------------------------------------------------------------------


_Put = Callable[[str, int, Tensor, bool], None]
"""Writes to a file, from an offset on, the bytes of a tensor, which may stay as they are until all is written."""


def _bytes_here(kind: ShardedKind) -> int:
    """What this rank has of one kind of states."""
    paged = sum(segment.numel * flat.paged.dtype.itemsize for flat in kind.flats for segment in flat.segments)
    return paged + sum(values.nbytes for flat in kind.flats for _, _, values in flat.outside)


def _parts(
    put: _Put,
    names: Sequence[str],
    layouts: Sequence[Layout],
    kinds: Sequence[ShardedKind],
    *,
    changing: bool,
) -> tuple[list[Part], list[Callable[[], None]]]:
    """What to do with paged elements, and how to write those that no page holds, which never change.

    Args:
        changing: training goes on meanwhile.
    """
    parts: list[Part] = []
    outside: list[Callable[[], None]] = []
    for name, layout, kind in zip(names, layouts, kinds, strict=True):
        starts = {tensor.name: tensor.start for tensor in layout.tensors}
        for flat in kind.flats:
            if flat.segments:
                stays = not changing and flat.paged.tier is not Tier.DISK and in_ram(flat.paged.tensor())
                parts.append(Part(flat.paged, partial(_put, put, name, starts, flat, stays)))
            for parameter, first, values in flat.outside:
                offset = starts[parameter] + first * values.dtype.itemsize
                outside.append(partial(put, name, offset, values, False))
    return parts, outside


def _put(
    put: _Put,
    name: str,
    starts: Mapping[str, int],
    flat: ShardedFlat,
    stays: bool,
    start: int,
    values: Tensor,
) -> None:
    for segment in within(flat.segments, start, start + values.numel()):
        offset = starts[flat.names[segment.parameter]] + segment.parameter_start * values.dtype.itemsize
        put(name, offset, values[segment.start - start : segment.stop - start], stays)


def file_names(units: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Names of the files with these units' states of these kinds."""
    places = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    return [f"{places[unit]:04d}.{quote(kind, safe=' ')}.safetensors" for unit, kind in zip(units, kinds, strict=True)]


def write_dictionary(path: Path, checkpoint: Mapping[str, Any], ops: SaveOps) -> Seal:
    """Write Lightning's own dictionary, synced. Raises CheckpointError."""
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    content = buffer.getvalue()
    write_synced(path, content, ops)
    return Seal.of(content)


def index_of(
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    files: Sequence[StateFile],
    *,
    names: Mapping[int, str],
    world_size: int,
    page_size: int,
) -> Index:
    """The index of a checkpoint.

    Args:
        optimizers: those whose states are in it.
        names: of the tensors in the files, by id of parameter.
        world_size: ranks that write.
        page_size: of the run.
    """
    state = parameters_by_name(module)
    return Index(
        step=int(checkpoint.get("global_step", 0)),
        world_size=world_size,
        page_size=page_size,
        writer=f"lightning_ptm {_own_version()}",
        files=tuple(files),
        parameters={name: names[id(item)] for name, item in state.items() if id(item) in names},
        state=tuple(state),
        optimizers=tuple(
            OptimizerIndex(
                type(plain_optimizer(optimizer)).__qualname__,
                tuple(names[id(parameter)] for parameter in parameters_of(plain_optimizer(optimizer))),
            )
            for optimizer in optimizers
        ),
    )


def _own_version() -> str:
    try:
        return version("lightning-ptm")
    except PackageNotFoundError:
        return "(not installed)"
