"""Writes a sharded checkpoint: every rank writes its own ranges straight from its pages, at once or in the background
of training.

`Saving` is one checkpoint that is being written. save_queue.py has those of a run, folder_contents.py says what is
written where.
I1: a failure on any rank is known to all, and all raise; what was at the checkpoint's path is then unchanged.
I2: the run's collectives are issued by the caller's thread only. In the background, tensor-parallel groups exchange
    rows through a channel of their own (background_row_exchange.py), and ranks learn of each other by the files of the
    folder: each rank writes its list of ranges last, and rank 0 puts the checkpoint in place when all lists exist.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.checkpoints.background_row_exchange import BackgroundRowExchange
from lightning_ptm.checkpoints.folder_contents import (
    StateFiles,
    bytes_here,
    index_of,
    pages_of,
    parts_of,
    write_dictionary,
)
from lightning_ptm.checkpoints.row_exchange import RowExchange
from lightning_ptm.errors import AngelPTMError, CheckpointError
from lightning_ptm.progress import Seen, unseen
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.full_params.sharded_states import ShardedStates
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import LIGHTNING, all_have_written, write_ranges
from lightning_ptm.storage.writer import BUFFER_BYTES, BUFFERS, FileBytes, RangeWriter, SaveOps, failure
from lightning_ptm.update.core_limits import one_core, use_cores

_COPIES_SHARE = 8
"""Copies of elements that updates change during a save may take one part in this many of the free RAM."""

_LOOK_S = 0.05
"""Interval at which rank 0 checks whether the other ranks have written."""

_LAST_WAIT_S = 30.0
"""How long rank 0 waits for the others' files after the run has failed, when there can be no collectives."""


class Saving:
    """A sharded checkpoint that this rank is writing, from its construction on. Collective, as is `finish`.

    Args:
        checkpoint: Lightning's dictionary, with the results of `sharded.module_remainder` and `optimizer_remainder` in
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
        self._error_of_commit: AngelPTMError | OSError | None = None
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
        except BaseException:
            self._clean_up()
            raise
        if in_background:
            self._thread = threading.Thread(target=self._write_in_background, name="lightning_ptm save", daemon=True)
            self._thread.start()
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
        self._writer = RangeWriter(self._folder, self._ops, buffers=max(BUFFERS, copies))
        with engine.barriers.errors_on_all_ranks():
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
                    raise self._as_checkpoint_error(self._error)
            with self._engine.barriers.errors_on_all_ranks():
                self._commit()
                if self._error_of_commit is not None:
                    raise self._as_checkpoint_error(self._error_of_commit)
        except (AngelPTMError, OSError):
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

    def _as_checkpoint_error(self, error: BaseException) -> BaseException:
        return failure(self.path, error) if isinstance(error, OSError) else error

    def _end(self, started: float) -> None:
        self._clean_up()
        self._engine.snapshots.end()
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

    @property
    def pending_removals(self) -> dict[Path, Callable[[], None]]:
        """Removals of earlier checkpoints that were not done because the save has failed."""
        return {path: act for path, act in self._then if path is not None}

    # -- writing, in the background thread if there is one ------------------------------------------------------------

    def _write_in_background(self) -> None:
        use_cores(1)
        if isinstance(self._exchange, BackgroundRowExchange):
            self._exchange.start()
        self._write()

    def _write(self) -> None:
        assert self._writer is not None
        try:
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
        if self._thread is not None and self._draft is not None:
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
            except (AngelPTMError, OSError) as error:
                self._error_of_commit = error
                return
            self._draft = None
            then, self._then = self._then, []
        for _, act in then:
            act()
        if self._thread is not None:
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
