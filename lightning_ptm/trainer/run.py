"""The run in progress: its engine, its communicator, and everything that it has installed in Lightning's and users' objects.

It lives from the strategy's `setup` to its `teardown`, and has pages from `lay_out` to `leave`. When parameters change in
mid-run (relayout.py), it leaves its pages and is laid out again. teardown.py ends it.
I1: `leave` removes everything that the run has installed in other objects, whatever fails on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.checkpoints import gathering, optimizer_states, restore
from lightning_ptm.checkpoints.optimizer_states import guard, plain_optimizer, renew, unguard
from lightning_ptm.checkpoints.save_queue import Interruption, SaveQueue
from lightning_ptm.comm import Communicator, Gathering, ProcessGroupCommunicator
from lightning_ptm.errors import UsageError, one_line, some
from lightning_ptm.events import Events, Listener
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.planning.mesh import Axis, GridAxis
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.deciding.decide import CheckedParameters
from lightning_ptm.runtime.engine.engine import IN_PROGRESS, Engine
from lightning_ptm.runtime.engine.inspection import Statistics, collect, states_in_words, together
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange
from lightning_ptm.runtime.ranks.barriers import BarrierReason
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.storage import folder as folders
from lightning_ptm.terms import SEVERAL_CHUNKS, Mode, Tier
from lightning_ptm.trainer import randomness
from lightning_ptm.trainer.batch_steps import BatchSteps, CheckSchedule
from lightning_ptm.trainer.builder import Builder
from lightning_ptm.trainer.device_budget import DeviceBudget
from lightning_ptm.trainer.disk_report import DiskReport, in_first_line
from lightning_ptm.trainer.divided_steps import DividedSteps
from lightning_ptm.trainer.internals import wrapped_optimizers
from lightning_ptm.trainer.lightning_hooks import (
    LightningHooks,
    warn_of_gradients_in_pages,
    warn_of_recomputing_uncompiled,
    warn_of_threads,
    warn_of_wide_matmuls_uncompiled,
)
from lightning_ptm.trainer.optimizer_steps import OptimizerStep
from lightning_ptm.trainer.pipelined import PipelinedSteps, StageLinks
from lightning_ptm.trainer.ranks import SetUp
from lightning_ptm.trainer.same_batches import take_first_rank_s_values
from lightning_ptm.trainer.signals import Signals
from lightning_ptm.trainer.two_batch_steps import SUMS_AT_ONCE, TwoBatchSteps


def refuse_in_another_run(module: nn.Module) -> None:
    """Checks that no run in progress has the module.

    Raises:
        UsageError: weights of the module are in pages of another run, in whose hook this one begins.
    """
    for engine in tuple(IN_PROGRESS):
        names = [] if engine.closed else engine.gathered_parameters.names_of_copies(module.parameters())
        if names:
            raise UsageError(
                f"this module's weights ({some(names, 3)}) are used by a run that is in progress, so another run "
                "cannot have them; run copy.deepcopy(module) instead, which has the current values and is in no run, "
                "and load the trained values afterwards (module.load_state_dict), or wait for the end of the first "
                "run"
            )


def no_pages() -> UsageError:
    """The error for requests that need pages, outside of runs."""
    return UsageError(
        "this call needs a run in progress: pages exist between the start and the end of fit, validate, test "
        "or predict; make it in a hook or a callback"
    )


class Run:
    """A run of one Trainer.

    Args:
        builder: factory of its engines.
        saves: queue of its checkpoints.
    """

    def __init__(self, builder: Builder, saves: SaveQueue) -> None:
        self.builder = builder
        self.module = builder.module
        self.saves = saves
        self.signals = Signals(builder.trainer, self._any_rank_flags)
        self.disk_report = DiskReport(builder, self.statistics)
        # State.
        self.cut: CutModule | None = None
        """The slicing of the module's parameters over ranks (`tensor_parallel_size`); None if they are whole."""
        self._tensor_group = builder.groups.tensor
        self._stage_checks = CheckSchedule()
        self.steps = BatchSteps(self._iteration)
        """How batches are computed: whole, until `watch` chooses."""
        self._stage_links: StageLinks | None = None
        self.communicator: Communicator | None = None
        self.interruption: Interruption | None = None
        self.foretold = False
        """Whether the run has warned that not all weights may be restored at its end."""
        self._engine: Engine | None = None
        self._lightning_hooks: LightningHooks | None = None
        self._optimizer_steps: tuple[OptimizerStep, ...] = ()
        self._events = Events()
        """Event listeners, which stay subscribed when the run is laid out again."""
        self._counted: Statistics | None = None
        """Statistics from before the last re-layout."""
        self._cut_off = ""
        """The reason why the run's states are lost, so that no checkpoint can be made; empty while they are not."""
        self.device_budget = DeviceBudget(
            builder.place.backend,
            lambda: self._engine.activation_peak if self._engine is not None else None,
            follows=builder.fits and builder.settings.device_bytes is None,
        )
        self._shown_states: dict[Optimizer, Callable[[], None]] = {}
        """Functions that remove the readable states from each optimizer's `state`: those that it had at the start of the run
        or loaded since, until its first step."""

    # -- what it has --------------------------------------------------------------------------------------------------

    @property
    def has_pages(self) -> bool:
        """Whether the run has pages: not before `lay_out`, after `leave`, or after a failed re-layout."""
        return self._engine is not None

    @property
    def outgrown(self) -> bool:
        """Whether the run has pages, and they have to be laid out again, since parameters or groups have changed."""
        return self._engine is not None and self._engine.changes.outgrown()

    @property
    def engine(self) -> Engine:
        """The engine, while there are pages."""
        if self._engine is None:
            raise no_pages()
        return self._engine

    @property
    def trainer(self) -> Trainer:
        return self.builder.trainer

    @property
    def fits(self) -> bool:
        """Whether the run trains."""
        return self.builder.fits

    @property
    def mode(self) -> Mode:
        """The mode of the iterations that the Trainer runs now."""
        return Mode.TRAIN if self.trainer.state.fn is TrainerFn.FITTING else Mode.FORWARD

    def paged_optimizers(self) -> list[Optimizer]:
        """The run's optimizers with states in pages, whatever optimizers the Trainer has been given since."""
        engine = self.engine
        return [each for each in engine.updates.groups.optimizers if not engine.stepping.steps_itself(each)]

    def boxes(self) -> Mapping[int, TensorSlice]:
        """The slices of parameters that are parts of larger ones, by id."""
        return self.builder.boxes_with(self.cut)

    @property
    def room(self) -> Path:
        """The folder for states that are carried over in files; visible to all ranks."""
        disks = self.builder.settings_here.disk_paths
        return disks[0] if disks and self.builder.place.nodes == 1 else Path(self.trainer.default_root_dir)

    def statistics(self) -> Statistics:
        """Bytes moved, waiting times and updates of this rank since the run began."""
        return together(self._counted, collect(self.engine))

    @contextmanager
    def gathered(self, *modules: nn.Module, write: bool = True) -> Iterator[None]:
        """Gathers full parameters for a while; see `AngelPTMStrategy.gathered`."""
        if self._engine is None:
            yield  # parameters are whole outside of pages
            return
        with self._engine.summon.gathered(modules or (self.module,), write=write):
            yield

    @contextmanager
    def _iteration(self, mode: Mode) -> Iterator[None]:
        """Context of one step of the Trainer."""
        tensor = self._tensor_group
        if tensor is not None:
            tensor.forget()
        with (
            self.engine.iteration(mode, manual=not self.module.automatic_optimization),
            nullcontext() if tensor is None else tensor.of_step(),
        ):
            yield

    def without_reduction(self) -> AbstractContextManager[None]:
        """Context without gradient reduction, as DDP's `no_sync`.

        Gradients accumulate on each rank, and are reduced by the next backward pass outside of the context, or by the
        step.
        """
        return self.engine.stepping.without_reduction()

    @contextmanager
    def trace_events(self, listener: Listener) -> Iterator[None]:
        """Reports events to a listener; see `AngelPTMStrategy.trace_events`."""
        engine = self.engine
        with engine.events.subscribed(listener):
            try:
                yield
            finally:
                collect(engine)  # reports the events of copies on CUDA streams, which are queried only on request

    # -- set-up -------------------------------------------------------------------------------------------------------

    def cut_module(self) -> None:
        """Replaces the module's parameters by this rank's slices, if `tensor_parallel_size` divides them."""
        groups = self.builder.groups
        if groups.tensor is not None and groups.made is not None and groups.grid is None:  # a grid's layers have blocks
            take_first_rank_s_values(self.module, groups.made.along((Axis.TENSOR,)), self.builder.place.backend)
            self.cut = self.builder.cut(groups.tensor)

    def lay_out(
        self,
        set_up: SetUp | None = None,
        *,
        given: Given | None = None,
        handed: PreviousState | None = None,
        checked: CheckedParameters | None = None,
    ) -> None:
        """Builds the engine and its pages. Collective.

        Args:
            set_up: the set-up that this ends; None for a re-layout in mid-run.
            given: the parameters' first values, where the module has none.
            handed: the parameters' first values, where they are in pages of the previous engine.
            checked: result of `Builder.check`.
        """
        builder, place = self.builder, self.builder.place
        folders.remove_stale(self.room)  # remains of killed runs
        if set_up is not None:
            set_up.wait()
        communicator = self.communicator = place.communicator(self._events)
        exchanging = self._exchanging(communicator)  # a collective, so before anything that can fail on one rank only
        self._stage_links = None
        if isinstance(communicator, ProcessGroupCommunicator) and Axis.STAGE in builder.mesh.axes:
            wraps = builder.settings.pipeline_schedule in SEVERAL_CHUNKS
            self._stage_links = StageLinks(communicator, builder.mesh, place.backend.device, wraps=wraps)
        engine = self._engine = builder.engine(
            communicator,
            self._events,
            self.cut,
            relayout=set_up is None,
            restored=None if set_up is None else set_up.restored,
            given=given,
            handed=handed,
            checked=checked,
            beside_bytes=self.device_budget.beside_bytes,
            least_bytes=self.device_budget.least_bytes,
            handlings=self.device_budget.handlings,
            # A checkpoint in progress has the weights before the edit.
            before_edits=self.saves.finish,
        )
        IN_PROGRESS.add(engine)
        self.device_budget.begin_layout(engine.blueprint.pool_bytes[Tier.DEVICE], engine.blueprint.device_limit_bytes)
        if exchanging:
            self._connect(exchanging, engine)
        self.interruption = Interruption(engine, self.module, self.saves)
        builder.between.begin(self.module)
        builder.precision.attach(engine, place.backend.name, wide_matmuls=bool(builder.between.wide_matmuls))
        for optimizer in self.paged_optimizers():
            index = engine.updates.groups.index_of(optimizer)
            guard(optimizer, engine.updates.groups.parameters_of(index), partial(engine.stepping.forget_states, index))

    def _exchanging(self, communicator: Communicator) -> dict[Axis | GridAxis, ProcessGroupCommunicator]:
        """Communicators for exchanges of activations, by axis. Collective."""
        if not isinstance(communicator, ProcessGroupCommunicator):
            return {}
        partitions = self.builder.groups.partitions(self.builder.mesh)
        return {axis: communicator.subgroup(ranks, exchanging=True) for axis, ranks in partitions.items()}

    def _connect(self, exchanging: Mapping[Axis | GridAxis, ProcessGroupCommunicator], engine: Engine) -> None:
        """Connects the module's parallel layers to the engine, which orders their exchanges."""
        mesh, groups = self.builder.mesh, self.builder.groups.by_axis
        index = mesh.index(engine.communicator.rank, tuple(groups))
        exchanges = ActivationExchange(exchanging, index, engine.barriers, engine.executor)
        one_loss = [axis for axis in groups if axis.one_loss]
        engine.barriers.compare(mesh.groups(groups), mesh.groups(one_loss) if one_loss else (), exchanges.done)
        engine.hooks.exchanges_with(exchanges)
        for group in self.builder.groups.exchanging:
            group.connect(exchanges)

    def watch(self, *, relayout: bool = False) -> None:
        """Installs the hooks of the run, and shows warnings about its configuration. Call it after Lightning has made its
        wrappers of the optimizers.

        Args:
            relayout: whether the run is laid out again; the machine is the same then.
        """
        builder, engine, trainer = self.builder, self.engine, self.trainer
        precision, fitting = builder.precision, self.fits
        scaled = precision.loss_scale is not None
        arm = partial(precision.arm, model=self.module)
        self._optimizer_steps = tuple(
            OptimizerStep(engine, optimizer, scaled=scaled, arm=arm) for optimizer in self.paged_optimizers()
        )
        self.steps = self._chosen_steps(relayout=relayout)
        lightning_hooks = self._lightning_hooks = LightningHooks(engine, lambda: self.steps.keeps_gradients)
        lightning_hooks.refuse_unknown_steps([plain_optimizer(each) for each in builder.optimizers])
        wrappers = wrapped_optimizers(trainer.strategy) if fitting else []
        for optimizer, wrapper in zip(builder.optimizers, wrappers, strict=True):
            lightning_hooks.zero_grad_of(optimizer, wrapper)
            lightning_hooks.state_dict_of(
                plain_optimizer(optimizer),
                wrapper,
                partial(gathering.optimizer_state, engine, keep=True),
            )
        if isinstance(self.communicator, ProcessGroupCommunicator):
            lightning_hooks.ranks(trainer, self.signals, self.communicator, self._meet, self._gather_for)
        else:
            lightning_hooks.one_rank(trainer, self.signals)
        lightning_hooks.exceptions(trainer)
        lightning_hooks.averaging(trainer, self.gathered)  # evaluations after a fit use its average, too
        if builder.groups.data is not None:
            groups, trainer = builder.groups, self.trainer
            lightning_hooks.metrics(self.module, lambda: groups.counted(None, evaluates=not trainer.training))
        if not relayout:
            warn_of_threads(builder.place.ranks_here)
        if builder.between.wide_matmuls:
            warn_of_wide_matmuls_uncompiled(self.module)
        if fitting:
            lightning_hooks.no_sync(self.module, self.without_reduction)
            lightning_hooks.pruning(trainer, self.gathered)
            lightning_hooks.links(trainer, self._link_checkpoint)
            if self.cut is not None:
                lightning_hooks.summaries(trainer, self.cut.boxes())
            lightning_hooks.finetuning(trainer)
            warn_of_gradients_in_pages(self.module, engine, precision)
            warn_of_recomputing_uncompiled(self.module, engine, builder.settings)

    def _chosen_steps(self, *, relayout: bool) -> BatchSteps:
        """Returns how the run computes batches. The settings refuse those of which two would divide them."""
        builder, module, backend = self.builder, self.module, self.builder.place.backend
        context, tensor = builder.groups.by_axis.get(Axis.CONTEXT), builder.groups.tensor
        if self._stage_links is not None:
            return PipelinedSteps(
                self._iteration,
                module,
                self.engine,
                builder.mesh,
                self._stage_links,
                builder.settings,
                builder.precision,
                backend,
                self._stage_checks,
                context,
                trains=self.fits,
            )
        if context is not None and self.fits:
            alone = nullcontext if self.engine.expert_groups is None else self.engine.expert_groups.alone
            way = builder.settings.context_parallel
            return DividedSteps(self._iteration, module, context, way, backend, alone=alone)
        if tensor is not None and self.fits and builder.settings.tensor_parallel.in_halves:
            if tensor.sums_at_once and not relayout:
                rank_zero_warn(SUMS_AT_ONCE)
            return TwoBatchSteps(self._iteration, module, tensor, self.engine, backend)
        return BatchSteps(self._iteration)

    def take_states(self) -> None:
        """Takes over the states that optimizers already have."""
        for optimizer in self.paged_optimizers():
            forget = optimizer_states.take_over_optimizer_state(self.engine, optimizer)
            if forget is not None:
                self._shown_states[optimizer] = forget
                renew(optimizer)

    def follow_loads(self, follow: Callable[[Optimizer, Mapping[str, Any]], None]) -> None:
        """Calls `follow` after each call of an optimizer's `load_state_dict`, from now on."""
        assert self._lightning_hooks is not None
        for optimizer in self.paged_optimizers():
            self._lightning_hooks.loads_of(optimizer, follow)

    def follow_loaded_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Handles a call of an optimizer's `load_state_dict` by a hook of the user."""
        forget_earlier = self._shown_states.pop(optimizer, None)
        if forget_earlier is not None:
            forget_earlier()
        self._shown_states[optimizer] = optimizer_states.follow_loaded_state(self.engine, optimizer, state)
        renew(optimizer)

    def load_states(self, states: Iterable[Any]) -> None:
        """Loads optimizer states of a checkpoint, by optimizer; there may be fewer than optimizers, or none."""
        self.forget_shown_states()
        for optimizer, state in zip(self.builder.optimizers, states, strict=False):
            forget = optimizer_states.load_optimizer_state(self.engine, optimizer, state)
            self._shown_states[plain_optimizer(optimizer)] = forget

    def forget_shown_states(self) -> None:
        """Removes states that are in pages from the optimizers' readable `state`."""
        while self._shown_states:
            self._shown_states.popitem()[1]()

    def restore_random_states(self, random_states: Any) -> None:
        """Restores the random states of a checkpoint, if a fit is resumed from it with the same number of data-parallel
        ranks."""
        # Loading the run's own checkpoint does not count as resuming (Lightning's tuners do that after their trials).
        resumed = self.trainer.state.fn is TrainerFn.FITTING and not self.engine.iterations
        place, mesh = self.builder.place, self.builder.mesh
        if resumed and len(random_states) == len(
            mesh.replicas
        ):  # with another number of replicas the data differ anyway
            randomness.restore(random_states[mesh.replica(place.rank)], place.backend)

    def log_where_states_are(self, *, relayout: bool = False) -> None:
        """Logs where model states are stored; called at the start, and after a re-layout."""
        name, engine = self.builder.name, self.engine
        if engine.blueprint.outside:
            rank_zero_info(
                f"{name} uses no pages: everything is in RAM, and parameters of the module are rearranged during the "
                "run"
            )
            return
        more = "" if relayout else in_first_line(engine, self.builder)
        more += f"; {self.builder.chosen}" * bool(self.builder.chosen)
        rank_zero_info(f"{name} keeps {states_in_words(engine)}{more}")
        if self.fits and self.builder.settings.tuning.restore_weights:
            ranks_here = self.builder.place.ranks_here
            warning = restore.prediction(engine, ranks_here=ranks_here, whole=self.cut is not None)
            if warning:
                rank_zero_warn(warning)
            self.foretold = bool(warning)
        paged = self.paged_optimizers()
        plain = map(plain_optimizer, self.builder.optimizers)
        themselves = sorted({type(optimizer).__name__ for optimizer in plain if optimizer not in paged})
        if themselves:
            rank_zero_info(
                f"{', '.join(themselves)}: unpaged, it updates the module's own tensors, and its states are in RAM"
            )

    # -- other ranks --------------------------------------------------------------------------------------------------

    @property
    def unsaved(self) -> str:
        """The reason why the run no longer writes checkpoints; empty while it does."""
        return self._cut_off or ("" if self.interruption is None else self.interruption.unsaved)

    @property
    def cut_off(self) -> bool:
        """Whether the run's states are lost."""
        return bool(self._cut_off)

    def lose_states(self, reason: str) -> None:
        """Marks the run's states as lost, for this reason."""
        self._cut_off = reason

    def settle(self) -> None:
        """Determines, after an interruption, whether all ranks have a common state."""
        if self.interruption is not None:
            self.interruption.settle()

    def cannot_wait(self) -> bool:
        """Whether the other ranks can no longer be waited for."""
        # Callbacks call collectives after an interruption of this rank, too.
        self.settle()
        failed = self._engine is not None and self._engine.barriers.failed
        return failed or bool(self.unsaved)

    def _meet(self, what: BarrierReason) -> None:
        if not self.cannot_wait():
            self.engine.barriers.meet(what)

    def _gather_for(self, gathering: Gathering) -> None:
        self.settle()
        self.engine.barriers.gather_for(gathering)

    def _any_rank_flags(self, flags: int) -> int:
        """The flags (two bits) that are set on any rank. Collective."""
        communicator = self.communicator
        if communicator is None or communicator.alone:
            return flags
        bits = torch.tensor([flags >> bit & 1 for bit in range(2)], dtype=torch.int64)
        return sum(int(flag) << bit for bit, flag in enumerate(communicator.all_reduce(bits, maximum=True)))

    def _link_checkpoint(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Replacement for ModelCheckpoint's method: with `save_last="link"` that links as soon as a save has begun, but the
        link must wait until the checkpoint is complete."""
        if not self.builder.place.rank and not self.unsaved and Path(filepath).absolute() != Path(linkpath).absolute():
            self.saves.link(Path(filepath), Path(linkpath), folders.link)

    def fail(self, exception: BaseException) -> bool:
        """Handles an exception of the run; returns whether the other ranks were notified, which needs the communicator."""
        for step in self._optimizer_steps:
            step.settle()
        if isinstance(exception, torch.OutOfMemoryError) and self._engine is not None:
            exception.add_note(self.device_budget.explain())
        if self._engine is not None:
            self._engine.fail(exception)
        elif self.communicator is not None:
            self.communicator.fail(one_line(exception))
        return self.communicator is not None

    # -- the end ------------------------------------------------------------------------------------------------------

    def leave(self, replaced: list[Optimizer]) -> None:
        """Removes everything that the run has installed in other objects (I1). The caller closes the engine and the
        communicator.

        Args:
            replaced: output list of the optimizers whose `state` the user has replaced.
        """

        def give_back_state(optimizer: Optimizer) -> None:
            if not unguard(optimizer):
                replaced.append(optimizer)

        paged, lightning_hooks, before_steps = self.paged_optimizers(), self._lightning_hooks, self._optimizer_steps
        self._engine = self.communicator = self._lightning_hooks = self.interruption = None
        self._optimizer_steps = ()
        batch_steps, self.steps = self.steps, BatchSteps(self._iteration)
        self._stage_links = None
        with ExitStack() as steps:  # last in, first out
            steps.callback(batch_steps.close)
            steps.callback(self.builder.precision.attach, None)
            for each in before_steps:
                steps.callback(each.close)
            if lightning_hooks is not None:
                steps.callback(lightning_hooks.undo)
            for optimizer in reversed(paged):
                steps.callback(give_back_state, optimizer)
            steps.callback(self.forget_shown_states)

    def disconnect(self) -> None:
        """Disconnects the module's parallel layers from the engine."""
        for group in self.builder.groups.exchanging:
            group.connect(None)

    def uncut(self, whole: Callable[[Tensor, TensorSlice], Tensor] | None = None) -> None:
        """Makes the module's parameters whole again, if this run has sliced them.

        Args:
            whole: joins the slices, collectively; None: parameters have no values afterwards.
        """
        if self.cut is not None:
            self.cut.undo(whole)
            self.cut = None

    def close_without_pages(self) -> None:
        """Ends a run without pages, after its set-up or a re-layout has failed."""
        self.disconnect()
        communicator, self.communicator = self.communicator, None
        with ExitStack() as steps:
            steps.callback(self.uncut)
            if communicator is not None:
                steps.callback(communicator.close)
            self.forget_shown_states()

    def continue_statistics(self, counted: Statistics) -> None:
        """Continues the statistics from before a re-layout."""
        self._counted = counted
