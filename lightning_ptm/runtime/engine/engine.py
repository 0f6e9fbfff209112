"""Engine of one rank's run: builds all parts of the runtime from a blueprint, and runs iterations and backward passes.

Owns the allocator, the updater and every part, from `Engine(...)` to `close()`. The parts decide and act; the engine
creates and connects them, and begins and ends iterations and backward passes. The strategy calls the engine only.

I1: between iterations no unit is gathered that an update will change.
I2: `close` leaves no thread, file or hook, whatever failed before; nor does a failed set-up, at any point.
I3: after set-up, the pages in use in every tier are exactly those of the inventory's rows.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.comm import Communicator, Communicators, Gathering, RankTeams
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.config import Slices
from lightning_ptm.errors import UsageError, one_line
from lightning_ptm.events import Events
from lightning_ptm.memory.activation_buffers import ActivationMover
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import Backend, in_ram
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.planning.inventory import What
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.planning.plan_table import render
from lightning_ptm.planning.trace import forward_trace
from lightning_ptm.planning.update_order import read_ahead
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.autograd.backward_actions import BackwardActions
from lightning_ptm.runtime.autograd.hooks import Hooks
from lightning_ptm.runtime.autograd.recompute import recomputed_units
from lightning_ptm.runtime.autograd.slices import slices_of
from lightning_ptm.runtime.autograd.stage_cut import StageCut
from lightning_ptm.runtime.autograd.token_slices import token_slices_of
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.build_inventory import taken_dtype
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.deciding.planner import Planner, check_layout
from lightning_ptm.runtime.engine.activation_peak import ActivationPeak
from lightning_ptm.runtime.engine.module_changes import KnownParameters, ModuleChanges
from lightning_ptm.runtime.engine.predicted_memory import gradients_beside
from lightning_ptm.runtime.engine.set_up import (
    RunPages,
    activation_store,
    check_taken,
    update_scheduler,
    write_initial_values,
)
from lightning_ptm.runtime.engine.step_gradients import StepGradients
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.fetching.tracer import Tracer
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.full_params.gathered_parameters import GatheredParameters, SummonFullParams, note, trained_in
from lightning_ptm.runtime.full_params.optimizer_values import OptimizerValues
from lightning_ptm.runtime.full_params.parameter_values import ParameterValues
from lightning_ptm.runtime.full_params.sharded_states import AllShardedStates
from lightning_ptm.runtime.full_params.snapshot import Snapshots
from lightning_ptm.runtime.full_params.state_dicts import StateDicts
from lightning_ptm.runtime.machine.heap import SETTING_UP, Heap
from lightning_ptm.runtime.ranks.barriers import ANY_REASON, STEP_ENDS, BarrierReason, Barriers
from lightning_ptm.runtime.ranks.experts import ExpertGroups
from lightning_ptm.runtime.ranks.module_buffers import ModuleBuffers
from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.relayout.reused_tensors import ReusedTensors, reused_tensors
from lightning_ptm.runtime.tensors.device_moves import move_buffers_and_metrics
from lightning_ptm.runtime.units.binding import FlatBinding
from lightning_ptm.runtime.units.parameter_guard import DIVIDED_IN_A_RUN
from lightning_ptm.runtime.updates.clipping import Clipping
from lightning_ptm.runtime.updates.reduction import Reduction
from lightning_ptm.runtime.updates.updates import UpdateScheduler
from lightning_ptm.terms import Mode, Operation, Phase, Tier
from lightning_ptm.update.updater import Updater

_TRACES = 1
"""Flag that ranks exchange at an iteration's barrier: the iteration will be traced."""

_CHANGED_BUFFERS = 256
"""Flag that ranks exchange at an iteration's barrier: module buffers may differ from those of rank 0."""


_REASON_CHARACTERS = 500
"""Largest length of an error text that is sent to other ranks."""


