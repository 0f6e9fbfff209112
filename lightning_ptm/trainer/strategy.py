"""AngelPTMStrategy (`Trainer(strategy="angel_ptm")`): the methods that Lightning calls on a strategy.

Has Lightning's overrides, and the requests of users that no other strategy has. The work is in other modules: ranks.py
(process groups), builder.py (construction of a run), run.py (the run in progress), teardown.py, relayout.py,
between_runs.py (state kept between runs), and the package checkpoints. All of them know Lightning; pages belong to the
engine.

I1: the user's optimizers are created before anything is laid out, since their parameter groups determine the layout, and
before anything is sliced, since `configure_optimizers` may use shapes. I2: a run exists from `setup` to `teardown`, and at no
other time.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints import after_run
from lightning_ptm.checkpoints.auto_resume import AutoResume
from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.checkpoints.gathering import stream_weights
from lightning_ptm.checkpoints.optimizer_states import StaleInCopies
from lightning_ptm.checkpoints.run_checkpoints import RunCheckpoints
from lightning_ptm.config import Settings, listing_settings
from lightning_ptm.errors import ConfigError, UsageError, one_line
from lightning_ptm.events import Listener
from lightning_ptm.interrupts import interrupted_later
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.parallel.distributed import distributed_by_others, refuse_distributed
from lightning_ptm.planning.mesh import Mesh, mesh_of
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.planning.trace import Trace
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.deciding.blueprint import Request
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.engine.inspection import (
    OptimizerBytes,
    PageUse,
    PlannedBytes,
    StateBytes,
    Statistics,
    TierRoom,
    audit,
    flat_names,
    inventory,
    optimizers_in_pages,
    planned_bytes,
    rooms,
    states_at_home,
)
from lightning_ptm.runtime.tensors.device_moves import move_buffers_and_metrics
from lightning_ptm.runtime.tensors.parts import declared
from lightning_ptm.runtime.updates.audits import UpdateAudit
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.terms import Tier
from lightning_ptm.trainer import relayout
from lightning_ptm.trainer.batch_steps import OUTSIDE_OF_RUNS, BatchSteps
from lightning_ptm.trainer.between_runs import BetweenRuns, ParallelChooser
from lightning_ptm.trainer.builder import Builder
from lightning_ptm.trainer.device_mesh import MeshOfOne, forget_groups
from lightning_ptm.trainer.internals import (
    WrappingCheckpointIO,
    compiled_as,
    hook_of,
    move_optimizers,
    note_device_and_dtype,
    put_device_mesh,
    reduced_over_ranks,
    seed_workers,
    trainer_of,
)
from lightning_ptm.trainer.launched_ranks import LaunchedRanks
from lightning_ptm.trainer.other_front_ends import asked_elsewhere, check_callbacks, check_trainer, refuse_fabric
from lightning_ptm.trainer.pipelined import refuse_in_stages
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.pruning import refuse_pruning
from lightning_ptm.trainer.ranks import RankGroups, RankPlace, SetUp
from lightning_ptm.trainer.run import Run, no_pages, refuse_in_another_run
from lightning_ptm.trainer.teardown import end, having_states
from lightning_ptm.trainer.weight_averaging import refuse_parts, refuse_sharded

_LONGEST = datetime.timedelta(days=3650)
"""The longest timeout: torch counts nanoseconds in 64 bits."""
_UNUSED = "no Trainer has this strategy yet, so it has neither devices nor a module; pass it to a Trainer, and call fit"


class _UncompiledModule:
    """Descriptor of the module that Lightning assigns to a strategy: refuses one that was compiled as a whole.

    Lightning assigns it before it refuses compiled modules for all but three strategies, without a remedy. There is no
    `__get__`, so Python reads the object's own attribute, which Lightning does 30 times a step.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, strategy: AngelPTMStrategy, module: LightningModule | None) -> None:
        if module is not None and compiled_as(module) is not None:
            raise ConfigError(
                f"the {type(module).__name__} was compiled as a whole with torch.compile, so its training_step would be "
                f"compiled, too, but weights are fetched in the middle of it; give the Trainer the uncompiled module, and "
                f"compile its parts in configure_model: `for block in self.blocks: block.compile()`, or "
                f"`self.model = torch.compile(self.model)`"
            )
        vars(strategy)[self._name] = module


