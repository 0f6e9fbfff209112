"""Lightning's calls on a strategy for checkpoints: saving and loading, in a run and outside of runs.

Chooses the format (formats.py), and decides whether there is anything to save. Checkpoints that Lightning loads before a
run has pages are in `SetUp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints import after_run, formats, module_states
from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.checkpoints.full import check_lightnings
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer, renew
from lightning_ptm.checkpoints.protocol import Files, Format, LoadOptions, SaveOptions
from lightning_ptm.checkpoints.save_queue import TORN, SaveQueue
from lightning_ptm.config import Settings
from lightning_ptm.errors import CheckpointError, UsageError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.planning.mesh import mesh_of
from lightning_ptm.progress import Progress
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.trainer import randomness
from lightning_ptm.trainer.between_runs import BetweenRuns
from lightning_ptm.trainer.ranks import SetUp
from lightning_ptm.trainer.run import Run


class _LightningFiles(Files):
    """Lightning's own methods, which the strategy overrides, and which call its CheckpointIO."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        self._strategy = strategy

    @override
    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        ParallelStrategy.save_checkpoint(self._strategy, checkpoint, path, storage_options=storage_options)

    @override
    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self._strategy, path, weights_only)

    @override
    def remove(self, path: Path) -> None:
        self._strategy.checkpoint_io.remove_checkpoint(path)


