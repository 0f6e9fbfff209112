"""`Trainer(strategy="angel_ptm")`: Lightning's side of the engine.

Has the steps of a run, its set-up and its end. The classes below it, each in a file, know only those below themselves:
connected.py (ranks and plug-ins), running.py (the run in progress), checkpointing.py, building.py, ending.py, rearranging.py.
All of them know Lightning; pages are the engine's.

I1: the user's optimizers are created before anything is laid out, since their parameter groups decide the layout, and before
anything is cut: `configure_optimizers` may go by shapes.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from typing_extensions import override

from lightning_ptm.checkpoints import optimizer_states
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.config import Settings, listing_settings
from lightning_ptm.errors import in_a_line
from lightning_ptm.parallel.distributed import distributed_by_others, refuse_distributed
from lightning_ptm.runtime.tensors.device_moves import move_beside_parameters
from lightning_ptm.terms import Mode
from lightning_ptm.trainer.auto_resume import AutoResume
from lightning_ptm.trainer.device_mesh import forget_mesh
from lightning_ptm.trainer.other_front_ends import asked_elsewhere
from lightning_ptm.trainer.pruning import refuse_pruning
from lightning_ptm.trainer.rearranging import RearrangingStrategy
from lightning_ptm.trainer.stale_optimizers import refuse_spent, renew
from lightning_ptm.trainer.weight_averaging import refuse_parts, refuse_sharded


@asked_elsewhere
@listing_settings
class AngelPTMStrategy(RearrangingStrategy):
    """Trains models whose states are larger than the device and larger than RAM: pages over device, host and disk.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for any strategy.
        timeout: how long a collective waits for the other ranks.
        settings: see `lightning_ptm.config.Settings`.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        timeout: datetime.timedelta = datetime.timedelta(minutes=30),
        **settings: Any,
    ) -> None:
        super().__init__(
            settings=Settings.of(settings),
            timeout=timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._resuming: AutoResume | None = None

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._setting_up = True
        trainer = self._module.trainer
        if self.settings.checkpoints.resume == "auto" and AutoResume.concerns(trainer):
            self._resuming = AutoResume(trainer, self._setting_up_together, self.broadcast)

    # -- set-up -------------------------------------------------------------------------------------------------------

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with nullcontext() if self._resuming is None else self._resuming.loading_weights():
            super().load_model_state_dict(checkpoint, strict)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_distributed(self._module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._resuming is not None:
            self._resuming.keep_name_of_last()
        self._close_engine()
        self._refuse_in_another_run()
        self._signals = None
        if fitting:  # as Lightning: an evaluation leaves those of the last fit, which may still be saved
            self._reset_optimizers_and_schedulers()
        if fitting and self.settings.checkpoints.state_dict_type == "sharded":
            refuse_sharded(trainer.callbacks)  # type: ignore[attr-defined]
        if fitting and (self._boxes() or self._tensor_group is not None):
            refuse_parts(trainer.callbacks, cut_here=self._tensor_group is not None)  # type: ignore[attr-defined]
        if fitting:
            divided = bool(self._boxes()) or self._tensor_group is not None or self.settings.expert_parallel_size > 1
            sharded = self.settings.checkpoints.state_dict_type == "sharded"
            refuse_pruning(trainer.callbacks, sharded=sharded, divided=divided)  # type: ignore[attr-defined]
        if fitting and self._layer_sync is not None and self._has_ranks:
            self._synchronize_batch_norms(self._module, self._layer_sync)
        self.model = self.precision_plugin.convert_module(self._module)
        if fitting:
            self.setup_optimizers(trainer)  # I1
        self._await_others()
        self._cut_module(self._tensor_group)
        self._trains = fitting
        known = self._began_with() if self._began_with is not None else None
        if self._restored is not None:
            self._restored.refuse_written(self._module)
            self._restored = self._restored.untouched(self._module, self._boxes())
        if self._restored is not None or known is not self._module:
            self._ended = dataclasses.replace(self._ended, torn=False)
        self._build(trainer)
        self._setting_up, self._setup_barrier = False, None
        restored, self._restored = self._restored, None
        if restored is not None:
            restored.fill(self.engine)
            self._go_on_drawing(self._random_states)
        assert self._lightning_hooks is not None
        for optimizer in self._paged_optimizers():
            forget = optimizer_states.take_over_optimizer_state(self.engine, optimizer)
            if forget is not None:
                self._shown_states[optimizer] = forget
                renew(optimizer)
            self._lightning_hooks.loads_of(optimizer, self._follow_loaded_state)
        self._tell_where_states_are()
        self.barrier()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._resuming is not None:
            self._resuming.let_go()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._follow_rearranging()
        self._compare(batch, batch_idx)

    def _compare(self, batch: Any, index: int = 0, loader: int = 0) -> None:
        """With the other ranks of a tensor group, which have to have the same batch."""
        stage = self._module.trainer.state.stage
        if self._same_batches is not None and self._engine is not None and stage is not None:
            self._same_batches.check(batch, stage.value, loader=loader, index=index)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        move = partial(super().batch_to_device, batch, device, dataloader_idx)
        return move() if self._same_batches is None else self._same_batches.move(batch, move)

    @override
    def model_to_device(self) -> None:
        return None  # parameters live in pages; buffers were moved when the engine was built

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Parameters are moved unit by unit when they are laid into pages.
        device = torch.device("meta") if empty_init else torch.device("cpu")
        with device, self.precision_plugin.tensor_init_context():
            yield

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        refuse_spent(map(plain_optimizer, self.optimizers))
        with self._iteration(Mode.TRAIN):
            return super().training_step(*args, **kwargs)

    def _iteration(self, mode: Mode) -> AbstractContextManager[None]:
        """Around a step; nothing is, where somebody calls Lightning's loops after a run, with ordinary parameters."""
        if self._tensor_group is not None:
            self._tensor_group.forget()
        if self._engine is None and self.precision_plugin.over:
            return nullcontext()
        iteration = self.engine.iteration(mode, manual=not self._module.automatic_optimization)
        return iteration if self._tensor_group is None else _both(iteration, self._tensor_group.of_step())

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._compare(*args[:3])
        with self._iteration(Mode.FORWARD):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._compare(*args[:3])
        with self._iteration(Mode.FORWARD):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._compare(*args[:3])
        with self._iteration(Mode.FORWARD):
            return super().predict_step(*args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning calls it around the micro-batches of a step but the last; so may a manual optimization. See
        `Settings.reduce_gradients`."""
        with self.engine.stepping.without_reduction():
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """What DDP's module has under this name, and Lightning calls `block_backward_sync`: around the backward passes of a
        manual optimization whose gradients are reduced with those of a later one, or by the step. In a run the module has it,
        too (`trainer.model.no_sync()`). How often ranks reduce is `Settings.reduce_gradients`; in automatic optimization,
        `accumulate_grad_batches` does all of it."""
        return self.block_backward_sync()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._device_mesh = None
        forget_mesh()
        for step in self._steps:
            step.settle()
        if self._engine is not None:
            self._engine.fail(exception)
        elif self._communicator is not None:  # during set-up
            self._communicator.fail(in_a_line(exception))
        elif self._setup_barrier is not None:  # before there are lines
            self._setup_barrier.fail(in_a_line(exception))

    # -- the end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        self._setting_up, self._setup_barrier, self._restored = False, None, None
        if self._resuming is not None:
            self._resuming.undo()
            self._resuming = None
        self._close_engine()
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = None
            trainer = self.lightning_module._trainer
            fitted = trainer is not None and trainer.state.fn is TrainerFn.FITTING
            if fitted and trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED:
                # Lightning ends the workers of the loop that failed: of an evaluation, not of the fit around it.
                trainer.fit_loop.teardown()
            if fitted and self._layer_sync is not None and self._has_ranks:
                self._layer_sync.revert(self.lightning_module)
            # What others have distributed was refused before anything was moved, and moves in ways of its own.
            if distributed_by_others(self.lightning_module) is None:
                move_beside_parameters(self.lightning_module, torch.device("cpu"))
            _update_properties(self.lightning_module, device=torch.device("cpu"))
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        assert self.accelerator is not None
        if self._signals is not None:
            self._signals.leave()
            self._signals = None
        if self._has_ranks:
            assert self.cluster_environment is not None
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield
