"""How a run begins: what the Trainer's arguments ask for, and the engine and all that watches over it, built of that."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_ptm.checkpoints import optimizer_states, restore, weights
from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.checkpoints.interruption import Interruption
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.comm import Communicator, Communicators, ProcessGroupCommunicator
from lightning_ptm.config import DEFAULT_PAGE_BYTES, Settings, format_bytes
from lightning_ptm.errors import AngelPTMError, ConfigError, RankError, UsageError, some
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.disk import FileOps, check_folders, make_folders
from lightning_ptm.memory.page_rates import measured_rates, smallest_saturating
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.rules import plan_of
from lightning_ptm.planning.expert_split import ALONG
from lightning_ptm.planning.sharding import Axis
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.decide import decide_here
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.engine.inspection import states_in_words
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.tensors.parts import split_of
from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter
from lightning_ptm.terms import Tier
from lightning_ptm.trainer.checkpointing import CheckpointingStrategy
from lightning_ptm.trainer.lightning_hooks import (
    LightningHooks,
    rearrangers,
    warn_of_gradients_in_pages,
    warn_of_recomputing_uncompiled,
    warn_of_threads,
    warn_of_wide_products_uncompiled,
)
from lightning_ptm.trainer.matmul_precision import chosen_wide_matmuls
from lightning_ptm.trainer.optimizer_steps import OptimizerStep
from lightning_ptm.trainer.paged_optimizer_state import guard
from lightning_ptm.trainer.same_batches import take_first_rank_s_values
from lightning_ptm.trainer.signals import Signals

_in_progress: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Of all strategies of this process."""