@asked_elsewhere
@listing_settings
class AngelPTMStrategy(LaunchedRanks, ParallelStrategy):
    """Trains models whose states are larger than the device and larger than RAM: pages over device, host and disk.

    With several ranks it trains as DDP does, with one rank as a single device does.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for any strategy.
        timeout: how long a collective waits for the other ranks.
        settings: see `lightning_ptm.config.Settings`.
    """

    strategy_name = "angel_ptm"
    _unused = _UNUSED
    choose_parallel: ClassVar[ParallelChooser]
    """Chooses the sizes of `parallel="auto"`. Set by the package (lightning_ptm/__init__.py): the planner makes strategies,
    so no module of this package may import it."""

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
        self.settings = Settings.of(settings)
        if not isinstance(timeout, datetime.timedelta) or not datetime.timedelta(0) < timeout <= _LONGEST:
            raise ConfigError(
                f"timeout={timeout!r} is not a duration that ranks could wait; write datetime.timedelta(minutes=30), or "
                f"another duration above zero and of at most {_LONGEST.days} days"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self._timeout = timeout
        self.file_ops: FileOps | None = None
        """The disk tier's file calls, for tests of failing disks; None: the operating system's."""
        self.save_ops: SaveOps | None = None
        """The file calls of sharded checkpoints, likewise."""
        self.progress = Progress()
        """Progress bars of long operations: whether and after what time they are shown."""
        self._between = BetweenRuns()
        self._checkpoints = RunCheckpoints(self, self.settings, self._between, self._current_save_ops)
        # State.
        self._groups = RankGroups()
        """Process groups of the last run that was set up."""
        self._set_up: SetUp | None = None
        """The set-up in progress."""
        self._resuming: AutoResume | None = None
        """Automatic resume, from set-up to `teardown`, if `resume` is "auto"."""
        self._run: Run | None = None
        self._chosen = ""
        """What `parallel="auto"` has chosen, in words."""

    def _current_save_ops(self) -> SaveOps | None:
        return self.save_ops

    # -- ranks and plug-ins -------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning's connector should give ranks different parts of the data. If all ranks compute the same
        batches, the user's own sampler stays: Lightning would replace it by one that shuffles, whatever the loader says. It
        also asks, while a hook logs, whether to reduce that: it may be of this rank's tokens (`context_parallel_size`)."""
        module, data = self.lightning_module, self._groups.data
        logs = module is not None and hook_of(module) is not None
        return bool(self.distributed_sampler_kwargs["num_replicas"] > 1) or (
            logs and data is not None and data.size() > 1
        )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._mesh
        return {"num_replicas": len(mesh.replicas), "rank": mesh.replica(self.global_rank)}

    @property
    def _mesh(self) -> Mesh:
        """The axes of all ranks. Raises ConfigError if the settings do not divide the ranks."""
        return mesh_of(self.settings, self._ranks)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with the axes "data_parallel" and "tensor_parallel", as in Lightning's
        ModelParallelStrategy; `LightningModule.device_mesh` is the same, from `configure_model` on.

        Raises:
            UsageError: there is no mesh, with a single rank or before any run was set up.
        """
        if self._groups.made is None:
            raise UsageError(
                "trainer.strategy.device_mesh exists on several ranks only, from set-up on; use self.device_mesh in "
                "the module from configure_model on, or trainer.world_size"
            )
        return self._groups.made.device_mesh

    @property
    @override
    def precision_plugin(self) -> AngelPTMPrecision:
        if not isinstance(self._precision_plugin, AngelPTMPrecision):
            self._precision_plugin = AngelPTMPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning's connector assigns the plugin that it made from the precision string, which is replaced here.
        # None must stay None: the connector takes any other value for the user's choice and ignores the string.
        self._precision_plugin = None if precision_plugin is None else AngelPTMPrecision.replacing(precision_plugin)

    @property
    @override
    def accelerator(self) -> Accelerator | None:  # type: ignore[override, unused-ignore]
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        check_trainer(accelerator, Accelerator, self.strategy_name)  # the first attribute that a Trainer sets
        self._accelerator = accelerator

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        # Created on demand: Lightning takes an existing one for the user's, and would refuse plugins=[...].
        if self._checkpoint_io is None:
            self._checkpoint_io = FileCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = FileCheckpointIO()  # ignored by a wrapper that has one already
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def _precision(self) -> Any:
        refuse_fabric(self.strategy_name)  # only Fabric reads this attribute

    _lightning_module = _UncompiledModule()  # type: ignore[assignment]

    @property
    def _module(self) -> LightningModule:
        """The module that the Trainer trains or evaluates."""
        if self.lightning_module is None:
            raise UsageError(_UNUSED)
        return self.lightning_module

    @property
    def _place(self) -> RankPlace:
        return RankPlace(
            backend=self._backend,
            rank=self.global_rank,
            world_size=self.world_size,
            alone=not self._has_ranks,
            ranks_here=max(1, self.num_processes),
            nodes=self.num_nodes,
            timeout=self._timeout,
        )

    @override
    def setup_environment(self) -> None:
        check_callbacks(self._module.trainer.callbacks, Callback)  # type: ignore[attr-defined]
        super().setup_environment()
        _ = self._mesh  # refuses sizes that do not divide the ranks
        self._set_up = SetUp(self._place)
        if not self._has_ranks:
            self._choose_parallel(self._set_up)
        if self._has_ranks:
            self._connect_ranks()
        else:  # a single device leaves the random numbers and the cluster as they are
            if self.lightning_module is not None:
                put_device_mesh(self.lightning_module, MeshOfOne())
        trainer = self._module.trainer
        if self.settings.checkpoints.resume == "auto" and AutoResume.concerns(trainer):
            assert self._set_up is not None
            self._resuming = AutoResume(trainer, self._set_up.on_all_ranks, self.broadcast)

    def _connect_ranks(self) -> None:
        reset_seed()  # as DDP
        self._connect()
        set_up = self._set_up = SetUp(self._place)
        self._choose_parallel(set_up)
        groups = set_up.connect(self.settings, str(self.precision_plugin.precision), self._groups.made)
        self._groups = self._with_more_groups(groups)
        put_device_mesh(self._module, self.device_mesh)

    def _choose_parallel(self, set_up: SetUp) -> None:
        """Chooses sizes for the first fit with `parallel="auto"`; later ones keep them. Collective."""
        trainer = self._module.trainer
        if self.settings.parallel != "auto" or self._chosen or trainer.state.fn != TrainerFn.FITTING:
            return
        if self._has_ranks:
            set_up.compare(self.settings, str(self.precision_plugin.precision))
        choice = type(self).choose_parallel(trainer, self._module, self.settings, self._place, set_up.wait)
        self.settings = dataclasses.replace(self.settings, **choice.changes)
        self._chosen = choice.said
        self._groups = RankGroups()  # those of an evaluation before had other sizes

    @override
    def _is_alone(self) -> bool:
        return (self._run is not None and self._run.cannot_wait()) or super()._is_alone()

    def _with_more_groups(self, groups: RankGroups) -> RankGroups:
        """Returns the groups of this rank with those that a subclass needs. Called on all ranks."""
        return groups

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._set_up is not None and not self._is_alone():
            self._set_up.wait()
        super().barrier(name)

    def _counted(self, group: Any) -> Any:
        """The group to reduce values over, see `RankGroups.counted`."""
        module = self.lightning_module
        trainer = None if module is None else trainer_of(module)
        return self._groups.counted(group, evaluates=trainer is not None and not trainer.training)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        group = self._counted(group)
        if not isinstance(tensor, Tensor) or self._is_alone() or self._groups.has_one_batch(group):
            return tensor
        return reduced_over_ranks(tensor, group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Over all ranks, since those of a tensor group must take the same decision, too.
        votes = torch.tensor(int(decision), device=self.root_device)
        if not self._is_alone():
            votes = reduced_over_ranks(votes, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        group = self._counted(group)
        if self._is_alone() or self._groups.has_one_batch(group):
            return tensor
        return super().all_gather(tensor, group, sync_grads)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Before Lightning does it with the global rank, by which workers of a tensor group would draw different numbers.
        seed_workers(dataloader, self.distributed_sampler_kwargs["rank"])
        return dataloader

    # -- set-up -------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self._set_up is not None
        self.accelerator.setup(trainer)
        refuse_distributed(self._module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._resuming is not None:
            self._resuming.keep_name_of_last()
        self._end_run()
        refuse_in_another_run(self._module)
        if fitting:  # as in Lightning, an evaluation leaves the optimizers of the last fit, which may still be saved
            self._reset_optimizers_and_schedulers()
            self._refuse_callbacks(trainer)
            if self._layer_sync is not None and self._has_ranks:
                self._synchronize_batch_norms(self._module, self._layer_sync)
        self.model = self.precision_plugin.convert_module(self._module)
        if fitting:
            self.setup_optimizers(trainer)  # I1
        builder = self.builder(trainer)
        if isinstance(self.checkpoint_io, FileCheckpointIO):
            self.checkpoint_io.show(builder.progress)
        run = self._run = Run(builder, self._checkpoints.saves)
        self._set_up.wait()
        run.cut_module()
        self._set_up.check_restored(self._module, run.boxes())
        if self._set_up.restored is not None or not self._between.had(self._module):
            self._between.note(torn=False)
        run.lay_out(self._set_up)
        self.setup_precision_plugin()  # which makes Lightning's wrappers of the optimizers
        run.watch()
        set_up, self._set_up = self._set_up, None
        if set_up.restored is not None:
            set_up.restored.fill(run.engine)
            run.restore_random_states(set_up.random_states)
        run.take_states()
        run.follow_loads(partial(relayout.follow_loaded_state, run, self._checkpoints))
        run.log_where_states_are()
        self.barrier()

    def _refuse_callbacks(self, trainer: Trainer) -> None:
        """Raises:
        ConfigError: a callback does not work with these settings.
        """
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        from_pages, cut_here = self.settings.checkpoints.from_pages, self._groups.tensor is not None
        in_parts = bool(declared(self._module, self.boxes())) or cut_here
        if from_pages:
            refuse_sharded(callbacks)
        if in_parts:
            refuse_parts(callbacks, cut_here=cut_here)
        if self.settings.pipeline_parallel_size > 1:
            refuse_in_stages(callbacks)
        refuse_pruning(callbacks, sharded=from_pages, divided=in_parts or self.settings.expert_parallel_size > 1)

    def _synchronize_batch_norms(self, module: LightningModule, layer_sync: LayerSync) -> None:
        """Converts batch norms as DDP does, before other code refers to the modules. They synchronize over the ranks with
        different batches, so that each batch counts once.

        Raises:
            ConfigError: there are batch norms, and the device is a CPU.
        """
        layer_sync.apply(module)
        norms = [each for each in module.modules() if isinstance(each, nn.SyncBatchNorm)]
        for norm in norms:
            norm.process_group = self._groups.counted(norm.process_group)
        if norms and not self._backend.has_own_memory:
            raise ConfigError(
                "sync_batchnorm=True: torch's SyncBatchNorm works on GPUs only, and this run computes on the CPU; leave it "
                "out, or use norms that do not depend on the batch, such as GroupNorm or LayerNorm"
            )

    def builder(self, trainer: Trainer) -> Builder:
        """The factory of a run of `trainer`, which can also report the run's layout request."""
        return Builder(
            name=self.strategy_name,
            trainer=trainer,
            module=self._module,
            fits=trainer.state.fn == TrainerFn.FITTING,
            settings=self.settings,
            chosen=self._chosen,
            precision=self.precision_plugin,
            place=self._place,
            groups=self._groups,
            boxes=self.boxes,
            further=self.further_tiers(),
            between=self._between,
            progress=self._progress_for(trainer),
            file_ops=self.file_ops,
            save_ops=self._current_save_ops,
        )

    def _progress_for(self, trainer: Trainer) -> Progress:
        """Progress bars on rank 0, if the Trainer shows its own."""
        bar = trainer.progress_bar_callback
        wanted = bar is not None and not getattr(bar, "is_disabled", False)  # a user's own bar need not have it
        return dataclasses.replace(self.progress, shown=self.progress.shown and wanted and self.is_global_zero)

    def request(self, trainer: Trainer, settings: Settings) -> Request:
        """The layout request of a run of `trainer`, whose optimizers must exist; allocates nothing."""
        return self.builder(trainer).request(settings, None if self._run is None else self._run.cut)

    def further_tiers(self) -> Mapping[Tier, int]:
        """Tiers in addition to device, host and disk, with the bytes of each that pages of this rank may take; default: none.
        Subclasses override it on machines with other memory, and return the same `Tier` objects at each call. Homes are
        chosen in them as in all tiers, nearest first (see `terms.Tier`)."""
        return {}

    def boxes(self) -> Mapping[str, TensorSlice]:
        """Slices of this rank's parameters that are parts of larger ones, by name; default: none, or those of the plan of
        `tensor_parallel_size`.

        Subclasses that divide a model over ranks (tensor parallelism) override it: the module has the slices, computes with
        them and makes the exchanges; pages, norms, checkpoints and weights from files use the slices. Ranks r of equal
        r // parts are a group, each with the slice r % parts; they need the same batches (`distributed_sampler_kwargs`)."""
        return {} if self._run is None or self._run.cut is None else self._run.cut.boxes()

    @override
    def model_to_device(self) -> None:
        return None  # parameters are in pages; buffers were moved when the engine was built

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Parameters are moved unit by unit when they are copied into pages.
        device = torch.device("meta") if empty_init else torch.device("cpu")
        with device, self.precision_plugin.tensor_init_context():
            yield

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._resuming is not None:
            self._resuming.make_start_removable()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._follow_rearranging()
        if self._run is not None and self._run.device_budget.follows:
            relayout.follow_device_memory(self._run, self._checkpoints, batch)
        self._compare(batch, batch_idx)
        if self._run is not None:
            self._run.steps.batch_starts(batch, batch_idx)
        if self._run is not None and self._run.disk_report.counts and self._run.has_pages:
            self._run.disk_report.batch_starts(self._run.engine, batch)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._run is not None and self._run.has_pages:
            self._run.disk_report.training_ends(self._run.engine)

    def _follow_rearranging(self) -> None:
        if self._run is not None and self._run.outgrown:
            relayout.follow_rearranging(self._run, self._checkpoints)

    def _follow_other_parameters(self) -> None:
        if self._run is not None:
            relayout.follow_other_parameters(self._run, self._checkpoints)

    def _compare(self, batch: Any, index: int = 0, loader: int = 0) -> None:
        """Compares a batch with those of the other ranks of the tensor group, which must be the same."""
        stage, same_batches = self._module.trainer.state.stage, self._groups.same_batches
        if same_batches is not None and self._run is not None and self._run.has_pages and stage is not None:
            same_batches.check(batch, stage.value, loader=loader, index=index)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        move = partial(super().batch_to_device, batch, device, dataloader_idx)
        return move() if self._groups.same_batches is None else self._groups.same_batches.move(batch, move)

    def _steps(self) -> BatchSteps:
        if self._run is None and self.precision_plugin.over:
            return OUTSIDE_OF_RUNS  # a user calls Lightning's loops after a run, with ordinary parameters
        return self._in_progress().steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps().train(super().training_step, *args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._run is None or not self._run.steps.ran_backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        # Hooks find what the backward passes of the training step left.
        precision, module = self.precision_plugin, self._module
        self.pre_backward(closure_loss)
        loss = precision.post_backward(precision.pre_backward(closure_loss, module), module)
        self.post_backward(loss)
        return loss

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._follow_other_parameters()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is not None:
            relayout.make_room_for_evaluation(self._run, self._checkpoints, args[0])
        self._compare(*args[:3])
        return self._steps().evaluate(partial(super().validation_step, *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._compare(*args[:3])
        return self._steps().evaluate(partial(super().test_step, *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._compare(*args[:3])
        return self._steps().evaluate(partial(super().predict_step, *args, **kwargs))

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context of backward passes whose gradients are reduced later: Lightning enters it for all micro-batches of a step
        but the last, and manual optimization may. See `Tuning.reduce_gradients`."""
        with self._in_progress().without_reduction():
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Context without gradient reduction, under the name of DDP's method; the same as `block_backward_sync`.

        For backward passes in manual optimization whose gradients are reduced together with those of a later one, or by
        the step. During a run the module has it, too (`trainer.model.no_sync()`). How often ranks reduce is
        `Tuning.reduce_gradients`; in automatic optimization, `accumulate_grad_batches` does all of it.
        """
        return self.block_backward_sync()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._follow_other_parameters()
        return self._checkpoints.module_state(self._run, self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(self._run, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        self._checkpoints.save(self._run, self._module, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        progress = partial(self._progress_for, self._module.trainer)
        return self._checkpoints.load(self._run, self._set_up, self._module, checkpoint_path, weights_only, progress)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with nullcontext() if self._resuming is None else self._resuming.loading_weights():
            if self._set_up is None:
                self._checkpoints.load_module_state(self._run, self._module, checkpoint, strict=strict)
                return
            # As in Lightning, hooks and configure_optimizers may see and change weights. Pages then copy the module's.
            boxes = declared(self._module, self.boxes())
            progress = self._progress_for(self._module.trainer)
            self._set_up.load(self._module, checkpoint, boxes, progress, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # A callback may have recreated the parameter groups that it had made in the checkpoint's run.
        self._follow_rearranging()
        self._checkpoints.load_optimizer_states(self._run, checkpoint)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpoints.remove(self._run, filepath)

    def wait_for_checkpoint(self) -> None:
        """Blocks until the checkpoint that is being written in the background (`async_save`) is complete. Collective.

        Raises:
            CheckpointError: it could not be written, and `Checkpoints.on_failure` is "stop".
        """
        self._checkpoints.saves.finish()

    # -- context parallelism ------------------------------------------------------------------------------------------

    @property
    def ranks_of_sequence(self) -> int:
        """Number of ranks that have the tokens of each sequence that is computed now: in a training step
        `context_parallel_size`, elsewhere 1."""
        return 1 if self._run is None else self._run.steps.ranks_of_sequence

    def positions(self, length: int) -> Tensor:
        """Returns the positions, in their sequence, of the `length` tokens that this rank has of each, on its device.

        In a training step with `context_parallel_size` these are positions of this rank's tokens; elsewhere they are
        `torch.arange(length)`. A module that needs positions asks `self.trainer.strategy.positions(length)`.
        """
        steps = OUTSIDE_OF_RUNS if self._run is None else self._run.steps
        return steps.positions(length, self.root_device)

    # -- requests about the run in progress ---------------------------------------------------------------------------

    def _in_progress(self) -> Run:
        if self._run is None:
            raise no_pages()
        return self._run

    @property
    def engine(self) -> Engine:
        """The engine of the run in progress."""
        return self._in_progress().engine

    def gathered(self, *modules: nn.Module, write: bool = True) -> AbstractContextManager[None]:
        """Inside the block the parameters of `modules` (default: the whole model) are full and have the values of the master
        weights (fp32 under mixed precision), to be read or edited. Call it on all ranks; rank 0's edits count.

        Args:
            write: keep edits. False skips the copy back to the pages, for reading only.
        """
        # Outside of runs the parameters are full already.
        return nullcontext() if self._run is None else self._run.gathered(*modules, write=write)

    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, value) of each weight and persistent buffer, to be sent to an inference server or a store.

        Names are those of the module's `state_dict`; a tied weight has its first name. Values are those that `gathered`
        shows (fp32 under mixed precision), on the CPU. Buffers come last.

        RAM holds the weights of one unit of one dtype (a flat) at a time: a value is a view of it, so clone what you keep,
        and `del` it at the end of your loop body: a name that still refers to it keeps its unit while the next is read.
        Collective: all ranks get all values, and all take as many of them. Waits for all updates first.

        Args:
            dtype: of floating point values; default: as they are.

        Raises:
            UsageError: no run is in progress; it is called inside of `gathered`; the module computes before the last
                value was taken.
        """
        run = self._in_progress()
        return stream_weights(run.engine, run.module, dtype)

    def statistics(self) -> Statistics:
        """Returns the bytes copied, waiting times and updates of this rank since the run began. Cheap; see also
        `callbacks.PageMonitor`."""
        return self._in_progress().statistics()

    def plan_text(self) -> str:
        """The current plan as a table: the tasks issued before each tick. See `callbacks.PlanPrinter`."""
        return self.engine.plan_text(self._in_progress().mode)

    @property
    def plans_made(self) -> int:
        """Number of times that the run has made a new plan from a traced iteration."""
        return self.engine.executor.plans.remade

    def states_at_home(self) -> tuple[StateBytes, ...]:
        """The model states by kind and by tier between steps, in bytes of this rank."""
        return states_at_home(self.engine)

    def optimizers_in_pages(self) -> tuple[OptimizerBytes, ...]:
        """Describes each optimizer with states in pages: what it updates at once, and the bytes of its states on this
        rank."""
        return optimizers_in_pages(self.engine.blueprint)

    def tier_rooms(self) -> tuple[TierRoom, ...]:
        """The size of each tier of this rank, and the bytes of its pages in use now. Cheap."""
        return rooms(self.engine)

    def tier_names(self) -> tuple[str, ...]:
        """The tiers of this run, nearest first, including those without pages, in the order of `Event.tier_bytes`."""
        return tuple(map(self.engine.blueprint.name_of, self.engine.blueprint.reported_tiers))

    def inventory(self) -> tuple[PageUse, ...]:
        """Lists what each of this rank's pages is used for; the sums per tier are the sizes of `tier_rooms`."""
        return inventory(self.engine)

    def planned_bytes(self) -> tuple[PlannedBytes, ...]:
        """Bytes of pages in each tier at each tick of the plan; see `callbacks.MemoryTimeline`. Replays the plan."""
        return planned_bytes(self.engine, self._in_progress().mode)

    def last_trace(self) -> Trace | None:
        """The last traced iteration: its ticks, and the paper's table of tensors; None before there is one. A trace is
        complete when the next iteration begins. See `callbacks.PageTracer`."""
        return self.engine.executor.plans.trace(self._in_progress().mode)

    def flat_names(self) -> dict[int, str]:
        """Names of units by the number of their flats, for events of copies and updates, which have numbers: `flat 4 ...`,
        `4/4/master` (unit, flat, state)."""
        return flat_names(self.engine)

    def trace_events(self, listener: Listener) -> AbstractContextManager[None]:
        """Calls `listener` with an `Event` whenever a tick, a copy between tiers, a collective, an update's computation or a
        stall of compute has ended on this rank, inside the block. Enter it during a run; the run's end ends it.

        The listener is called in any thread, also in those that move pages: it must be quick and not raise; `list.append`
        is a good one. Nothing is measured outside of such blocks. See `callbacks.PerfettoTrace`.
        """
        return self._in_progress().trace_events(listener)

    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The global norm of an optimizer's gradients over all ranks, wherever they are stored: complete, not yet clipped,
        and unscaled. Call it between backward and step only (`on_before_optimizer_step`), on all ranks.

        On one rank it equals `torch.nn.utils.clip_grad_norm_`, bit for bit. See `callbacks.GradNormMonitor`.
        """
        return self.engine.stepping.gradient_norm(optimizer, norm_type, self.precision_plugin.loss_scale)

    def update_audit(self) -> tuple[UpdateAudit, ...]:
        """Returns the counts of gradients that were produced, applied, skipped, and are pending, for each flat of this
        rank.

        Only `lock_free` has them, and checks them at each drain; empty for synchronous updates. After a run: as of the
        last drain, which is the end of training if that did not fail; before the first one: empty.
        """
        if self._run is None or not self._run.has_pages:
            return self._between.ended.audits
        return audit(self._run.engine)

    # -- the end ------------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._chosen and isinstance(exception, ConfigError):
            exception.add_note(
                f"{self._chosen}; if the error names something of it, give the other settings in place of parallel='auto'"
            )
        self._groups = dataclasses.replace(self._groups, made=None)
        forget_groups()
        reported = self._run is not None and self._run.fail(exception)
        if not reported and self._set_up is not None:
            self._set_up.fail(one_line(exception))

    def _end_run(self) -> None:
        run = self._run
        try:
            if run is not None:
                end(run, self._checkpoints)
        finally:
            self._run = None

    @override
    def teardown(self) -> None:
        # Ctrl-C while the last checkpoint is written, or weights are given back, takes effect afterwards.
        with interrupted_later():
            self._teardown()

    def _teardown(self) -> None:
        self._set_up = None
        if self._resuming is not None:
            self._resuming.undo()
            self._resuming = None
        run = self._run
        self._end_run()
        if self.lightning_module is not None:
            self._give_back_module(self.lightning_module)
        move_optimizers(self.optimizers, torch.device("cpu"))
        assert self.accelerator is not None
        if run is not None:
            run.signals.leave()
        if self._has_ranks:
            assert self.cluster_environment is not None
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _give_back_module(self, module: LightningModule) -> None:
        put_device_mesh(module, None)
        trainer = trainer_of(module)
        fitted = trainer is not None and trainer.state.fn is TrainerFn.FITTING
        if fitted and trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED:
            # Lightning shuts down the workers of the loop that failed: of an evaluation, but not of the fit around it.
            trainer.fit_loop.teardown()
        if fitted and self._layer_sync is not None and self._has_ranks:
            self._layer_sync.revert(module)
        # Modules that were distributed by other libraries were refused before anything was moved, and move differently.
        if distributed_by_others(module) is None:
            move_buffers_and_metrics(module, torch.device("cpu"))
        note_device_and_dtype(module, device=torch.device("cpu"))

    # torch.save(trainer) and copy.deepcopy(trainer) call these. Process groups cannot be copied, and listeners of this run do
    # not listen to a copy.

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_groups": RankGroups(), "_set_up": None, "_resuming": None, "_run": None}
        del state["_checkpoints"]
        run = self._run
        if run is None or not run.has_pages:
            return state
        # A copy has no run. Optimizer states in pages are not copied. Where the parameters are in pages, too, the copy has no
        # optimizers: each fit makes its own.
        learnt = having_states(run.engine)
        without: dict[str, Any] = (
            {} if run.engine.summon.always_readable(self._module) else {"_optimizers": [], "lr_scheduler_configs": []}
        )
        ended = after_run.EndedRun(weights=True, optimizer_states=not learnt)
        stale = StaleInCopies(() if without else learnt)
        return {**state, **without, "_between": self._between.copy(ended), "_stale_in_copies": stale}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: value for name, value in state.items() if name != "_stale_in_copies"}
        super().__setstate__(kept)
        self._checkpoints = RunCheckpoints(self, self.settings, self._between, self._current_save_ops)