def _precise_bytes(flat: FlatLayout, with_other_parts: bool) -> int:
    return flat.numel * (8 if flat.dtype == "float64" else 4) * (flat.parts if with_other_parts else 1)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunInputs:
    """Inputs of a run to its engine besides the module, the decisions and the communicators.

    Attributes:
        backend: this rank's device.
        optimizers: the user's optimizers, in order; empty without training.
        disk_paths: folders of the disk tier.
        root: folder for temporary files where there is no disk tier.
        recompute: activation checkpointing of every k-th unit; 0 for none.
        slices: the setting `slices`.
        handlings: what becomes of activations, by unit, where the run chooses; others are kept. None: they are chosen anew.
        ranks_here: number of ranks that share this machine's RAM.
        given: initial values that files provide, equal on all ranks.
        handed: model states of the engine that this one replaces (re-layout), used in place of initial values.
        before_edits: callback before the user edits gathered weights.
        number_of_step: returns the number of the present or next optimizer step, where there were steps before this run.
        events: receiver of events with their times.
        progress: progress bars of long operations.
        poison: whether freed pages are filled with NaN.
        file_ops: file calls of the disk tier, replaceable for tests of failing disks.
    """

    backend: Backend
    optimizers: Sequence[Optimizer] = ()
    disk_paths: Sequence[Path] = ()
    root: Path | None = None
    recompute: int = 0
    slices: Slices = 1
    handlings: Mapping[int, Handling] | None = None
    ranks_here: int = 1
    given: Given = dataclasses.field(default_factory=Given)
    handed: PreviousState | None = None
    before_edits: Callable[[], None] | None = None
    number_of_step: Callable[[], int] | None = None
    events: Events = dataclasses.field(default_factory=Events)
    progress: Progress = dataclasses.field(default_factory=lambda: Progress(shown=False))
    poison: bool = False
    file_ops: FileOps | None = None


def _stage_cut(blueprint: Blueprint, rank: int, backend: Backend) -> StageCut | None:
    """Returns the cut of the module into pipeline stages; None if each rank computes all blocks."""
    holders = blueprint.holders
    if not holders.in_stages:
        return None
    mesh = holders.mesh
    return StageCut(blueprint.units, holders.stage_runs, mesh.stage(rank), mesh.sizes[Axis.STAGE], backend)