class BuildingStrategy(CheckpointingStrategy):
    """Builds runs."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._page_bytes: int | None = None
        """What `page_size="auto"` has come to."""
        self._wide_matmuls: bool | None = None
        """What `matmul_precision="auto"` has come to; None until the first set-up, once for all runs of this strategy."""
        self._events = Events()
        """Of the run in progress: who listens hears of what follows when it is laid out anew, too."""
        self._lightning_hooks: LightningHooks | None = None
        self._signals: Signals | None = None
        self._steps: tuple[OptimizerStep, ...] = ()
        self.file_ops: FileOps | None = None
        """The disk tier's file calls, for tests of failing disks; None: the operating system's."""

    def _refuse_in_another_run(self) -> None:
        """Before a run begins.

        Raises:
            UsageError: another one, in whose hook this one begins, has weights of the module in pages.
        """
        for engine in tuple(_in_progress):
            names = [] if engine.closed else engine.lent_parameters.names_of_copies(self._module.parameters())
            if names:
                raise UsageError(
                    f"{some(names, 3)}: in the pages of a run that is in progress, so another run cannot have them; run "
                    f"copy.deepcopy(module) in its place, which has the values of now and is in no run, and load what it "
                    f"has learnt (module.load_state_dict), or wait for the end of the first run"
                )

    def _build(
        self, trainer: Trainer, *, anew: bool = False, given: Given | None = None, handed: PreviousState | None = None
    ) -> None:
        """The engine and its pages, and what watches over them.

        Args:
            anew: in mid-run: parameters have been rearranged.
            given: their values, where the module has none.
            handed: the same, where they are in pages.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        backend = self._backend
        if not anew:
            self._events, self._before_laid_out = Events(), None
        events = self._events
        progress = self._progress_for(trainer)
        if isinstance(self.checkpoint_io, FileCheckpointIO):
            self.checkpoint_io.progress = progress
        self._communicator = self._make_communicator(events)
        exchanging = self._communicator_of_tensor_group()  # before anything can fail on one rank alone, as what follows
        mesh = split_of(
            self._boxes(), self.world_size, self.settings.expert_parallel_size, self._communicator.rank
        ).mesh
        # What ranks with other parts exchange is the module's affair.
        behind = (Axis.TENSOR,) if self.settings.checkpoints.async_save and fitting else ()
        communicators = Communicators(mesh, self._communicator, ALONG, behind)
        given = given or self._files_values(self._communicator, progress)
        settings = self._settings_for(trainer)
        make_folders(settings.disk_paths)
        settings = self._chosen(settings, self._communicator)
        request = self.request(trainer, settings)
        if anew:
            request = dataclasses.replace(request, rearranges=True)
        blueprint = self._decided(request, handed)
        if fitting and not anew and settings.frozen_dtype != "compute":
            _warn_without_codes(blueprint, settings.frozen_dtype)
        self._engine = Engine(
            self._module,
            blueprint,
            self._trained,
            communicators,
            backend,
            disk_paths=settings.disk_paths,
            recompute=self.settings.recompute_every if fitting else 0,
            poison=self.settings.debug.poison,
            file_ops=self.file_ops,
            given=given,
            events=events,
            progress=progress,
            ranks_here=max(1, self.num_processes),
            handed=handed,
            root=root_folder(trainer),
        )
        _in_progress.add(self._engine)
        # A checkpoint in progress is of the weights before the edit.
        self._engine.summon.before_edits = self._saves.finish
        # A run that goes on from a checkpoint rounds as it would have done.
        self._engine.updates.number_of_step = lambda: trainer.global_step
        if exchanging is not None:
            self._connect_tensor_group(exchanging, self._engine)
        self._interruption = Interruption(self._engine, self._module, self._saves)
        self._began_with = weakref.ref(self._module)
        self.precision_plugin.attach(self._engine, backend.name, wide_matmuls=bool(self._wide_matmuls))
        self._watch(trainer, self._engine, fitting=fitting, anew=anew)

    def _chosen(self, settings: Settings, communicator: Communicator) -> Settings:
        """What "auto" comes to, once for all runs of this strategy."""
        backend = self._backend
        if settings.page_size == "auto":
            self._page_bytes = self._page_bytes or chosen_page_bytes(settings, communicator, backend)
            settings = dataclasses.replace(settings, page_size=self._page_bytes)
        if self._wide_matmuls is None:
            compute = self.precision_plugin.plan.compute
            self._wide_matmuls = chosen_wide_matmuls(settings, compute, communicator, backend)
        return settings

    def _decided(self, request: Request, handed: PreviousState | None) -> Blueprint:
        assert self._communicator is not None
        in_memory, on_disk = (0, 0) if handed is None else (handed.bytes_in_memory(), handed.bytes_on_disk())
        ranks_here = max(1, self.num_processes)
        return decide_here(request, self._communicator, ranks_here, in_memory=in_memory, on_disk=on_disk)

    def _communicator_of_tensor_group(self) -> ProcessGroupCommunicator | None:
        """For its exchanges alone; None without one. Collective."""
        if self._tensor_group is None or not isinstance(self._communicator, ProcessGroupCommunicator):
            return None
        return self._communicator.part(self._tensor_groups(), exchanging=True)

    def _connect_tensor_group(self, exchanging: ProcessGroupCommunicator, engine: Engine) -> None:
        """Its layers exchange in the engine's rounds."""
        assert self._tensor_group is not None and self._communicator is not None
        group = self._communicator.rank // exchanging.world_size
        exchanges = ActivationExchange(exchanging, group, engine.barriers, engine.executor)
        engine.barriers.compare(self._tensor_groups(), exchanges.done)
        self._tensor_group.connect(exchanges)

    def _tensor_groups(self) -> list[range]:
        """The ranks of each."""
        size = 1 if self._tensor_group is None else self._tensor_group.size
        return [range(at, at + size) for at in range(0, self.world_size, size)]

    def _cut_module(self, group: TensorGroup | None, *, proven: bool = True) -> None:
        """The module's parameters become this rank's parts (`tensor_parallel_size`); their optimizers keep them.

        Args:
            group: None: they stay whole.
            proven: blocks are proven when they are first called.
        """
        if group is not None and group is self._tensor_group:
            take_first_rank_s_values(self._module, self.device_mesh["tensor_parallel"].get_group(), self._backend)
        if group is not None:
            plan, strict = self.settings.tensor_parallel.plan, self.settings.tensor_parallel.plan != "auto"
            self._cut = CutModule(
                self._module,
                plan_of(self._module, plan),
                group,
                strict=strict,
                sequence_parallel=self.settings.tensor_parallel.sequence_parallel,
                proven=proven,
            )

    def _watch(self, trainer: Trainer, engine: Engine, *, fitting: bool, anew: bool) -> None:
        """What the run has to hear of is watched, and what users should know beforehand is told them."""
        paged = self._paged_optimizers()
        for optimizer in paged:
            index = engine.updates.groups.index_of(optimizer)
            guard(optimizer, engine.updates.groups.parameters_of(index), partial(engine.stepping.forget_states, index))
        if not anew:
            self.setup_precision_plugin()  # which makes Lightning's wrappers of the optimizers
        scaled = self.precision_plugin.loss_scale is not None
        arm = partial(self.precision_plugin.arm, model=self._module)
        self._steps = tuple(OptimizerStep(engine, optimizer, scaled=scaled, arm=arm) for optimizer in paged)
        self._lightning_hooks = LightningHooks(engine)
        self._lightning_hooks.steps_of_others([plain_optimizer(each) for each in self._trained])
        self._signals = self._signals or Signals(trainer)
        wrappers = self._lightning_optimizers if self._trains else []
        for optimizer, wrapper in zip(self._trained, wrappers, strict=True):
            self._lightning_hooks.zero_grad_of(optimizer, wrapper)
            self._lightning_hooks.state_dict_of(
                plain_optimizer(optimizer),
                wrapper,
                partial(optimizer_states.optimizer_state, engine, keep=True),
            )
        if isinstance(self._communicator, ProcessGroupCommunicator):
            self._lightning_hooks.ranks(trainer, self._signals, self._communicator, self._meet, self._gather_for)
        else:
            self._lightning_hooks.one_rank(trainer, self._signals)
        if self._data_group is not None:
            self._lightning_hooks.metrics(self._module, self._data_group)
        warn_of_threads(max(1, self.num_processes))
        if self._wide_matmuls:
            warn_of_wide_products_uncompiled(self._module)
        if fitting:
            self._lightning_hooks.no_sync(self._module, self.block_backward_sync)
            self._lightning_hooks.averaging(trainer, self.gathered)
            self._lightning_hooks.pruning(trainer, self.gathered)
            self._lightning_hooks.links(trainer, self._link_checkpoint)
            if self._cut is not None:
                self._lightning_hooks.summaries(trainer, self._cut.boxes())
            self._lightning_hooks.finetuning(trainer)
            warn_of_gradients_in_pages(self._module, engine, self.precision_plugin)
            warn_of_recomputing_uncompiled(self._module, engine, self.settings)

    def request(self, trainer: Trainer, settings: Settings) -> Request:
        """What a run of `trainer` asks for, once its optimizers are there; allocates nothing."""
        plan = self.precision_plugin.plan
        fitting = trainer.state.fn == TrainerFn.FITTING
        sums = fitting and self._sums_gradients(trainer)
        return Request(
            module=self._module,
            optimizers=self.optimizers if fitting else [],
            settings=settings,
            compute=plan.compute,
            mixed=plan.mixed,
            backend=self._backend,
            keep_gradients=sums or (fitting and not self.precision_plugin._nothing_waits_for_gradients(self._module)),
            gradients_stay=not self.precision_plugin.forgets_gradients(self._module),
            sums_gradients=sums,
            rearranges=fitting and bool(rearrangers(trainer)),
            # Of manual optimization the step is taken within the forward.
            changes_default_dtype=plan.default_dtype is not None and self._module.automatic_optimization,
            further=self.further_tiers(),
            boxes=self._boxes(),
            partial=() if self._cut is None else self._cut.partial,
        )

    def further_tiers(self) -> Mapping[Tier, int]:
        """Tiers beside device, host and disk, with the bytes of each that pages of this rank may take: none. For subclasses
        on machines that have other memory; homes are found in it as in all tiers, nearest first (see `terms.Tier`)."""
        return {}

    def _files_values(self, communicator: Communicator, progress: Progress) -> Given | None:
        """What `weights` provides; nothing where the module has been in a run before: it may have learnt since."""
        known = self._began_with() if self._began_with is not None else None
        if self.settings.weights is None:
            return None
        if known is self._module:
            return self._files_values_again(communicator, progress)
        given = weights.first_values(self._module, self.settings, communicator, progress, self._boxes())
        return given if self._restored is None else given.without(self._restored.here)

    def _files_values_again(self, communicator: Communicator, progress: Progress) -> Given | None:
        """What `weights` provides of frozen parameters that an earlier run of this module had no room to give back."""
        absent = {id(each) for each in self._module.parameters() if isinstance(each, GuardedParameter)}
        if not absent & self._ended.of_files:
            return None
        given = weights.first_values(self._module, self.settings, communicator, progress, self._boxes())
        loaded = frozenset() if self._restored is None else self._restored.here
        again = {key: read for key, read in given.parameters.items() if key in (absent & self._ended.of_files) - loaded}
        return Given(again)

    def _settings_for(self, trainer: Trainer) -> Settings:
        """The user's settings; a home on disk without a path gets the Trainer's root folder."""
        settings = self.settings
        if settings.disk_path is None and "disk" in (settings.offload_parameters, settings.wanted_offload_optimizer):
            root = Path(trainer.default_root_dir)
            root.mkdir(parents=True, exist_ok=True)
            return dataclasses.replace(settings, disk_path=str(root))
        return settings

    def _sums_gradients(self, trainer: Trainer) -> bool:
        """Whether a step may have the gradients of several backward passes."""
        schedules = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
        return (
            trainer.accumulate_grad_batches > 1
            or any(each.going_to_accumulate_grad_batches() for each in schedules)
            or not self.precision_plugin.forgets_gradients(self._module)
        )

    def _tell_where_states_are(self) -> None:
        if self.engine.blueprint.outside:
            rank_zero_info(f"{self.strategy_name} leaves model states in RAM as they are: parameters are rearranged")
            return
        rank_zero_info(f"{self.strategy_name} keeps {states_in_words(self.engine)}")
        if self._trains and self.settings.tuning.restore_weights:
            ranks_here = max(1, self.num_processes)
            warning = restore.foretold(self.engine, ranks_here=ranks_here, whole=self._cut is not None)
            if warning:
                rank_zero_warn(warning)
        paged = self._paged_optimizers()
        plain = map(plain_optimizer, self._trained)
        themselves = sorted({type(optimizer).__name__ for optimizer in plain if optimizer not in paged})
        if themselves:
            rank_zero_info(f"{', '.join(themselves)}: steps by itself, with states of its own outside of pages")

    def _synchronize_batch_norms(self, module: LightningModule, layer_sync: LayerSync) -> None:
        """As DDP: before anybody knows the modules. Over the ranks with different batches, so that each counts once.

        Raises:
            ConfigError: there are some, on a CPU.
        """
        layer_sync.apply(module)
        norms = [each for each in module.modules() if isinstance(each, nn.SyncBatchNorm)]
        for norm in norms:
            norm.process_group = self._counted(norm.process_group)
        if norms and not self._backend.apart:
            raise ConfigError(
                "sync_batchnorm=True: torch's SyncBatchNorm works on GPUs only, and this run computes on the CPU; leave it "
                "out, or use norms that do not depend on the batch, such as GroupNorm or LayerNorm"
            )


