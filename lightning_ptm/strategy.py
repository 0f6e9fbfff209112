"""`Trainer(strategy="angel_ptm")`: Lightning's side of the engine.

Owns the engine of the run in progress: `setup` builds it, `teardown` ends it. Knows Lightning; pages are the engine's.

I1: the user's optimizers are created before anything is laid out, since their parameter groups decide the layout.
I2: after a run the module has ordinary parameters again, when RAM holds them, and its optimizers their states, when they
were in RAM all the time.
"""

from __future__ import annotations

import dataclasses
import datetime
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm import checkpoint as checkpoints
from lightning_ptm import sharded
from lightning_ptm.checkpoints import afterwards, restore, weights
from lightning_ptm.checkpoints.interruption import TORN, Interruption
from lightning_ptm.comm import Communicator, Gathering, ProcessGroupCommunicator, SoloCommunicator, together
from lightning_ptm.config import Settings, listing_settings
from lightning_ptm.errors import CheckpointError, ConfigError, UsageError
from lightning_ptm.events import Events, Listener
from lightning_ptm.memory import FileOps, make_folders
from lightning_ptm.memory.backend import Backend, backend_of
from lightning_ptm.planning.trace import Trace
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.blueprint import Request, draw
from lightning_ptm.runtime.closed import COPIED_IN_A_RUN
from lightning_ptm.runtime.engine import Engine, Together
from lightning_ptm.runtime.executor import Mode
from lightning_ptm.runtime.experts import divide_ranks
from lightning_ptm.runtime.inspection import (
    PageUse,
    PlannedBytes,
    StateBytes,
    TierRoom,
    flat_names,
    inventory,
    planned_bytes,
    rooms,
    states_at_home,
    states_in_words,
)
from lightning_ptm.runtime.lockfree import UpdateAudit
from lightning_ptm.runtime.materialize import Given
from lightning_ptm.runtime.statistics import Statistics, audit, collect, last_audit
from lightning_ptm.saving import Saves, Saving
from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.folder import PARAMETERS, Index, StateFile
from lightning_ptm.storage.reading import is_folder
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.trainer import randomness
from lightning_ptm.trainer.averaging import refuse_sharded
from lightning_ptm.trainer.copies_seen import CopiesSeen
from lightning_ptm.trainer.elsewhere import check_front_end, refuse_elsewhere, refuse_fabric
from lightning_ptm.trainer.half_products import chosen_wide_products
from lightning_ptm.trainer.page_size import chosen_page_bytes
from lightning_ptm.trainer.paged_states import guard, unguard
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.signals import Signals
from lightning_ptm.trainer.spent import refuse_spent, renew, spend
from lightning_ptm.trainer.steps import OptimizerSteps
from lightning_ptm.trainer.watches import (
    Watches,
    rearrangers,
    warn_of_gradients_in_pages,
    warn_of_rearranging,
    warn_of_recomputing_uncompiled,
    warn_of_wide_products_uncompiled,
)