IN_PROGRESS: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines of all runs in progress in this process, of Trainers of either package."""


class Engine:
    """Runtime of one rank.

    Args:
        module: the LightningModule; its parameters become views of pages.
        blueprint: decisions of the run.
        inputs: what else the run provides.
    """

    def __init__(
        self, module: nn.Module, blueprint: Blueprint, communicators: Communicators, inputs: RunInputs
    ) -> None:
        self.module = module
        self.blueprint = blueprint
        self.communicators = communicators
        self.communicator = communicators.world
        self.backend = inputs.backend
        self.device = inputs.backend.device
        self.events = inputs.events
        self.disk_paths = tuple(inputs.disk_paths)
        self.folders = self.disk_paths or (() if inputs.root is None else (inputs.root,))
        """Folders for temporary files of data that does not fit into RAM."""
        self.bars = inputs.progress
        self._ranks_here = inputs.ranks_here
        self._optimizers = tuple(inputs.optimizers)
        holders = blueprint.holders
        teams = RankTeams(holders=holders.ranks_by_unit) if blueprint.experts is None else blueprint.experts.teams
        self.barriers = Barriers(self.communicator, self._take_part, teams)
        self._pages_stay = False
        self._closed = False
        self.iterations = 0
        """Number of iterations begun so far; read by other classes."""
        self._manual = False
        self._loss: Tensor | None = None
        """Loss of the last backward pass, where the ranks of a tensor-parallel group compare it."""
        self.save_stall_s = 0.0
        """Seconds that compute has waited for checkpoints."""
        self.expert_groups: ExpertGroups | None = None
        self._known = KnownParameters(module, inputs.optimizers)
        self._taken_over = False
        self._undo = ExitStack()
        """Callbacks that close the parts created so far, last one first; each runs even if others raise."""
        self.heap = None
        if not self.backend.has_own_memory:
            self.heap = Heap(
                blueprint.freed_memory,
                ranks_here=inputs.ranks_here,
                pending_page_bytes=lambda: self.allocator.uncommitted_bytes() if self._taken_over else 0,
                follows=inputs.handed is not None,
            )
            self._undo.callback(self.heap.close)
        try:
            with nullcontext() if self.heap is None else self.heap.explain_failures(SETTING_UP):
                self._build(inputs)
        except BaseException:
            with self._undo:
                # A failed set-up must not leave the module with parameters without values.
                if self._taken_over and self.communicator.alone:
                    self.gathered_parameters.restore()
            raise

    def add_save_stall(self, seconds: float) -> None:
        """Adds to the seconds that compute has waited for checkpoints."""
        self.save_stall_s += seconds

    def _build(self, inputs: RunInputs) -> None:
        items = [item for unit in self.blueprint.units for item in unit.parameters]
        with torch.DisableTorchFunctionSubclass():  # parameters may be closed
            frozen = [item for item in items if not item.parameter.requires_grad]
        self.stream = ComputeStream(self.backend)
        pages = self._take_pages(inputs)
        pages.take_gradient_pages()
        self.flats = tuple(pages.flats(store) for store in self.stores)
        self._all_flats = tuple(flat for flats in self.flats for flat in flats)
        self._bindings = tuple(binding for store in self.stores for binding in store.bindings)
        self._lay_values(inputs)
        self._prepare_updates(pages, inputs)
        self._prepare_steps(inputs.recompute, inputs.slices, inputs.handlings)
        blueprint, updates, gathered_parameters = self.blueprint, self.updates, self.gathered_parameters
        self.changes: ModuleChanges = ModuleChanges(
            blueprint,
            self._known,
            frozen,
            self._optimizers,
            self.stores,
            self.flats,
            gathered_parameters,
            updates,
            self.module,
        )
        self.stepping: StepGradients = StepGradients(
            blueprint,
            self.flats,
            self.executor,
            self.reduction,
            self.clipping,
            updates,
            self.barriers,
            self.backwards,
            self.changes,
            gathered_parameters,
            self._check_open,
            self.stream,
        )
        self.summon: SummonFullParams = SummonFullParams(
            self.module,
            blueprint,
            self.stores,
            self.values,
            gathered_parameters,
            self.barriers,
            self._known.changed,
            self._settle,
            ranks_here=inputs.ranks_here,
            before_edits=inputs.before_edits,
        )
        divided = blueprint.holders.in_parts or bool(blueprint.holders.by_unit)
        self.state_dicts: StateDicts = StateDicts(
            self.summon.not_always_readable(),
            list(self.module.modules()),
            self.summon.readable,
            self.summon.writable,
            uncopied=DIVIDED_IN_A_RUN if divided else "",
        )
        self._undo.callback(self.state_dicts.close)
        if blueprint.experts is not None:
            group, expect = self.communicators.along((Axis.EXPERT,)), self.executor.expect
            self.expert_groups = ExpertGroups(blueprint.experts, group, self.barriers.agreement, expect)
            self._undo.callback(self.expert_groups.close)
        updates.start()

    def _take_pages(self, inputs: RunInputs) -> RunPages:
        blueprint = self.blueprint
        check_layout(blueprint.layout, self.communicator)
        kept = ReusedTensors()
        if inputs.handed is not None:
            kept = reused_tensors(blueprint, inputs.handed, self._optimizers, self.disk_paths)
        more = {tier: pages * blueprint.layout.page_size for tier, pages in kept.more_pages.items()}
        self._pages_between = kept.more_pages_at_once
        self.allocator = Allocator(
            page_size=blueprint.layout.page_size,
            backend=self.backend,
            sizes={tier: size + more.get(tier, 0) for tier, size in blueprint.pool_bytes.items()},
            disk_paths=self.disk_paths,
            pin_host=True,
            pin_later=inputs.handed is not None,
            poison=inputs.poison,
            file_ops=inputs.file_ops,
            events=self.events,
            progress=self.bars,
            uses=lambda tier: blueprint.inventory.in_words(tier, blueprint.unified),
            name_of=blueprint.name_of,
            reused_extents=kept.reused_extents,
        )
        self._undo.callback(self._close_pages)
        pages = RunPages(
            blueprint,
            self.allocator,
            self.communicators,
            self.device,
            kept,
            self.stream,
            checks_all=inputs.poison,
            # Gradients are made before the parts that they call in a step.
            finish_update=lambda unit: self.updates.finish(unit),
            advance_updates=lambda: self.updates.make_room(),
            evict_idle_unit=lambda: self.executor.fetching.evict_farthest(),
            frame_of_gradient=lambda flat, pages: self.executor.fetching.plan_cursor.gradient_frame(flat, pages),
            evict_ended=lambda: self.executor.fetching.evict_ended(),
        )
        self._views = pages.views
        self._in_flight = pages.in_flight
        self.stores = tuple(pages.store(index) for index in range(len(blueprint.units)))
        self.updater = Updater(
            self.allocator,
            device_block_numel=blueprint.device_block_numel,
            staging=blueprint.staging_chunks,
            staging_tier=blueprint.placement.staging_tier,
            # Lock-free updates pass versions and gradients to compute without synchronisation, so that all use one stream.
            stream=self.backend.stream() if blueprint.lock_free is None else None,
            events=self.events,
        )
        self._undo.callback(self.updater.close)
        return pages

    def _lay_values(self, inputs: RunInputs) -> None:
        """Writes the initial values into the pages."""
        blueprint = self.blueprint
        self.gathered_flats: GatheredFlats = GatheredFlats(
            self.allocator, self.communicators, self.stores, self.flats, blueprint.holders
        )
        self.values: ParameterValues = ParameterValues(self.gathered_flats, self.bars, mixed=blueprint.mixed)
        self.optimizer_values: OptimizerValues = OptimizerValues(self.gathered_flats, self.bars)
        self.sharded_kinds = AllShardedStates(self.gathered_flats, self.optimizer_values, self.values.original_of)
        trained = (binding for binding in self.gathered_flats.bindings if binding.layout.trainable)
        note(self.module, {id(parameter) for binding in trained for parameter in binding.parameters})
        self.gathered_parameters: GatheredParameters = GatheredParameters(
            self.gathered_flats, self.values, trained_in(self.module)
        )
        trains = bool(self._optimizers)
        write_initial_values(
            self.module,
            inputs.given,
            blueprint,
            self.stores,
            self.values,
            trains=trains,
            precise_bytes=self.precise_bytes(),
            handed=inputs.handed,
        )
        move_buffers_and_metrics(self.module, self.device)
        self._module_buffers = None
        if not self.communicator.alone:
            self._module_buffers = ModuleBuffers(self.module, self.communicator, trains=trains)
            self._module_buffers.follow_rank_0()
        self._taken_over = True

    def _prepare_updates(self, pages: RunPages, inputs: RunInputs) -> None:
        """Creates what allocates the remaining pages, and the parts that run updates."""
        blueprint = self.blueprint
        for flat in self._all_flats:
            if flat.gradient.route.waits is Waits.KEPT:
                flat.gradient.reserve()
        for row in blueprint.inventory.of(What.STAGING):
            self.updater.take_staging(row.tier, taken_dtype(row), row.count, row.numel)
        save_sizes = [(taken_dtype(row), row.numel) for row in blueprint.save_rows]
        save_buffers = pages.buffers_for_saves() if blueprint.saves_in_background else None
        self.snapshots = Snapshots(self.allocator, self.updater, save_buffers, save_sizes, self._settle)
        self.updates: UpdateScheduler = update_scheduler(
            blueprint,
            self.backend,
            pages,
            self.stores,
            self.flats,
            self._optimizers,
            self.updater,
            inputs.number_of_step,
        )
        self._undo.callback(self.updates.close)
        staging = pages.activation_staging()
        self._activation_stores = {}
        for tier in self._activation_tiers(inputs.handlings):
            store = activation_store(
                tier, blueprint, self.backend, staging, self.disk_paths, inputs.file_ops, self.events
            )
            self._activation_stores[tier] = store
            self._undo.callback(store.close)
        check_taken(blueprint, self.allocator, self._pages_between)
        states = {flat.store.layout.index: flat.states for flat in self._all_flats}
        self._read_ahead = [
            states[flat.index]
            for flat in read_ahead(blueprint.layout, blueprint.placement)
            if flat.unit not in blueprint.by_need
            and (home := states[flat.index].home()) is not None
            and not home.updates
        ]
        self.clipping: Clipping = Clipping(self.communicator, self.updates, self._optimizers)
        self.reduction: Reduction = Reduction(
            self.flats,
            self.barriers.agreement,
            self._in_flight,
            lambda: self.executor.fetching.evict_farthest(),
            updates_begin=lambda: self.backwards.starts_updates,
            called=lambda unit: self.stores[unit].resident or self.executor.called(unit),
            begin_update=self.updates.unit_ready,
        )

    def _activation_tiers(self, handlings: Mapping[int, Handling] | None) -> tuple[Tier, ...]:
        """Returns the tiers that activations are, or may be, offloaded to in this layout."""
        tiers = self.blueprint.activation_tiers
        if handlings is None or any(each.tier is not None for each in handlings.values()):
            return tiers  # what the tier of a handling has no room for goes to the next one
        return tuple(tier for tier in tiers if tier is self.blueprint.activations_to)

    def _prepare_steps(self, recompute: int, wanted_slices: Slices, handlings: Mapping[int, Handling] | None) -> None:
        """Creates the executor, which follows plans, and the hooks on the module's forward and backward."""
        blueprint = self.blueprint
        planner = Planner(blueprint, self.communicators.along(blueprint.holders.sharding_axes), self.communicator.rank)
        beside = partial(self.backend.bytes_outside_region, blueprint.pool_bytes[Tier.DEVICE])
        self.tracer = Tracer(blueprint.units, beside, self.backend)
        self.activation_peak = ActivationPeak(
            self.backend, blueprint.pool_bytes[Tier.DEVICE], gradients_beside(blueprint), self.flats
        )
        self.executor: Executor = Executor(
            self.stores,
            self.tracer,
            self.barriers.agreement,
            self.updates.pending,
            self.updates.finish,
            self.updates.finish_between_steps,
            planner.replan,
            self.gathered_flats.read,
            self._in_flight.release,
            self.events,
            self._used_bytes,
            blueprint.by_need,
            one_way=self.backend.has_own_memory,
            at_tick=self.activation_peak.tick if self.heap is None else self.heap.within_step,
        )
        self._undo.callback(self.executor.abandon)
        trace = blueprint.planned(blueprint.trace)
        mode = Mode.TRAIN if self._optimizers else Mode.FORWARD
        self.executor.plans.adopt(mode, planner.plan(mode, trace), trace)
        if mode is Mode.TRAIN:
            self.executor.plans.plan_later(Mode.FORWARD, blueprint.planned(forward_trace(blueprint.layout)))
        self.offload = self.activation_policy = None
        chooses = bool(blueprint.activation_handlings) and (handlings is None or bool(handlings))
        room = self._activation_room() if chooses else None
        if self._activation_stores:
            self.offload = offload.Offload(
                {tier: ActivationMover(self.backend, store) for tier, store in self._activation_stores.items()},
                self.backend,
                self.stream,
                self.module.modules(),
                self.allocator.holds,
                least_bytes=offload.LEAST_BYTES,
                spills=chooses,
                left_bytes=self.heap.left_bytes if self.heap is not None else room or (lambda: None),
                # On a device, memory at a tick should not depend on the time of copies: the budget follows its peak.
                frees_early=self.heap is not None,
            )
            self._undo.callback(self.offload.close)
        if room is not None:
            self.activation_policy = ActivationPolicy(
                blueprint.activation_handlings,
                room,
                self.offload,
                device_done=self._device_done if self.backend.has_own_memory else None,
                given=handlings,
            )
        for flat in self._all_flats:
            self._undo.callback(flat.gradient.view.make_plain)
        self._undo.callback(self._in_flight.end_additions)
        self.backwards: BackwardActions = BackwardActions(
            blueprint.units,
            self.stores,
            self.flats,
            self.executor,
            self.reduction,
            self.updates,
            self.barriers,
            alone=self.communicator.alone,
            watch=self.activation_peak if self.backend.has_own_memory else None,
        )
        self.stage_cut = _stage_cut(blueprint, self.communicator.rank, self.backend)
        slices = slices_of(blueprint.units, wanted_slices, blueprint.experts)
        self.hooks: Hooks = Hooks(
            blueprint.units,
            self.stores,
            self.executor,
            self.backwards,
            recomputed_units(len(blueprint.units), recompute, slices),
            self.stream,
            self._views,
            self.offload,
            self.activation_policy,
            self.stage_cut,
            slices,
            token_slices_of(blueprint.units, wanted_slices, blueprint.experts),
        )
        self._undo.callback(self.hooks.close)

    def _activation_room(self) -> Callable[[], int]:
        """Returns a function that gives the bytes that activations may still take on the device: on a CPU, RAM."""
        backend, heap = self.backend, self.heap
        if heap is not None:
            return lambda: heap.free_bytes() // self._ranks_here
        outside = partial(backend.bytes_outside_region, self.blueprint.pool_bytes[Tier.DEVICE])
        whole = backend.free_bytes() + outside()
        return lambda: whole - outside()

    def _device_done(self) -> None:
        self.backend.mark().synchronize()

    # -- iterations ---------------------------------------------------------------------------------------------------

    @contextmanager
    def iteration(self, mode: Mode, *, manual: bool = False) -> Iterator[None]:
        """Context of one training, validation, test or predict step.

        Args:
            mode: TRAIN if a backward may follow; the iteration then ends when the next one begins.
            manual: whether the step itself calls backward passes (manual optimization).
        """
        self._check_open()
        self.stream.begin()
        self.iterations += 1
        if not self.barriers.alone:
            self.barriers.iteration_begins()
        self.backwards.iteration_begins()
        if self.activation_peak.by_tick:
            self.activation_peak.begin_iteration(counts=mode is Mode.TRAIN and not manual)
        computes_only = mode is Mode.FORWARD and self.blueprint.may_be_outside
        for binding in self._bindings:
            binding.check(computes_only=computes_only)
        if self.values.unknown:
            self.values.check_known()
        self.updates.check_stepped()
        if mode is Mode.TRAIN:
            self.changes.check_frozen()
        if self.heap is not None:
            self.heap.between_steps()
        self.updates.settle_first()
        self.updates.begin_iteration(training=mode is Mode.TRAIN)
        if mode is Mode.TRAIN and self._read_ahead:
            # States that the first updates of the backward need are read from disk during the forward.
            self.updater.prefetch(self._read_ahead)
        flags = _TRACES if self.executor.wants_trace(mode) else 0
        if self._module_buffers is not None and self.stage_cut is not None:
            self._module_buffers.check_unchanged()
        if self._module_buffers is not None and self._module_buffers.changed():
            flags |= _CHANGED_BUFFERS
        if self.barriers.alone:
            seen, together = flags, True
        elif mode is Mode.TRAIN:
            action = self.barriers.record_hyper_parameters(self._hyper_parameters())
            seen, together = self.barriers.come_together(BarrierReason.TRAINING_STEP, action, flags), True
        else:
            seen = self.barriers.reach(0, flags)
            together = not seen & ANY_REASON  # else some ranks have no further batch
        if self._module_buffers is not None:
            if together and seen & _CHANGED_BUFFERS:
                self._module_buffers.follow_rank_0()
            # As DDP does after a forward whose gradients are reduced. With manual optimization, DDP treats the whole step as
            # a forward, and Lightning tells it that no gradients will follow.
            reduced = mode is Mode.TRAIN and not self.stepping.adds_up and not manual
            self._module_buffers.iteration_begins(compare_next=reduced)
            self._manual = manual
        # All ranks of this iteration end the one before, and re-plan, together (executor I3).
        self.executor.begin(mode, trace=together and bool(seen & _TRACES), all_ranks=together)
        self.hooks.begin_iteration()
        self.executor.guard_policy.computation_begins(Phase.FORWARD)
        with self._in_stage():
            self.executor.enter_root()
            try:
                with self.backwards.step(), self.hooks.step():
                    yield
            except BaseException as error:
                try:
                    self.explain(error, "the step")
                finally:
                    self.abandon()
                raise
            finally:
                self.executor.guard_policy.computation_ends(Phase.FORWARD)
        if mode is Mode.FORWARD:
            seen = self.barriers.reach(STEP_ENDS)
            # A rank that waits at another barrier would not take part in a new plan.
            self.executor.end(all_ranks=not seen & ANY_REASON)

    @contextmanager
    def further_forward(self) -> Iterator[None]:
        """Context of a further forward of the last iteration, after `iteration` was left and before its backward."""
        self._check_open()
        self.stream.begin()
        self.executor.guard_policy.computation_begins(Phase.FORWARD)
        try:
            with self.backwards.step(), self.hooks.step():
                yield
        except BaseException as error:
            try:
                self.explain(error, "the forward")
            finally:
                self.abandon()
            raise
        finally:
            self.executor.guard_policy.computation_ends(Phase.FORWARD)

    def _hyper_parameters(self) -> dict[str, str]:
        """Returns the optimizers' hyper-parameters by name, without tensors on a device, which the host would wait for."""
        return {
            f"{name} of group {at} of {type(optimizer).__name__}": repr(
                value.tolist() if isinstance(value, Tensor) else value
            )
            for optimizer in self._optimizers
            for at, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, (bool, int, float, tuple)) or (isinstance(value, Tensor) and in_ram(value))
        }

    @contextmanager
    def _in_stage(self) -> Iterator[None]:
        """Context of a step's forwards and backwards: with pipeline stages, rounds are those of this rank's stage.

        P1: the root, which all ranks share, is gathered before, in rounds of all ranks, and a boundary of all follows; what
            the plan fetches at the root's tick, and later, is fetched in rounds of the stage. A rank that still asked all
            ranks for one of its stage's units would wait for ranks that listen to their stage alone.
        P2: inside, the root is neither gathered (a reference keeps it) nor reduced (its gradients wait for the step).
        P4: the context ends with a boundary of the stage, so that none of its ranks needs one that listens to all again.
        """
        if self.stage_cut is None:
            yield
            return
        mesh, rank = self.blueprint.holders.mesh, self.communicator.rank
        axes = self.blueprint.holders.sharding_axes
        self.executor.hold(0)
        self.barriers.come_together(BarrierReason.PIPELINE)
        ranks = mesh.groups(axes)[mesh.index(rank, axes)]
        with self.barriers.within(self.communicators.along(axes), ranks, (0,)):
            self.executor.use(0)
            yield
            self.executor.leave(0)
            self.barriers.reach(STEP_ENDS // 2)
        self.executor.keep_held(0, held=False)

    def meet_stage(self, number: int) -> None:
        """Waits for the ranks of this rank's stage before it waits for another stage's hidden states (P3).

        A rank that waits for them joins no round. After this, none of its stage needs it in one until the next occasion.

        Args:
            number: of the receive within a step; the same on all of them.
        """
        stage = self.communicators.along(self.blueprint.holders.sharding_axes)
        if not stage.alone:
            self.barriers.gather_for(Gathering(number, stage.world_size))

    def abandon(self) -> None:
        """Discards an iteration that an error has interrupted: its gathers, and the contexts of its hooks."""
        self.hooks.abandon()
        self.executor.abandon()
        self.updates.abandon()
        self.reduction.forget()
        self.backwards.abandon()

    @contextmanager
    def backward(self, *, by_user: bool = False) -> Iterator[None]:
        """Context in which the strategy runs a backward pass of the loss.

        Args:
            by_user: whether a method of the user runs the pass, which may read and edit gradients after it.

        Raises:
            UsageError: the pass would add to gradients that a step has used and overwritten.
        """
        for flat in self._all_flats:
            flat.gradient.view.check_forgotten()
        if self._manual and not self.backwards.in_step and self._module_buffers is not None:
            self._module_buffers.backward_outside(reduced=not self.stepping.adds_up)
        of_the_loss = nullcontext() if by_user else self.backwards.of_the_loss()
        try:
            with of_the_loss, self.hooks.backward(by_user=by_user):
                yield
        except BaseException as error:
            self.explain(error, "the backward pass")
            raise

    def explain(self, error: BaseException, doing: str) -> None:
        """Raises a CapacityError in place of an error of `doing` that is a lack of RAM; see `Heap.refused`."""
        refused = None if self.heap is None else self.heap.refused(error, doing)
        if refused is not None:
            raise refused from error

    def loss_is(self, loss: Tensor) -> None:
        """Records the loss of the backward pass that begins: ranks of a tensor-parallel group compare it at the next
        barrier. On a separate device they compare the previous loss, for which the host need not wait."""
        if self.barriers.agreement.same_loss and loss.numel() == 1:
            before, self._loss = self._loss, loss.detach()
            compared = before if self.backend.has_own_memory else self._loss
            if compared is not None:
                self.barriers.record_loss(float(compared))

    @on_compute_stream
    def _take_part(self, decision: Decision) -> None:
        if decision.request.operation is Operation.GATHER:
            self.executor.take_part(decision.request.unit)
        else:
            self.reduction.take_part(decision)

    def fail(self, error: BaseException) -> None:
        """Ends the run on this rank after an error: reports it to the other ranks, and runs no further collectives."""
        self.barriers.fail(one_line(error)[:_REASON_CHARACTERS])
        self.abandon()

    # -- between iterations -------------------------------------------------------------------------------------------

    def drain(self, action: str = "drain", *, at_end: bool = False) -> None:
        """Blocks until every update is in the compute parameters and in the homes, on all ranks. Collective.

        Args:
            action: what the caller is about to do, compared over ranks and named in errors; see `Barriers`.
            at_end: whether the run is over and its caller checks for lost writes.

        Raises:
            UsageError: the user has written to a copy of a parameter, so that what follows would use the old values.
        """
        self.stream.begin()  # what follows reads and writes pages on the caller's stream
        if not at_end:
            self.updates.check_before_updates(f"read or write weights or states ({action})")
            self.gathered_parameters.check_written()
        self.updates.finish_all()
        for store in self.stores:
            for flat in store.flats:
                flat.await_reads()
        self.barriers.come_together(BarrierReason.USER_CALL, action)

    @property
    def update_failed(self) -> bool:
        """Whether an update has raised, so that parameters may be a mix of two steps and must not be saved."""
        return self.updater.failed

    def stop_updates(self) -> None:
        """Stops all updates after one has failed. The master weights in pages can then be read; each element is that of the
        failed step or of the step before."""
        self.stream.begin()
        self.updates.close()
        self.updater.close()
        for store in self.stores:
            for flat in store.flats:
                flat.await_reads()

    def _settle(self, action: str) -> None:
        """Drains updates and releases all units, on all ranks (I1). Collective."""
        self.drain(action)
        self.executor.release_all()

    @property
    def with_other_parts(self) -> Communicator:
        """Communicator of the ranks with the other slices of this rank's parameters (tensor parallelism), in their order."""
        return self.communicators.along((Axis.TENSOR,))

    def precise_bytes(self, *, with_other_parts: bool = False) -> int:
        """Returns the bytes of all weights outside pages, in their most precise dtype.

        Args:
            with_other_parts: whether to count whole parameters where this rank has slices.
        """
        return sum(_precise_bytes(flat, with_other_parts) for flat in self.blueprint.layout.all_flats())

    def precise_bytes_of(self, bindings: Iterable[FlatBinding], *, with_other_parts: bool = False) -> int:
        """Returns the bytes of some flats' precise values; see `precise_bytes`."""
        return sum(_precise_bytes(binding.layout, with_other_parts) for binding in bindings)

    def optimizer_state_bytes(self, *, on_disk: bool) -> int:
        """Returns the bytes of all ranks' optimizer states, without master weights, whose home is on disk, or in memory."""
        return sum(
            flat.states.bytes_of_ranks(self.communicator.world_size)
            for flat in self._all_flats
            if self.blueprint.placement.homes[flat.store.layout.unit].master.addressable != on_disk
        )

    def bytes_to_ram(self) -> int:
        """Returns the bytes of RAM that model states take in addition while they are handed on (`hand_on`): those of the
        device's pages, and of pages in RAM whose locks cannot end."""
        backend = self.backend
        if not backend.has_own_memory:
            return 0
        tiers = [Tier.DEVICE] if backend.page_locks is not None else [Tier.DEVICE, Tier.HOST]
        kinds = (What.PARAMETERS, What.MASTERS, What.STATES)
        return sum(self.blueprint.inventory.by_what(tier).get(what, 0) for tier in tiers for what in kinds)

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan_text(self, mode: Mode = Mode.TRAIN) -> str:
        """Returns the present plan as a table."""
        made = self.executor.plans.planned(mode)
        return render(made[0], self.blueprint.layout) if made is not None else "(fetch on use: no plan)"

    def _used_bytes(self) -> tuple[int, ...]:
        return tuple(
            self.allocator.capacity_bytes(tier) - self.allocator.free_bytes(tier)
            for tier in self.blueprint.reported_tiers
        )

    # -- end ----------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Removes hooks, stops threads, frees pages. Parameters stay as they are; see `GatheredParameters.restore`."""
        if self._closed:
            return
        self._closed = True
        self._undo.close()

    def hand_on(self) -> PreviousState:
        """Returns the model states in their pages for the next engine, to whom the pages then belong: `close` no longer frees
        them. Updates must be drained, and only `close` may follow. Collective where ranks own parameters."""
        handed = PreviousState(
            self.gathered_flats,
            optimizers=self.updates.groups.optimizers,
            scalars=self.optimizer_values.scalars(),
            originals=self.values.pop_originals(),
            of_files=self.values.of_files,
            disk_paths=self.disk_paths,
        )
        self._pages_stay = True
        return handed

    def _close_pages(self) -> None:
        if not self._pages_stay:
            self.allocator.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this run has ended and its pages are freed; start a new fit, validate, test or predict")
