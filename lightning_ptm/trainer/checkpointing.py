"""Saving and loading of a strategy's checkpoints, in a run and outside of runs.

Dispatches to the functions of checkpoints/. Checkpoints that Lightning loads before a run has pages are in `SetUp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_ptm import sharded
from lightning_ptm.checkpoints import after_run, module_states, optimizer_states
from lightning_ptm.checkpoints.file_io import FileCheckpointIO, check_lightnings
from lightning_ptm.checkpoints.interruption import TORN
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.checkpoints.save_queue import SaveQueue
from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.config import Settings
from lightning_ptm.errors import CheckpointError, ConfigError, UsageError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.progress import Progress
from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.index import PARAMETERS, Index, StateFile, is_sharded
from lightning_ptm.storage.user_errors import is_folder
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.trainer import randomness
from lightning_ptm.trainer.between_runs import BetweenRuns
from lightning_ptm.trainer.ranks import SetUp
from lightning_ptm.trainer.run import Run
from lightning_ptm.trainer.stale_optimizers import renew


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
        self._settings = settings
        self._between = between
        self._save_ops = save_ops
        # State.
        self.saves = SaveQueue(settings.checkpoints.on_failure)
        self._type = settings.checkpoints.state_dict_type

    @contextmanager
    def of_type(self, state_dict_type: Literal["full", "sharded"]) -> Iterator[None]:
        """Overrides the checkpoint type of the settings inside the block."""
        self._type = state_dict_type
        try:
            yield
        finally:
            self._type = self._settings.checkpoints.state_dict_type

    # -- saving -------------------------------------------------------------------------------------------------------

    def module_state(self, run: Run | None, module: LightningModule) -> dict[str, Any]:
        """The module's state for a checkpoint; empty on ranks that do not write it. Collective."""
        keep = self._strategy.is_global_zero
        if run is None or not (run.has_pages or run.cut_off):
            return after_run.module_state(self._between.ended, module, self._settings, keep=keep)
        if not run.cut_off:
            run.settle()
        if not run.unsaved and run.interruption is not None:
            with run.interruption.recorded():
                if self._type == "sharded":
                    return sharded.module_remainder(run.engine, module)
                return module_states.module_state(run.engine, module, keep=keep)
        return {}

    def optimizer_state(self, run: Run | None, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state for a checkpoint; empty on ranks that do not write it. Collective."""
        keep = self._strategy.is_global_zero
        if run is not None and run.has_pages and not run.fits and self._type == "sharded":
            raise UsageError(
                "a sharded checkpoint during an evaluation cannot hold the optimizer states of the fit before; save "
                "after the evaluation, or give save_checkpoint(..., weights_only=True); if this came from "
                "scale_batch_size or lr_find, use a new Trainer"
            )
        if run is None or not (run.cut_off or (run.has_pages and run.fits)):
            return after_run.optimizer_state(self._between.ended, optimizer, self._settings, keep=keep)
        if not run.unsaved and run.interruption is not None:
            with run.interruption.recorded():
                if self._type == "sharded":
                    return sharded.optimizer_remainder(run.engine, optimizer)
                return optimizer_states.optimizer_state(run.engine, optimizer, keep=keep)
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
        if self._type == "full":
            self.saves.save(filepath, lambda: self._write_full(run, checkpoint, filepath, storage_options))
            return
        if storage_options is not None:
            raise ConfigError(
                "storage_options are arguments of a checkpoint_io, and Checkpoints(state_dict_type='sharded') writes "
                "folders without one, so they would have no effect; leave storage_options out, or save with "
                "checkpoints=Checkpoints(state_dict_type='full')"
            )
        if run is None:
            self.saves.save(filepath, lambda: self._save_afterwards(module, checkpoint, Path(filepath)))
            return
        # Nothing waits at the end of an interrupted run, so a failure would go unreported.
        cut_short = run.interruption is not None and run.interruption.on_this_rank
        behind = self._settings.checkpoints.async_save and run.engine.blueprint.saves_in_background and not cut_short
        self.saves.save(filepath, lambda: self._begin(run, checkpoint, Path(filepath), behind), in_background=behind)

    def _random_states(self, run: Run | None) -> list[Mapping[str, Any]]:
        """Random states of one rank of each tensor group, since all ranks of a group draw the same numbers. Collective."""
        strategy = self._strategy
        ours = randomness.as_message(randomness.states(backend_of(strategy.root_device)))
        ranks = range(0, strategy.world_size, self._settings.tensor_parallel_size)
        tell: Callable[[Any, int], Any] = strategy.broadcast if run is None else run.engine.barriers.broadcast
        states = [tell(ours if rank == strategy.global_rank else None, rank) for rank in ranks]
        return [randomness.from_message(each) for each in states]

    def _write_full(
        self, run: Run | None, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        with self._together(run):
            # Lightning's own method: the strategy's override has called this one.
            ParallelStrategy.save_checkpoint(self._strategy, checkpoint, filepath, storage_options=storage_options)

    def write_now(self, run: Run, checkpoint: dict[str, Any], path: Path) -> None:
        """Writes a checkpoint of a run now, regardless of queued ones. Raises CheckpointError, OSError."""
        if self._type == "full":
            self._write_full(run, checkpoint, path)
        else:
            self._begin(run, checkpoint, path, False)

    @contextmanager
    def _together(self, run: Run | None) -> Iterator[None]:
        """Raises an exception of one rank on all ranks, in a run and outside of runs; outside, only rank 0's block may raise.
        Collective."""
        if run is not None:
            with run.engine.barriers.errors_on_all_ranks():
                yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        text = self._strategy.broadcast(None if error is None else str(error))
        if error is not None:
            raise error
        if text is not None:
            raise CheckpointError(f"rank 0: {text}")

    def _save_afterwards(self, module: LightningModule, checkpoint: dict[str, Any], path: Path) -> None:
        with self._together(None):
            if self._strategy.is_global_zero:
                after_run.save(
                    self._between.ended, module, self._strategy.optimizers, checkpoint, path, self._save_ops()
                )

    def _begin(self, run: Run, checkpoint: dict[str, Any], path: Path, behind: bool) -> Saving | None:
        saving = Saving(
            run.engine,
            run.module,
            run.builder.optimizers,
            checkpoint,
            path,
            in_background=behind,
            ranks_here=run.builder.place.ranks_here,
            ops=self._save_ops(),
        )
        return saving if behind else None

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
        """Reads a checkpoint of either type; its tensors are read from disk when they are needed.

        Args:
            set_up: the set-up in progress, if any; an exception of one rank is then raised on all.
        """
        self.saves.finish()  # it may be the one in progress: Lightning's tuner saves, and reloads a few steps later
        # Includes the first access to the path: a single rank may lack the permission, or the file.
        with nullcontext() if set_up is None else set_up.on_all_ranks():
            path = Path(checkpoint_path)
            if self.is_sharded(path):
                checkpoint = self._load_sharded(run, set_up, module, path, weights_only is not False, progress)
            else:
                checkpoint = ParallelStrategy.load_checkpoint(self._strategy, checkpoint_path, weights_only)
            check_lightnings(checkpoint_path, checkpoint)
        return randomness.set_aside(checkpoint)

    def _load_sharded(
        self,
        run: Run | None,
        set_up: SetUp | None,
        module: LightningModule,
        path: Path,
        weights_only: bool,
        progress: Callable[[], Progress],
    ) -> dict[str, Any]:
        paged = run is not None and run.has_pages
        # Runs that do not train skip the optimizer states: with Adam, two thirds of the bytes.
        if not paged and set_up is None:
            return sharded.load(path, weights_only=weights_only)
        fitting, strategy = module.trainer.state.fn is TrainerFn.FITTING, self._strategy

        def ours(index: Index) -> Sequence[StateFile]:
            needed = [file for file in index.files if fitting or file.kind == PARAMETERS]
            return needed[strategy.global_rank :: strategy.world_size]

        with run.engine.barriers.errors_on_all_ranks() if run is not None and paged else nullcontext():
            return sharded.load(path, weights_only=weights_only, optimizers=fitting, verify=ours, progress=progress())

    def is_sharded(self, path: Path) -> bool:
        """Whether a path is a sharded checkpoint, perhaps a damaged one; a user's plugin may write folders, too."""
        return is_folder(path) and (is_sharded(path) or isinstance(self._strategy.checkpoint_io, FileCheckpointIO))

    # -- earlier ones -------------------------------------------------------------------------------------------------

    def remove(self, run: Run | None, filepath: str | Path) -> None:
        """Removes an outdated checkpoint, after the pending save has finished."""
        # Without saved states, the newer checkpoint was not written.
        if self._strategy.is_global_zero and not (run is not None and run.unsaved):
            self.saves.remove(Path(filepath), self._remove)

    def _remove(self, path: Path) -> None:
        if not path.is_symlink() and self.is_sharded(path):
            folders.remove(path)
        else:
            self._strategy.checkpoint_io.remove_checkpoint(path)