@listing_settings
class AngelPTMStrategy(ParallelStrategy):
    """Trains models whose states are larger than the device and larger than RAM: pages over device, host and disk.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for any strategy.
        timeout: how long a collective waits for the other ranks.
        settings: see `lightning_ptm.config.Settings`.
    """

    strategy_name = "angel_ptm"

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
        self._connected: LightningModule | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self._timeout = timeout
        self._page_bytes: int | None = None
        """What `page_size="auto"` has come to."""
        self._wide_products: bool | None = None
        """What `half_products="auto"` has come to; None until the first set-up, once for all runs of this strategy."""
        self._engine: Engine | None = None
        self._communicator: Communicator | None = None
        self._interruption: Interruption | None = None
        self._ended = afterwards.Ended()
        self._trains = False
        """The run in progress is a fit. Others have no optimizers, though `optimizers` has those of the last fit."""
        self._saves = Saves(self.settings.failed_save)
        self._began_with: weakref.ref[LightningModule] | None = None
        self._watches: Watches | None = None
        self._signals: Signals | None = None
        self._steps: OptimizerSteps | None = None
        self._setting_up = False
        """A run has begun, and there are no pages yet."""
        self._restored: checkpoints.Restored | None = None
        """Of a checkpoint that Lightning has given before there were pages for it; so are `_random_states`."""
        self._random_states: Sequence[Any] = ()
        self._shown_states: dict[Optimizer, Callable[[], None]] = {}
        """Take from optimizers' `state` what was there when the run began or loaded since, where no step has."""
        self.file_ops: FileOps | None = None
        """The disk tier's file calls, for tests of failing disks; None: the operating system's."""
        self.save_ops: SaveOps | None = None
        """The same of sharded checkpoints."""
        self.progress = Progress()
        """When bars of long work appear, if they do: see `_progress_for`."""

    # -- Lightning's questions ----------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def _backend(self) -> Backend:
        """Of this rank's device. Whatever a run is made of is handed it; two of one device are equal."""
        return backend_of(self.root_device)

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning's connector to give each rank its own part of the data. One rank keeps the user's own sampler:
        Lightning would put one that shuffles in its place, whatever the loader says."""
        return self.num_nodes * self.num_processes > 1

    # One rank is rank 0 whatever the cluster says of this process, as with one device.

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self.is_distributed else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self.is_distributed else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self.is_distributed else 0

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self.is_distributed else 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    @override
    def precision_plugin(self) -> AngelPTMPrecision:
        if not isinstance(self._precision_plugin, AngelPTMPrecision):
            self._precision_plugin = AngelPTMPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning's connector assigns the plugin that it made from the precision string: ours takes its place here.
        # None must stay None: the connector takes any other for the user's choice and ignores the string.
        self._precision_plugin = None if precision_plugin is None else AngelPTMPrecision.replacing(precision_plugin)

    @property
    @override
    def accelerator(self) -> Accelerator | None:  # type: ignore[override, unused-ignore]
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        check_front_end(accelerator, self.strategy_name)  # the first thing that a Trainer gives
        self._accelerator = accelerator

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        # Made when it is asked for: one that is there from the start is taken for the user's, and plugins=[...] refused.
        if self._checkpoint_io is None:
            self._checkpoint_io = checkpoints.FileCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = checkpoints.FileCheckpointIO()  # which one that has its own ignores
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def _precision(self) -> Any:
        refuse_fabric(self.strategy_name)  # which alone has such an attribute in its strategies

    @property
    def engine(self) -> Engine:
        """The engine of the run in progress."""
        if self._engine is None:
            raise UsageError(
                "no run is in progress: pages exist between the start and the end of fit/validate/test/predict"
            )
        return self._engine

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._connected

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # Lightning assigns it before it refuses a compiled module for every strategy but three, without a remedy.
        if module is not None and module._compiler_ctx is not None:
            raise ConfigError(
                f"the {type(module).__name__} was compiled as a whole with torch.compile, so its training_step would be, "
                f"too, and weights are fetched in the middle of it; give the Trainer the module as it is, and compile its "
                f"parts in configure_model: `for block in self.blocks: block.compile()`, or "
                f"`self.model = torch.compile(self.model)`"
            )
        self._connected = module

    # -- set-up -------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        ranks = self.num_processes * self.num_nodes
        # One rank is this process: as with one device, nothing is launched, and so a notebook will do.
        if not self.is_distributed:
            return
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            return
        if _IS_INTERACTIVE:
            raise ConfigError(
                f"{ranks} ranks cannot be started from a notebook or an interactive Python: each is a process that runs the "
                f"same script again, and there is no script; use devices=1 here, or put the run into a script"
            )
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._setting_up = True
        if not self.is_distributed:
            return  # a single device leaves the random numbers and the cluster as they are
        reset_seed()  # as DDP
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.cluster_environment.global_rank()  # type: ignore[attr-defined]
        if not _distributed_is_initialized():
            _init_dist_connection(self.cluster_environment, self._backend.collectives, timeout=self._timeout)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._close_engine()
        self._signals = None
        if fitting:  # as Lightning: an evaluation leaves those of the last fit, which may still be saved
            self._reset_optimizers_and_schedulers()
        if fitting and self.settings.state_dict_type == "sharded":
            refuse_sharded(trainer.callbacks)  # type: ignore[attr-defined]
        if fitting and self._layer_sync is not None and self.world_size > 1:
            self._synchronize_batch_norms(self.lightning_module, self._layer_sync)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if fitting:
            self.setup_optimizers(trainer)  # I1
        self._trains = fitting
        known = self._began_with() if self._began_with is not None else None
        if self._restored is not None:
            self._restored.refuse_written(self.lightning_module)
            self._restored = self._restored.untouched(self.lightning_module)
        if self._restored is not None or known is not self.lightning_module:
            self._ended = dataclasses.replace(self._ended, torn=False)
        self._build(trainer)
        self._setting_up = False
        restored, self._restored = self._restored, None
        if restored is not None:
            restored.fill(self.engine)
            self._go_on_drawing(self._random_states)
        assert self._watches is not None
        for optimizer in self._paged_optimizers():
            forget = checkpoints.take_over_optimizer_state(self.engine, optimizer)
            if forget is not None:
                self._shown_states[optimizer] = forget
                renew(optimizer)
            self._watches.loads_of(optimizer, self._follow_loaded_state)
        self._tell_where_states_are()
        self.barrier()

    def _build(self, trainer: Trainer, *, anew: bool = False) -> None:
        """Pages, and what watches over them.

        Args:
            anew: in mid-run: parameters have been rearranged.
        """
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        backend = self._backend
        events = Events()
        progress = self._progress_for(trainer)
        if isinstance(self.checkpoint_io, checkpoints.FileCheckpointIO):
            self.checkpoint_io.progress = progress
        self._communicator = self._make_communicator(events)
        expert_ranks = divide_ranks(self.settings.expert_parallel_size, self._communicator)
        given = self._files_values(self._communicator, progress)
        settings = self._settings_for(trainer)
        if settings.page_size == "auto":  # once for all runs of this strategy
            self._page_bytes = self._page_bytes or chosen_page_bytes(settings, self._communicator, backend)
            settings = dataclasses.replace(settings, page_size=self._page_bytes)
        if self._wide_products is None:
            compute = self.precision_plugin.plan.compute
            self._wide_products = chosen_wide_products(settings, compute, self._communicator, backend)
        request = self.request(trainer, settings)
        if anew:
            request = dataclasses.replace(request, rearranges=True)
        make_folders(settings.disk_paths)
        blueprint = draw(request, self._communicator, ranks_on_host=max(1, self.num_processes))
        self._engine = Engine(
            self.lightning_module,
            blueprint,
            self._trained,
            self._communicator,
            backend,
            disk_paths=settings.disk_paths,
            recompute=self.settings.recompute_every if fitting else 0,
            poison=self.settings.poison,
            file_ops=self.file_ops,
            given=given,
            events=events,
            expert_ranks=expert_ranks,
            progress=progress,
            ranks_here=max(1, self.num_processes),
        )
        self._interruption = Interruption(self._engine, self.lightning_module, self._saves)
        self._began_with = weakref.ref(self.lightning_module)
        self.precision_plugin.attach(
            self._engine,
            backend.name,
            update_in_backward=blueprint.update_in_backward,
            wide_products=self._wide_products,
        )
        paged = self._paged_optimizers()
        for optimizer in paged:
            guard(optimizer, self._engine.updates.parameters_of(self._engine.updates.index_of(optimizer)))
        if not anew:
            self.setup_precision_plugin()  # which makes Lightning's wrappers of the optimizers
        self._steps = OptimizerSteps(
            self._engine,
            paged,
            scaled=self.precision_plugin.loss_scale is not None,
            arm=partial(self.precision_plugin.arm, model=self.lightning_module),
        )
        self._watches = Watches(self._engine)
        self._signals = self._signals or Signals(trainer)
        wrappers = self._lightning_optimizers if self._trains else []
        for optimizer, wrapper in zip(self._trained, wrappers, strict=True):
            self._watches.zero_grad_of(optimizer, wrapper)
            self._watches.state_dict_of(
                checkpoints.plain_optimizer(optimizer),
                wrapper,
                partial(checkpoints.optimizer_state, self._engine, keep=True),
            )
        if isinstance(self._communicator, ProcessGroupCommunicator):
            self._watches.ranks(trainer, self._signals, self._communicator, self._meet, self._gather_for)
        else:
            self._watches.one_rank(trainer, self._signals)
        if self._wide_products:
            warn_of_wide_products_uncompiled(self.lightning_module)
        if fitting:
            self._watches.averaging(trainer, self.gathered)
            self._watches.links(trainer, self._link_checkpoint)
            self._watches.finetuning(trainer)
            warn_of_rearranging(trainer, self._engine)
            warn_of_gradients_in_pages(self.lightning_module, self._engine, self.precision_plugin)
            warn_of_recomputing_uncompiled(self.lightning_module, self._engine, self.settings)

    @property
    def _trained(self) -> list[Optimizer]:
        """The optimizers of the run in progress."""
        return self.optimizers if self._trains else []

    def _paged_optimizers(self) -> list[Optimizer]:
        plain = map(checkpoints.plain_optimizer, self._trained)
        return [optimizer for optimizer in plain if not self.engine.steps_itself(optimizer)]

    def _tell_where_states_are(self) -> None:
        if self.engine.blueprint.outside:
            rank_zero_info(f"{self.strategy_name} leaves model states in RAM as they are: parameters are rearranged")
            return
        rank_zero_info(f"{self.strategy_name} keeps {states_in_words(self.engine)}")
        paged = self._paged_optimizers()
        plain = map(checkpoints.plain_optimizer, self._trained)
        themselves = sorted({type(optimizer).__name__ for optimizer in plain if optimizer not in paged})
        if themselves:
            rank_zero_info(f"{', '.join(themselves)}: steps by itself, with states of its own outside of pages")

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._engine is not None and self._engine.outgrown():
            assert self.lightning_module is not None
            self._close_engine()
            self._build(self.lightning_module.trainer, anew=True)
            self._tell_where_states_are()

    def _synchronize_batch_norms(self, module: LightningModule, layer_sync: LayerSync) -> None:
        """As DDP: before anybody knows the modules.

        Raises:
            ConfigError: there are some, on a CPU.
        """
        layer_sync.apply(module)
        if not self._backend.apart and any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
            raise ConfigError(
                "sync_batchnorm=True: torch's SyncBatchNorm works on GPUs only, and this run computes on the CPU; leave it "
                "out, or use norms that do not depend on the batch, such as GroupNorm or LayerNorm"
            )

    def request(self, trainer: Trainer, settings: Settings) -> Request:
        """What a run of `trainer` asks for, once its optimizers are there; allocates nothing."""
        assert self.lightning_module is not None
        plan = self.precision_plugin.plan
        fitting = trainer.state.fn == TrainerFn.FITTING
        return Request(
            module=self.lightning_module,
            optimizers=self.optimizers if fitting else [],
            settings=settings,
            compute=plan.compute,
            mixed=plan.mixed,
            backend=self._backend,
            keep_gradients=fitting and self._keeps_gradients(trainer),
            gradients_stay=not self.precision_plugin.forgets_gradients(self.lightning_module),
            sums_gradients=fitting and self._sums_gradients(trainer),
            rearranges=fitting and bool(rearrangers(trainer)),
        )

    def _progress_for(self, trainer: Trainer) -> Progress:
        """Rank 0 shows long work, where the Trainer shows its own."""
        bar = trainer.progress_bar_callback
        wanted = bar is not None and not getattr(bar, "is_disabled", False)  # a user's own bar need not have it
        return dataclasses.replace(self.progress, shown=self.progress.shown and wanted and self.is_global_zero)

    def _files_values(self, communicator: Communicator, progress: Progress) -> Given | None:
        """What `weights` provides; nothing where the module has been in a run before: it may have learnt since."""
        assert self.lightning_module is not None
        known = self._began_with() if self._began_with is not None else None
        if self.settings.weights is None or known is self.lightning_module:
            return None
        given = weights.first_values(self.lightning_module, self.settings, communicator, progress)
        return given if self._restored is None else given.without(self._restored.here)

    def _settings_for(self, trainer: Trainer) -> Settings:
        """The user's settings; a home on disk without a path gets the Trainer's root folder."""
        settings = self.settings
        if settings.disk_path is None and "disk" in (settings.parameter_home, settings.wanted_master_home):
            root = Path(trainer.default_root_dir)
            root.mkdir(parents=True, exist_ok=True)
            return dataclasses.replace(settings, disk_path=str(root))
        return settings

    def _keeps_gradients(self, trainer: Trainer) -> bool:
        assert self.lightning_module is not None
        return self._sums_gradients(trainer) or not self.precision_plugin._nothing_waits_for_gradients(
            self.lightning_module
        )

    def _sums_gradients(self, trainer: Trainer) -> bool:
        """Whether a step may have the gradients of several backward passes."""
        assert self.lightning_module is not None
        schedules = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
        return (
            trainer.accumulate_grad_batches > 1
            or any(each.going_to_accumulate_grad_batches() for each in schedules)
            or not self.precision_plugin.forgets_gradients(self.lightning_module)
        )

    def _make_communicator(self, events: Events) -> Communicator:
        if self.world_size == 1:
            return SoloCommunicator()
        return ProcessGroupCommunicator(self._backend, self._timeout, events)

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
        refuse_spent(map(checkpoints.plain_optimizer, self.optimizers))
        with self._iteration(Mode.TRAIN):
            return super().training_step(*args, **kwargs)

    def _iteration(self, mode: Mode) -> AbstractContextManager[None]:
        """Around a step; nothing is, where somebody calls Lightning's loops after a run, with ordinary parameters."""
        if self._engine is None and self.precision_plugin.over:
            return nullcontext()
        assert self.lightning_module is not None
        return self.engine.iteration(mode, manual=not self.lightning_module.automatic_optimization)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._iteration(Mode.FORWARD):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._iteration(Mode.FORWARD):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._iteration(Mode.FORWARD):
            return super().predict_step(*args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning calls it around the micro-batches of a step but the last; so may a manual optimization. See
        `Settings.reduce_gradients`."""
        with self.engine.without_reduction():
            yield

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._steps is not None:
            self._steps.settle()
        if self._engine is not None:
            self._engine.fail(exception)
        elif self._communicator is not None:  # during set-up
            self._communicator.fail(f"{type(exception).__name__}: {exception}")

    def __getstate__(self) -> dict[str, Any]:
        # torch.save(trainer) and copy.deepcopy(trainer) come here.
        state = {**super().__getstate__(), "_began_with": None, "_spent": []}
        engine = self._engine
        if engine is None:
            return state
        if not engine.hooks.copyable:
            raise UsageError(COPIED_IN_A_RUN)
        # A copy is in no run. What its optimizers have learnt is in pages, which are not copied.
        ended = [each for at, each in enumerate(engine.updates.optimizers) if engine.values.has_optimizer_states(at)]
        of_the_run = ("_signals", "_engine", "_communicator", "_interruption", "_watches", "_steps", "_restored")
        return {
            **state,
            **dict.fromkeys(of_the_run),
            "_shown_states": {},
            "_saves": Saves(self.settings.failed_save),
            "_ended": afterwards.Ended(weights=True, optimizer_states=not ended),
            "_spent": ended,
        }

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        spend(state["_spent"])
        super().__setstate__({name: value for name, value in state.items() if name != "_spent"})

    # -- weights ------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *modules: nn.Module, write: bool = True) -> Iterator[None]:
        """Inside the block the parameters of `modules` (default: the whole model) are whole, real and precise (fp32
        under mixed precision), to be read or edited by hand. Call it on all ranks; rank 0's edits count.

        Args:
            write: keep edits. False saves the way back when you only read.
        """
        assert self.lightning_module is not None
        if self._engine is None:
            yield  # outside a run the parameters are whole anyway
            return
        if write:
            self._saves.finish()  # a checkpoint in progress is of the weights before the edit
        with self._engine.gathered(modules or (self.lightning_module,), write=write):
            yield

    def statistics(self) -> Statistics:
        """What this rank has moved, waited for and updated since the run began. Cheap; see also `callbacks.PageMonitor`."""
        return collect(self.engine)

    # -- to look at: the run's training iterations during fit, its forward passes otherwise ----------------------------

    def plan_text(self) -> str:
        """The plan that is followed, as a table: what is issued before each tick. See `callbacks.PlanPrinter`."""
        return self.engine.plan_text(self._mode())

    @property
    def plans_made(self) -> int:
        """How often the run has made its plan anew from a traced iteration."""
        return self.engine.executor.replans

    def states_at_home(self) -> tuple[StateBytes, ...]:
        """What kind of model states lives in which tier between steps, in bytes of this rank."""
        return states_at_home(self.engine)

    def tier_rooms(self) -> tuple[TierRoom, ...]:
        """Bytes of each tier of this rank, and of its pages in use now. Cheap."""
        return rooms(self.engine)

    def inventory(self) -> tuple[PageUse, ...]:
        """What all pages of this rank are for; they add up to what each tier has (`tier_rooms`)."""
        return inventory(self.engine)

    def planned_bytes(self) -> tuple[PlannedBytes, ...]:
        """Bytes of pages in each tier at each tick of the plan; see `callbacks.MemoryTimeline`. Replays the plan."""
        return planned_bytes(self.engine, self._mode())

    def last_trace(self) -> Trace | None:
        """The last iteration that was traced: its ticks, and the paper's table of tensors; None before there is one. An
        iteration is traced to its end when the next one begins. See `callbacks.PageTracer`."""
        return self.engine.executor.trace(self._mode())

    def flat_names(self) -> dict[int, str]:
        """Names of units by the numbers of their flats, which events of copies and updates tell: `flat 4 ...`, `4/4/master`
        (unit, flat, state)."""
        return flat_names(self.engine)

    @contextmanager
    def trace_events(self, listener: Listener) -> Iterator[None]:
        """Inside the block, `listener` is called with an `Event` whenever a tick, a copy between tiers, a collective, the
        arithmetic of an update or a stall of compute has ended on this rank. Begin it in a run; the run's end ends it.

        It is called in any thread, also in those that move pages: it must be quick and not raise; `list.append` is a good
        one. Nothing is measured outside such blocks. See `callbacks.PerfettoTrace`.
        """
        engine = self.engine
        with engine.events.heard_by(listener):
            try:
                yield
            finally:
                collect(engine)  # copies on a CUDA stream are told when somebody looks

    def _mode(self) -> Mode:
        assert self.lightning_module is not None
        return Mode.TRAIN if self.lightning_module.trainer.state.fn is TrainerFn.FITTING else Mode.FORWARD

    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The global norm of an optimizer's gradients over all ranks, wherever they are kept: complete, not yet clipped,
        and without the loss scale. Between backward and step only (`on_before_optimizer_step`), on all ranks.

        On one rank it is what `torch.nn.utils.clip_grad_norm_` returns, to the last bit. See `callbacks.GradNormMonitor`.
        """
        return self.engine.gradient_norm(optimizer, norm_type, self.precision_plugin.loss_scale)

    def update_audit(self) -> tuple[UpdateAudit, ...]:
        """With `lock_free=True`: for each flat of this rank, how many gradients were produced, applied, skipped, and are
        pending. Checked by itself at each drain; empty for synchronous updates. After a run: as at the last drain, which is
        the end of training if that did not fail; before the first one: empty."""
        return self._ended.audits if self._engine is None else audit(self._engine)

    @property
    def _unsaved(self) -> str:
        """Why the run in progress writes no checkpoint any more; empty while it does, and when there is none."""
        return "" if self._interruption is None else self._interruption.unsaved

    def _settle(self) -> None:
        if self._interruption is not None:
            self._interruption.settle()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._engine is None or self._interruption is None:
            return afterwards.module_state(self._ended, self.lightning_module, self.settings, keep=self.is_global_zero)
        self._interruption.settle()
        if not self._unsaved:
            with self._interruption.told():
                if self.settings.state_dict_type == "sharded":
                    return sharded.module_remainder(self._engine, self.lightning_module)
                return checkpoints.module_state(self._engine, self.lightning_module, keep=self.is_global_zero)
        return {}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if not self._setting_up:
            self._load_model_state_dict(checkpoint, strict)
            return
        # As Lightning: hooks and configure_optimizers may see and change weights. Pages take theirs from the module.
        progress = self._progress_for(self.lightning_module.trainer)
        total_bytes = sum(each.nbytes for each in checkpoint["state_dict"].values() if isinstance(each, Tensor))
        with progress.bar("loading weights", total_bytes) as seen, CopiesSeen(seen):
            self._restored = checkpoints.load_before_pages(
                self.lightning_module, checkpoint["state_dict"], strict=strict
            )
        self._random_states = randomness.found(checkpoint)

    def _load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        assert self.lightning_module is not None
        self._saves.finish()
        if self._engine is None:  # between runs the parameters are ordinary ones
            afterwards.give_storage(self.lightning_module)
            super().load_model_state_dict(checkpoint, strict)
            self._ended = dataclasses.replace(self._ended, weights=True, torn=False)
            return
        checkpoints.load_module_state(self._engine, self.lightning_module, checkpoint["state_dict"], strict=strict)
        self._go_on_drawing(randomness.found(checkpoint))

    def _go_on_drawing(self, random_states: Sequence[Any]) -> None:
        """Random numbers, where the run is one that is resumed."""
        assert self.lightning_module is not None
        # A run that goes back to its own checkpoint (Lightning's tuners do, after their trials) is none that is resumed.
        resumed = self.lightning_module.trainer.state.fn is TrainerFn.FITTING and not self.engine.iterations
        if resumed and len(random_states) == self.world_size:  # of another number of ranks nobody could go on alike
            randomness.restore(random_states[self.global_rank], self._backend)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._engine is not None and not self._trains and self.settings.state_dict_type == "sharded":
            raise UsageError(
                "a sharded checkpoint in the middle of an evaluation has no place for the states of the fit before; save "
                "when the evaluation is over, or give save_checkpoint(..., weights_only=True)"
            )
        if self._engine is None or self._interruption is None or not self._trains:
            return afterwards.optimizer_state(self._ended, optimizer, self.settings, keep=self.is_global_zero)
        if not self._unsaved:
            with self._interruption.told():
                if self.settings.state_dict_type == "sharded":
                    return sharded.optimizer_remainder(self._engine, optimizer)
                return checkpoints.optimizer_state(self._engine, optimizer, keep=self.is_global_zero)
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
                forget = checkpoints.load_optimizer_state(self._engine, optimizer, state)
                self._shown_states[checkpoints.plain_optimizer(optimizer)] = forget
        for optimizer in map(checkpoints.plain_optimizer, self.optimizers):
            renew(optimizer)

    def _follow_loaded_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """A hook of the user's has called its `load_state_dict`."""
        forget_earlier = self._shown_states.pop(optimizer, None)
        if forget_earlier is not None:
            forget_earlier()
        self._shown_states[optimizer] = checkpoints.follow_loaded_state(self.engine, optimizer, state)
        renew(optimizer)

    def _forget_shown_states(self) -> None:
        while self._shown_states:
            self._shown_states.popitem()[1]()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self._interruption is None:
            self._save_checkpoint(checkpoint, filepath, storage_options)
            if self._ended.torn:
                rank_zero_warn(f"the weights in {filepath} are of two steps: {TORN}")
            return
        self._interruption.settle()
        if not self._unsaved:
            with self._interruption.told():
                self._save_checkpoint(checkpoint, filepath, storage_options)
        if self._unsaved:
            rank_zero_warn(f"no checkpoint {filepath} is written: {self._unsaved}")

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        begun = self._engine is not None or self._began_with is not None
        if "optimizer_states" in checkpoint and begun:  # else there is nothing to go on with
            ours, ranks = randomness.sent(randomness.states(self._backend)), range(self.world_size)
            tell = self.broadcast if self._engine is None else self._engine.told
            states = [tell(ours if rank == self.global_rank else None, rank) for rank in ranks]
            checkpoint = randomness.filed(checkpoint, [randomness.received(each) for each in states])
        if self.settings.state_dict_type == "full":

            def save() -> None:
                with self._together():
                    super(AngelPTMStrategy, self).save_checkpoint(checkpoint, filepath, storage_options=storage_options)

            self._saves.save(filepath, save)
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
        behind = self.settings.async_save and self._engine.blueprint.saves_behind and not cut_short
        self._saves.save(filepath, lambda: self._begin_saving(checkpoint, Path(filepath), behind), behind=behind)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What the block raises on one rank raises on all of them, also after a run; there, rank 0 alone does something.
        Collective."""
        if self._engine is not None:
            with self._engine.together():
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
        assert self.lightning_module is not None
        with self._together():
            if self.is_global_zero:
                afterwards.save(self._ended, self.lightning_module, self.optimizers, checkpoint, path, self.save_ops)

    def _begin_saving(self, checkpoint: dict[str, Any], path: Path, behind: bool) -> Saving | None:
        assert self.lightning_module is not None
        saving = Saving(
            self.engine,
            self.lightning_module,
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
        return randomness.set_aside(self._read_checkpoint(checkpoint_path, weights_only))

    def _read_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if not self._is_sharded(path):
            with self._setting_up_together() if self._setting_up else nullcontext():
                return super().load_checkpoint(checkpoint_path, weights_only)
        # Who does not train needs no optimizer states: with Adam, two thirds of the bytes.
        assert self.lightning_module is not None
        if self._engine is None and not self._setting_up:
            return sharded.load(path, weights_only=weights_only is not False)
        trainer = self.lightning_module.trainer
        fitting = trainer.state.fn is TrainerFn.FITTING

        def ours(index: Index) -> Sequence[StateFile]:
            needed = [file for file in index.files if fitting or file.kind == PARAMETERS]
            return needed[self.global_rank :: self.world_size]

        def load() -> dict[str, Any]:
            return sharded.load(
                path,
                weights_only=weights_only is not False,
                optimizers=fitting,
                verify=ours,
                progress=self._progress_for(trainer),
            )

        with self._engine.together() if self._engine is not None else self._setting_up_together():
            return load()

    @contextmanager
    def _setting_up_together(self) -> Iterator[None]:
        """What the block raises on one rank raises on all of them, before the run has a communicator. Collective."""
        communicator = self._make_communicator(Events())
        try:
            with together(communicator):
                yield
        finally:
            communicator.close()

    def _is_sharded(self, path: Path) -> bool:
        """Whether a path is a sharded checkpoint's, perhaps a damaged one's; a user's plugin may write folders, too."""
        return is_folder(path) and (
            folders.is_sharded(path) or isinstance(self.checkpoint_io, checkpoints.FileCheckpointIO)
        )

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

    # -- collectives for Lightning ------------------------------------------------------------------------------------

    def _is_alone(self) -> bool:
        """Whether there is no other rank, or none that could be waited for: callbacks ask for collectives, too, when the
        run was cut short on this rank."""
        self._settle()
        failed = self._engine is not None and self._engine.failed
        # One rank is alone even where somebody else in its process is connected to others (`lightning-ptm probe`).
        return failed or bool(self._unsaved) or self.world_size == 1 or not _distributed_is_initialized()

    def _meet(self, what: Together) -> None:
        if not self._is_alone():
            self.engine.meet(what)

    def _gather_for(self, gathering: Gathering) -> None:
        self._settle()
        self.engine.gather_for(gathering)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._is_alone():
            return
        if torch.distributed.get_backend() == "nccl":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_alone():
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor) and not self._is_alone():
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._is_alone():
            return tensor
        return super().all_gather(tensor, group, sync_grads)

    # -- the end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        self._setting_up, self._restored = False, None
        self._close_engine()
        if self.lightning_module is not None:
            trainer = self.lightning_module._trainer
            fitted = trainer is not None and trainer.state.fn is TrainerFn.FITTING
            if fitted and self._layer_sync is not None and self.world_size > 1:
                self._layer_sync.revert(self.lightning_module)
            for owner in self.lightning_module.modules():
                for name, buffer in owner._buffers.items():
                    if buffer is not None and not buffer.is_meta:  # set-up may have failed before it had memory
                        owner._buffers[name] = buffer.cpu()
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        assert self.accelerator is not None
        if self._signals is not None:
            self._signals.leave()
            self._signals = None
        if self.is_distributed:
            assert self.cluster_environment is not None
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _close_engine(self) -> None:
        engine, communicator = self._engine, self._communicator
        if engine is None:
            self._communicator = None
            with ExitStack() as steps:
                if communicator is not None:  # set-up failed
                    steps.callback(communicator.close)
                self._forget_shown_states()
            return
        torn = self._interruption is not None and self._interruption.torn
        before, self._ended = self._ended, afterwards.remember(engine, torn=torn)
        if not self._trains:  # of optimizers, and of weights that nobody has loaded since, the fit before has told
            self._ended = dataclasses.replace(
                self._ended, optimizer_states=before.optimizer_states, torn=torn or before.torn
            )
        replaced: list[Optimizer] = []
        told_later: list[Exception] = []
        with ExitStack() as steps:  # each of them, whatever becomes of those before; the last one first
            steps.callback(self._saves.forget)
            steps.callback(engine.close)
            if communicator is not None:
                # First: a collective in flight may still write into the pages that the engine frees.
                steps.callback(communicator.close)
            steps.callback(self._settle_accounts, engine, before.audits)
            try:
                self._detach(replaced)
            except Exception as error:  # the weights are the user's all the same
                told_later.append(error)
            try:
                self._give_back(engine, replaced, told_later)
            except Exception as error:
                engine.fail(error)  # the others wait for this rank, and Lightning can no longer tell them
                if not self._ended.weights:
                    engine.values.let_go()
                raise
        for each in told_later:
            raise each

    def _detach(self, replaced: list[Optimizer]) -> None:
        """What the run has put into objects of others is taken out of all of them.

        Args:
            replaced: gets the optimizers whose `state` the user has replaced.
        """

        def give_back_state(optimizer: Optimizer) -> None:
            if not unguard(optimizer):
                replaced.append(optimizer)

        paged, watches, before_step = self._paged_optimizers(), self._watches, self._steps
        self._engine = self._communicator = self._watches = self._steps = self._interruption = None
        with ExitStack() as steps:  # the last one first
            steps.callback(self.precision_plugin.attach, None)
            if before_step is not None:
                steps.callback(before_step.close)
            if watches is not None:
                steps.callback(watches.undo)
            for optimizer in reversed(paged):
                steps.callback(give_back_state, optimizer)
            steps.callback(self._forget_shown_states)

    def _give_back(self, engine: Engine, replaced: Collection[Optimizer], told_later: list[Exception]) -> None:
        """Weights and optimizer states are the user's again, as far as that is wanted and can be. Collective.

        Args:
            replaced: optimizers whose states are not.
            told_later: gets why the last checkpoint was not written.
        """
        if engine.failed:
            self._saves.farewell()
        else:
            engine.meet(Together.END_OF_RUN)
            try:
                self._saves.finish()
            except CheckpointError as error:  # the weights are the user's all the same
                told_later.append(error)
        wanted, ranks_here = self.settings.restore_weights, max(1, self.num_processes)
        if restore.weights(engine, wanted=wanted, ranks_here=ranks_here):
            self._ended = dataclasses.replace(self._ended, weights=True)
            self.precision_plugin.over = self.world_size == 1 and self.precision_plugin.loss_scale is None
            kept = [each for each in self._trained if checkpoints.plain_optimizer(each) not in replaced]
            keep_here = kept if self.is_global_zero else ()
            if self._trains and restore.optimizer_states(engine, self.optimizers, keep_here):
                self._ended = dataclasses.replace(self._ended, optimizer_states=True)

    def _settle_accounts(self, engine: Engine, known_audits: tuple[UpdateAudit, ...]) -> None:
        """Before pages go: what can be told of the run afterwards, and which optimizers have lost their states."""
        self._ended = dataclasses.replace(self._ended, audits=last_audit(engine) or known_audits)
        if not self._ended.optimizer_states:
            optimizers = enumerate(engine.updates.optimizers)
            spend(each for index, each in optimizers if engine.values.has_optimizer_states(index))


def register() -> None:
    """Makes the names known to `Trainer(strategy=...)`."""
    from lightning.pytorch.strategies import StrategyRegistry

    names: dict[str, tuple[str, dict[str, Any]]] = {
        "angel_ptm": ("pages over device, host and disk; the plan decides what lives where", {}),
        "angel_ptm_host": ("angel_ptm with master states on the host", {"master_home": "host"}),
        "angel_ptm_disk": ("angel_ptm with master states on disk", {"master_home": "disk"}),
        "angel_ptm_lock_free": ("angel_ptm_disk whose compute never waits for the disk", {"lock_free": True}),
    }
    for name, (description, settings) in names.items():
        StrategyRegistry.register(name, AngelPTMStrategy, description=description, override=True, **settings)
    refuse_elsewhere(AngelPTMStrategy, names)


__all__ = ["AngelPTMStrategy", "ConfigError", "register"]