class RunCheckpoints:
    """Saving and loading for one strategy. In each method, `run` is the run in progress.

    Args:
        strategy: the strategy; only methods of Lightning's own base class are called on it.
        between: the record of the last run.
        save_ops: returns the file calls of sharded checkpoints, when one begins.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        settings: Settings,
        between: BetweenRuns,
        save_ops: Callable[[], SaveOps | None],
    ) -> None:
        self._strategy = strategy
        self._files = _LightningFiles(strategy)
        self._settings = settings
        self._between = between
        self._save_ops = save_ops
        # State.
        self.saves = SaveQueue(settings.checkpoints.on_failure)
        self._format = formats.BY_STATE_DICT_TYPE[settings.checkpoints.state_dict_type]

    @contextmanager
    def in_format(self, chosen: Format) -> Iterator[None]:
        """Overrides the format of the settings inside the block."""
        before, self._format = self._format, chosen
        try:
            yield
        finally:
            self._format = before

    # -- saving -------------------------------------------------------------------------------------------------------

    def module_state(self, run: Run | None, module: LightningModule) -> dict[str, Any]:
        """The module's state for a checkpoint; empty on ranks that do not write it. Collective."""
        keep = self._strategy.is_global_zero
        if run is None or not (run.has_pages or run.cut_off):
            after_run.check_weights(self._between.ended, module, warn=keep)
            return self._format.module_state_after_run(module) if keep else {}
        if not run.cut_off:
            run.settle()
        if not run.unsaved and run.interruption is not None:
            with run.interruption.recorded():
                return self._format.module_state(run.engine, module, keep=keep)
        return {}

    def optimizer_state(self, run: Run | None, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state for a checkpoint; empty on ranks that do not write it. Collective."""
        keep = self._strategy.is_global_zero
        if run is not None and run.has_pages and not run.fits and self._format.from_pages:
            raise UsageError(
                "a sharded checkpoint during an evaluation cannot hold the optimizer states of the fit before; save "
                "after the evaluation, or give save_checkpoint(..., weights_only=True); if this came from "
                "scale_batch_size or lr_find, use a new Trainer"
            )
        if run is None or not (run.cut_off or (run.has_pages and run.fits)):
            # A run whose set-up has failed has new optimizers, and no states of them in pages.
            if run is None or not run.fits:
                after_run.check_optimizer_states(self._between.ended)
            return self._format.optimizer_state_after_run(optimizer) if keep else {}
        if not run.unsaved and run.interruption is not None:
            with run.interruption.recorded():
                return self._format.optimizer_state(run.engine, optimizer, keep=keep)
        return {}

    def save(
        self,
        run: Run | None,
        module: LightningModule,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any = None,
    ) -> None:
        """Writes a checkpoint, or starts to (`async_save`). Collective."""
        if run is None or not (run.has_pages or run.cut_off):
            self._save(None, module, checkpoint, filepath, storage_options)
            if self._between.ended.torn:
                rank_zero_warn(f"the weights in {filepath} mix two optimizer steps: {TORN}")
            return
        if not run.cut_off:
            run.settle()
        if not run.unsaved and run.interruption is not None:
            with run.interruption.recorded():
                self._save(run, module, checkpoint, filepath, storage_options)
        if run.unsaved:
            rank_zero_warn(f"no checkpoint {filepath} is written: {run.unsaved}")

    def _save(
        self,
        run: Run | None,
        module: LightningModule,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any,
    ) -> None:
        if "optimizer_states" in checkpoint and self._between.ran:  # otherwise nothing is resumed from it
            checkpoint = randomness.with_states(checkpoint, self._random_states(run))
        if run is None:
            save = SaveOptions(
                checkpoint,
                filepath,
                module,
                self._strategy.optimizers,
                self._files,
                storage_options,
                ops=self._save_ops(),
            )
            self._format.check(save)
            self.saves.save(filepath, lambda: self._write_after_run(save))
            return
        # Nothing waits at the end of an interrupted run, so a failure would go unreported.
        cut_short = run.interruption is not None and run.interruption.on_this_rank
        behind = self._settings.checkpoints.async_save and run.engine.blueprint.saves_in_background and not cut_short
        save = self._save_of(run, checkpoint, filepath, storage_options, in_background=behind)
        self._format.check(save)
        self.saves.save(filepath, lambda: self._format.write(run.engine, save), in_background=behind)

    def _save_of(
        self,
        run: Run,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any = None,
        *,
        in_background: bool = False,
    ) -> SaveOptions:
        return SaveOptions(
            checkpoint,
            path,
            run.module,
            run.builder.optimizers,
            self._files,
            storage_options,
            in_background,
            run.builder.place.ranks_here,
            self._save_ops(),
        )

    def _random_states(self, run: Run | None) -> list[Mapping[str, Any]]:
        """Random states of one rank for each batch, since all ranks with the same batch draw the same numbers. Collective."""
        strategy = self._strategy
        ours = randomness.as_message(randomness.states(backend_of(strategy.root_device)))
        tell: Callable[[Any, int], Any] = strategy.broadcast if run is None else run.engine.barriers.broadcast
        firsts = [ranks[0] for ranks in mesh_of(self._settings, strategy.world_size).replicas]
        states = [tell(ours if rank == strategy.global_rank else None, rank) for rank in firsts]
        return [randomness.from_message(each) for each in states]

    def write_now(self, run: Run, checkpoint: dict[str, Any], path: Path) -> None:
        """Writes a checkpoint of a run now, regardless of queued ones. Raises CheckpointError, OSError."""
        self._format.write(run.engine, self._save_of(run, checkpoint, path))

    def _write_after_run(self, save: SaveOptions) -> None:
        """Writes a checkpoint on rank 0, whose exception all ranks raise. Collective."""
        error: Exception | None = None
        try:
            if self._strategy.is_global_zero:
                self._format.write_after_run(self._between.ended, save)
        except Exception as caught:
            error = caught
        text = self._strategy.broadcast(None if error is None else str(error))
        if error is not None:
            raise error
        if text is not None:
            raise CheckpointError(f"rank 0: {text}")

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_module_state(
        self, run: Run | None, module: LightningModule, checkpoint: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Loads the weights of a checkpoint."""
        self.saves.finish()
        if run is None or not run.has_pages:  # between runs the parameters are ordinary ones
            after_run.give_storage(module)
            ParallelStrategy.load_model_state_dict(self._strategy, checkpoint, strict)
            self._between.note(weights=True, torn=False)
            return
        module_states.load_module_state(run.engine, module, checkpoint["state_dict"], strict=strict)
        run.restore_random_states(randomness.found(checkpoint))

    def load_optimizer_states(self, run: Run | None, checkpoint: Mapping[str, Any]) -> None:
        """Loads the states of all optimizers from a checkpoint."""
        self.saves.finish()
        if run is None or not run.has_pages:
            ParallelStrategy.load_optimizer_state_dict(self._strategy, checkpoint)
            self._between.note(optimizer_states=True)
        else:
            run.load_states(checkpoint["optimizer_states"])
        for optimizer in map(plain_optimizer, self._strategy.optimizers):
            renew(optimizer)

    def load(
        self,
        run: Run | None,
        set_up: SetUp | None,
        module: LightningModule,
        checkpoint_path: str | Path,
        weights_only: bool | None,
        progress: Callable[[], Progress],
    ) -> dict[str, Any]:
        """Reads a checkpoint of any format; its tensors are read from disk when they are needed.

        Args:
            set_up: the set-up in progress, if any; an exception of one rank is then raised on all.
        """
        self.saves.finish()  # it may be the one in progress: Lightning's tuner saves, and reloads a few steps later
        # Includes the first access to the path: a single rank may lack the permission, or the file.
        with nullcontext() if set_up is None else set_up.on_all_ranks():
            path = Path(checkpoint_path)
            how = self._how(run, set_up, module, weights_only, progress)
            checkpoint = self._format_at(path).load(checkpoint_path, how)
            check_lightnings(checkpoint_path, checkpoint)
        return randomness.set_aside(checkpoint)

    def _how(
        self,
        run: Run | None,
        set_up: SetUp | None,
        module: LightningModule,
        weights_only: bool | None,
        progress: Callable[[], Progress],
    ) -> LoadOptions:
        paged = run is not None and run.has_pages
        if not paged and set_up is None:
            return LoadOptions(self._files, weights_only)
        # Runs that do not train skip the optimizer states: with Adam, two thirds of the bytes.
        fitting, strategy = module.trainer.state.fn is TrainerFn.FITTING, self._strategy
        share = slice(strategy.global_rank, None, strategy.world_size)
        together = run.engine.barriers.errors_on_all_ranks if run is not None and paged else nullcontext
        return LoadOptions(self._files, weights_only, fitting, share, together, progress)

    def _format_at(self, path: Path) -> Format:
        plugin = not isinstance(self._strategy.checkpoint_io, FileCheckpointIO)
        return formats.of_checkpoint(path, may_be_of_plugin=plugin)

    # -- earlier ones -------------------------------------------------------------------------------------------------

    def remove(self, run: Run | None, filepath: str | Path) -> None:
        """Removes an outdated checkpoint, after the pending save has finished."""
        # Without saved states, the newer checkpoint was not written.
        if self._strategy.is_global_zero and not (run is not None and run.unsaved):
            self.saves.remove(Path(filepath), self._remove)

    def _remove(self, path: Path) -> None:
        if path.is_symlink():
            self._files.remove(path)
        else:
            self._format_at(path).remove(path, self._files)
