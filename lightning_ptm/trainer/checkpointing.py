"""How the strategy saves and loads: in a run, before it has pages, and after it.

Which function of checkpoints/ does it depends on that; what waits for pages, and what is remembered of a run, is kept here.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_ptm import sharded
from lightning_ptm.checkpoints import after_run, deferred_loading, module_states, optimizer_states
from lightning_ptm.checkpoints.file_io import FileCheckpointIO, check_lightnings
from lightning_ptm.checkpoints.interruption import TORN
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.checkpoints.save_queue import SaveQueue
from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.comm import raise_on_all_ranks
from lightning_ptm.errors import CheckpointError, ConfigError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.runtime.engine.statistics import audit
from lightning_ptm.runtime.updates.audits import UpdateAudit
from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.index import PARAMETERS, Index, StateFile, is_sharded
from lightning_ptm.storage.user_errors import is_folder
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.trainer import randomness
from lightning_ptm.trainer.running import RunningStrategy
from lightning_ptm.trainer.stale_optimizers import renew


class CheckpointingStrategy(RunningStrategy):
    """Saves and loads."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._ended = after_run.EndedRun()
        self._saves = SaveQueue(self.settings.checkpoints.on_failure)
        self._began_with: weakref.ref[LightningModule] | None = None
        self._setting_up = False
        """A run has begun, and there are no pages yet."""
        self._restored: deferred_loading.DeferredState | None = None
        """Of a checkpoint that Lightning has given before there were pages for it; so are `_random_states`."""
        self._random_states: Sequence[Any] = ()
        self._shown_states: dict[Optimizer, Callable[[], None]] = {}
        """Take from optimizers' `state` what was there when the run began or loaded since, where no step has."""
        self.save_ops: SaveOps | None = None
        """File calls of sharded checkpoints, for tests of failing disks; None: the operating system's."""
        self.progress = Progress()
        """When bars of long work appear, if they do: see `_progress_for`."""

    @contextmanager
    def gathered(self, *modules: nn.Module, write: bool = True) -> Iterator[None]:
        """Inside the block the parameters of `modules` (default: the whole model) are whole, real and precise (fp32
        under mixed precision), to be read or edited by hand. Call it on all ranks; rank 0's edits count.

        Args:
            write: keep edits. False saves the way back when you only read.
        """
        if self._engine is None:
            yield  # outside a run the parameters are whole anyway
            return
        with self._engine.summon.gathered(modules or (self._module,), write=write):
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._cut_off:
            return {}
        if self._engine is None or self._interruption is None:
            return after_run.module_state(self._ended, self._module, self.settings, keep=self.is_global_zero)
        self._interruption.settle()
        if not self._unsaved:
            with self._interruption.told():
                if self.settings.checkpoints.state_dict_type == "sharded":
                    return sharded.module_remainder(self._engine, self._module)
                return module_states.module_state(self._engine, self._module, keep=self.is_global_zero)
        return {}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._setting_up:
            self._load_model_state_dict(checkpoint, strict)
            return
        # As Lightning: hooks and configure_optimizers may see and change weights. Pages take theirs from the module.
        progress = self._progress_for(self._module.trainer)
        total_bytes = sum(each.nbytes for each in checkpoint["state_dict"].values() if isinstance(each, Tensor))
        with progress.bar("loading weights", total_bytes) as seen, CopiesSeen(seen):
            self._restored = deferred_loading.load_before_pages(
                self._module, checkpoint["state_dict"], self._boxes(), strict=strict
            )
        self._random_states = randomness.found(checkpoint)

    def _load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        self._saves.finish()
        if self._engine is None:  # between runs the parameters are ordinary ones
            after_run.give_storage(self._module)
            super().load_model_state_dict(checkpoint, strict)
            self._ended = dataclasses.replace(self._ended, weights=True, torn=False)
            return
        module_states.load_module_state(self._engine, self._module, checkpoint["state_dict"], strict=strict)
        self._go_on_drawing(randomness.found(checkpoint))

    def _go_on_drawing(self, random_states: Sequence[Any]) -> None:
        """Random numbers, where the run is one that is resumed."""
        # A run that goes back to its own checkpoint (Lightning's tuners do, after their trials) is none that is resumed.
        resumed = self._module.trainer.state.fn is TrainerFn.FITTING and not self.engine.iterations
        data = self.distributed_sampler_kwargs
        if resumed and len(random_states) == data["num_replicas"]:  # of another number nobody could go on alike
            randomness.restore(random_states[data["rank"]], self._backend)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._engine is not None and not self._trains and self.settings.checkpoints.state_dict_type == "sharded":
            raise UsageError(
                "a sharded checkpoint in the middle of an evaluation has no place for the states of the fit before; save "
                "when the evaluation is over, or give save_checkpoint(..., weights_only=True); Lightning's tuner needs a "
                "Trainer that has not trained"
            )
        if self._cut_off:
            return {}
        if self._engine is None or self._interruption is None or not self._trains:
            return after_run.optimizer_state(self._ended, optimizer, self.settings, keep=self.is_global_zero)
        if not self._unsaved:
            with self._interruption.told():
                if self.settings.checkpoints.state_dict_type == "sharded":
                    return sharded.optimizer_remainder(self._engine, optimizer)
                return optimizer_states.optimizer_state(self._engine, optimizer, keep=self.is_global_zero)
        return {}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._saves.finish()
        if self._engine is None:
            super().load_optimizer_state_dict(checkpoint)
            self._ended = dataclasses.replace(self._ended, optimizer_states=True)
        else:
            self._forget_shown_states()
            # As Lightning: a checkpoint may have fewer, or none.
            for optimizer, state in zip(self._trained, checkpoint["optimizer_states"], strict=False):
                forget = optimizer_states.load_optimizer_state(self._engine, optimizer, state)
                self._shown_states[plain_optimizer(optimizer)] = forget
        for optimizer in map(plain_optimizer, self.optimizers):
            renew(optimizer)

    def _follow_loaded_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """A hook of the user's has called its `load_state_dict`."""
        forget_earlier = self._shown_states.pop(optimizer, None)
        if forget_earlier is not None:
            forget_earlier()
        self._shown_states[optimizer] = optimizer_states.follow_loaded_state(self.engine, optimizer, state)
        renew(optimizer)

    def _forget_shown_states(self) -> None:
        while self._shown_states:
            self._shown_states.popitem()[1]()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self._interruption is not None and not self._cut_off:
            self._interruption.settle()
            if not self._unsaved:
                with self._interruption.told():
                    self._save_checkpoint(checkpoint, filepath, storage_options)
        elif not self._cut_off:
            self._save_checkpoint(checkpoint, filepath, storage_options)
            if self._ended.torn:
                rank_zero_warn(f"the weights in {filepath} are of two steps: {TORN}")
        if self._unsaved:
            rank_zero_warn(f"no checkpoint {filepath} is written: {self._unsaved}")

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        begun = self._engine is not None or self._began_with is not None
        if "optimizer_states" in checkpoint and begun:  # else there is nothing to go on with
            ours = randomness.sent(randomness.states(self._backend))
            ranks = range(0, self.world_size, self.settings.tensor_parallel_size)  # the others of a group draw the same
            tell = self.broadcast if self._engine is None else self._engine.barriers.told
            states = [tell(ours if rank == self.global_rank else None, rank) for rank in ranks]
            checkpoint = randomness.filed(checkpoint, [randomness.received(each) for each in states])
        if self.settings.checkpoints.state_dict_type == "full":
            self._saves.save(filepath, lambda: self._write_full(checkpoint, filepath, storage_options))
            return
        if storage_options is not None:
            raise ConfigError(
                "storage_options are a checkpoint_io's, and state_dict_type='sharded' writes folders itself"
            )
        if self._engine is None:
            self._saves.save(filepath, lambda: self._save_afterwards(checkpoint, Path(filepath)))
            return
        # Nobody waits at the end of a run that was cut short, so nobody would hear of a failure.
        cut_short = self._interruption is not None and self._interruption.here
        behind = self.settings.checkpoints.async_save and self._engine.blueprint.saves_behind and not cut_short
        self._saves.save(filepath, lambda: self._begin_saving(checkpoint, Path(filepath), behind), behind=behind)

    def _write_full(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        with self._together():
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _write_now(self, checkpoint: dict[str, Any], path: Path) -> None:
        """A checkpoint of a run, whatever becomes of the others. Raises CheckpointError, OSError."""
        if self.settings.checkpoints.state_dict_type == "full":
            self._write_full(checkpoint, path)
        else:
            self._begin_saving(checkpoint, path, False)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What the block raises on one rank raises on all of them, also after a run; there, rank 0 alone does something.
        Collective."""
        if self._engine is not None:
            with self._engine.barriers.together():
                yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        text = self.broadcast(None if error is None else str(error))
        if error is not None:
            raise error
        if text is not None:
            raise CheckpointError(f"rank 0: {text}")

    def _save_afterwards(self, checkpoint: dict[str, Any], path: Path) -> None:
        with self._together():
            if self.is_global_zero:
                after_run.save(self._ended, self._module, self.optimizers, checkpoint, path, self.save_ops)

    def _begin_saving(self, checkpoint: dict[str, Any], path: Path, behind: bool) -> Saving | None:
        saving = Saving(
            self.engine,
            self._module,
            self._trained,
            checkpoint,
            path,
            behind=behind,
            ranks_here=max(1, self.num_processes),
            ops=self.save_ops,
        )
        return saving if behind else None

    def wait_for_checkpoint(self) -> None:
        """Blocks until the checkpoint that is written behind training is in place (`async_save`). Collective.

        Raises:
            CheckpointError: it could not be written, and `failed_save` is "stop".
        """
        self._saves.finish()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._saves.finish()  # it may be the one in progress: Lightning's tuner saves, and goes back a few steps later
        # From the first look at the path: one rank alone may be refused it, or have none of that name.
        with self._setting_up_together() if self._setting_up else nullcontext():
            checkpoint = self._read_checkpoint(checkpoint_path, weights_only)
            check_lightnings(checkpoint_path, checkpoint)
        return randomness.set_aside(checkpoint)

    def _read_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if not self._is_sharded(path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        # Who does not train needs no optimizer states: with Adam, two thirds of the bytes.
        if self._engine is None and not self._setting_up:
            return sharded.load(path, weights_only=weights_only is not False)
        trainer = self._module.trainer
        fitting = trainer.state.fn is TrainerFn.FITTING

        def ours(index: Index) -> Sequence[StateFile]:
            needed = [file for file in index.files if fitting or file.kind == PARAMETERS]
            return needed[self.global_rank :: self.world_size]

        with nullcontext() if self._engine is None else self._engine.barriers.together():
            return sharded.load(
                path,
                weights_only=weights_only is not False,
                optimizers=fitting,
                verify=ours,
                progress=self._progress_for(trainer),
            )

    @contextmanager
    def _setting_up_together(self) -> Iterator[None]:
        """What the block raises on one rank raises on all of them, before the run has a communicator. Collective."""
        communicator = self._make_communicator(Events())
        try:
            with raise_on_all_ranks(communicator):
                yield
        finally:
            communicator.close()

    def _is_sharded(self, path: Path) -> bool:
        """Whether a path is a sharded checkpoint's, perhaps a damaged one's; a user's plugin may write folders, too."""
        return is_folder(path) and (is_sharded(path) or isinstance(self.checkpoint_io, FileCheckpointIO))

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero and not self._unsaved:  # its successor would be what was not written
            self._saves.remove(Path(filepath), self._remove_checkpoint)

    def _link_checkpoint(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """In place of ModelCheckpoint's own: `save_last="link"` links as soon as a save has begun, but a link must name what
        is in place."""
        if self.is_global_zero and not self._unsaved and Path(filepath).absolute() != Path(linkpath).absolute():
            self._saves.link(Path(filepath), Path(linkpath), folders.link)

    def _remove_checkpoint(self, path: Path) -> None:
        if not path.is_symlink() and self._is_sharded(path):
            folders.remove(path)
        else:
            self.checkpoint_io.remove_checkpoint(path)

    def update_audit(self) -> tuple[UpdateAudit, ...]:
        """With `lock_free=True`: for each flat of this rank, how many gradients were produced, applied, skipped, and are
        pending. Checked by itself at each drain; empty for synchronous updates. After a run: as at the last drain, which is
        the end of training if that did not fail; before the first one: empty."""
        return self._ended.audits if self._engine is None else audit(self._engine)

    def _progress_for(self, trainer: Trainer) -> Progress:
        """Rank 0 shows long work, where the Trainer shows its own."""
        bar = trainer.progress_bar_callback
        wanted = bar is not None and not getattr(bar, "is_disabled", False)  # a user's own bar need not have it
        return dataclasses.replace(self.progress, shown=self.progress.shown and wanted and self.is_global_zero)


class CopiesSeen(TorchDispatchMode):
    """Inside, `seen` is told of each `copy_` how many bytes it has written."""

    supports_higher_order_operators = True  # they are torch's own inside: what these copy is not seen

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._seen(args[0].nbytes)
        return result