def root_folder(trainer: Trainer) -> Path | None:
    """The Trainer's root folder; None where it is not of this machine."""
    root = str(trainer.default_root_dir)
    return None if "://" in root else Path(root)


def _warn_without_codes(blueprint: Blueprint, name: str) -> None:
    if not any(flat.code for flat in blueprint.layout.everywhere()):
        rank_zero_warn(
            f"frozen_dtype={name!r} changes nothing in this run: no matrix of a unit beside the root is frozen; freeze the "
            f"model (model.requires_grad_(False)) before its adapters are made, name the units (units=['Block']), or leave "
            f"frozen_dtype out"
        )


def chosen_page_bytes(settings: Settings, communicator: Communicator, backend: Backend) -> int:
    """What rank 0 finds, on all ranks. Collective.

    Raises:
        ConfigError: rank 0 cannot use the disk's folders; RankError on the others.
    """
    failure: AngelPTMError | None = None
    told: int | str | None = None
    if communicator.rank == 0:
        try:
            check_folders(settings.disk_paths)
            told = smallest_saturating(measured_rates(settings.disk_paths, backend)) or DEFAULT_PAGE_BYTES
        except AngelPTMError as error:
            failure, told = error, str(error)
    told = communicator.broadcast_object(told)
    if failure is not None:
        raise failure
    if not isinstance(told, int):
        raise RankError(
            f"page_size='auto', and rank 0 could not measure pages: {told}; mend that, or give a size, such as '4MiB'"
        )
    rank_zero_info(f"page_size='auto': pages of {format_bytes(told)}")
    return told
