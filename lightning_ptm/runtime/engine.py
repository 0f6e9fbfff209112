"""Builds the runtime of one run from a blueprint, connects its parts, and is what the strategy talks to.

Owns the allocator, the updater and every part below, from `Engine(...)` to `close()`. The parts decide and act; the
engine passes events on: iterations, backward passes, optimizer steps.

I1: between iterations nothing is gathered that an update will change. I2: `close` leaves no thread, file or hook behind,
whatever failed before; nor does a set-up that fails, however far it has come. I3: when set-up has ended, pages are taken for
the rows of the inventory and for nothing else, in every tier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.comm import Communicator, Communicators, Teams, together
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.comm.behind import Channel
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CapacityError, InternalError, RankError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.memory import Allocator, FileOps
from lightning_ptm.memory.activations import HostBuffers, Mover
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.streams import ComputeStream, copy_streams, on_compute_stream
from lightning_ptm.planning.holders import Axis
from lightning_ptm.planning.inventory import Lifetime, What
from lightning_ptm.planning.render import render
from lightning_ptm.planning.trace import forward_trace
from lightning_ptm.planning.update_order import read_ahead
from lightning_ptm.progress import Progress
from lightning_ptm.runtime import offload
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.runtime.clipping import Clipping
from lightning_ptm.runtime.executor import Executor, Mode
from lightning_ptm.runtime.experts import ExpertGroups
from lightning_ptm.runtime.heap import Heap
from lightning_ptm.runtime.hooks import Hooks
from lightning_ptm.runtime.known_parameters import KnownParameters
from lightning_ptm.runtime.lending import Lending
from lightning_ptm.runtime.lockfree import LockFreeUpdates
from lightning_ptm.runtime.machine import free_host_bytes
from lightning_ptm.runtime.materialize import FirstValues, Given
from lightning_ptm.runtime.module_buffers import ModuleBuffers
from lightning_ptm.runtime.moving import move_beside_parameters
from lightning_ptm.runtime.optimizer_values import OptimizerValues
from lightning_ptm.runtime.overlap import overlap
from lightning_ptm.runtime.pages import Pages
from lightning_ptm.runtime.pieces import Buffers
from lightning_ptm.runtime.planner import Planner, check_layout
from lightning_ptm.runtime.recompute import recomputed_units
from lightning_ptm.runtime.reduction import Reduction
from lightning_ptm.runtime.rendezvous import ANY_TOGETHER, STEP_ENDS, Rendezvous, Together
from lightning_ptm.runtime.route import Waits
from lightning_ptm.runtime.sharded_kinds import ShardedKinds
from lightning_ptm.runtime.snapshot import Part, Snapshot
from lightning_ptm.runtime.state_dicts import StateDicts
from lightning_ptm.runtime.stock import save_rows, taken_dtype
from lightning_ptm.runtime.tracer import Tracer
from lightning_ptm.runtime.updates import FlatUpdate, SynchronousUpdates, UpdateScheduler
from lightning_ptm.runtime.values import Values
from lightning_ptm.runtime.wholes import Wholes
from lightning_ptm.terms import Operation, Phase, Tier
from lightning_ptm.update import LossScale, OptimizerTraits, Updater, total_norm

_TRACES = 1
"""Flag of a boundary: the iteration is to be traced."""

_CHANGED_BUFFERS = 256
"""Flag of a boundary: buffers of modules may not be rank 0's any more."""


_REASON_CHARACTERS = 500
"""Of an error's text, what other ranks are told."""


class Engine:
    """The runtime of one rank.

    Args:
        module: the LightningModule; its parameters become views of pages.
        blueprint: all decisions.
        optimizers: the user's, in order; empty without training.
        recompute: every k-th unit is recomputed; 0: none.
        poison: released pages are filled with NaN.
        file_ops: the disk tier's file calls, for tests of failing disks.
        given: first values that files provide, equal on all ranks.
        events: where the parts tell what happens when.
        progress: where long work tells how far it has come.
        ranks_here: ranks that share this machine's RAM.
    """

    def __init__(
        self,
        module: nn.Module,
        blueprint: Blueprint,
        optimizers: Sequence[Optimizer],
        communicators: Communicators,
        backend: Backend,
        *,
        disk_paths: Sequence[Path] = (),
        recompute: int = 0,
        poison: bool = False,
        file_ops: FileOps | None = None,
        given: Given | None = None,
        events: Events | None = None,
        progress: Progress | None = None,
        ranks_here: int = 1,
    ) -> None:
        self.module = module
        self._ranks_here = ranks_here
        self.blueprint = blueprint
        self._communicators = communicators
        self.communicator = communicators.everybody
        self.backend = backend
        self.device = backend.device
        self.events = events or Events()
        self.disk_paths = tuple(disk_paths)
        self.bars = progress or Progress(shown=False)
        self._optimizers = tuple(optimizers)
        teams = blueprint.experts.teams if blueprint.experts is not None else Teams()
        self.rendezvous = Rendezvous(self.communicator, self._take_part, teams)
        self._closed = False
        self._iteration = 0
        self._backwards = 0
        self._inside = False
        self._manual = False
        self._of_the_loss = False
        self._behind: list[int] = []
        self.save_stall_s = 0.0
        """Seconds that compute was held up by checkpoints; written by those who write them."""
        self.expert_groups: ExpertGroups | None = None
        self._frozen = [
            item for unit in blueprint.units for item in unit.parameters if not item.parameter.requires_grad
        ]
        self._known = KnownParameters(module, optimizers)
        self._taken_over = False
        self._adds_up = False
        """Inside `without_reduction`."""
        self._undo = ExitStack()
        """What gives up the parts that there are: each of them, whatever becomes of those before; the last one first."""
        self._heap = None if backend.apart else Heap(blueprint.keep_freed_memory)
        if self._heap is not None:
            self._undo.callback(self._heap.close)
        try:
            self._build(recompute, given or Given(), poison, file_ops)
        except BaseException:
            with self._undo:
                # The module must not be left with parameters that have no values because a budget was too small.
                if self._taken_over and self.communicator.alone:
                    self.lending.restore()
            raise

    def _build(self, recompute: int, given: Given, poison: bool, file_ops: FileOps | None) -> None:
        blueprint = self.blueprint
        self.stream = ComputeStream(self.backend)
        check_layout(blueprint.layout, self.communicator)
        self.allocator = Allocator(
            page_size=blueprint.layout.page_size,
            backend=self.backend,
            sizes=blueprint.pool_bytes,
            disk_paths=self.disk_paths,
            pin_host=True,
            poison=poison,
            file_ops=file_ops,
            events=self.events,
            progress=self.bars,
            uses={tier: blueprint.inventory.in_words(tier) for tier in blueprint.budget},
        )
        self._undo.callback(self.allocator.close)
        pages = Pages(blueprint, self.allocator, self._communicators, self.device)
        self.stores = tuple(pages.store(index) for index in range(len(blueprint.units)))
        self.updater = Updater(
            self.allocator,
            staging=blueprint.staging_chunks,
            staging_tier=blueprint.placement.staging_tier,
            # Lock-free versions and gradients change hands without a wait, in the order of the one stream that all have.
            stream=self.backend.stream() if blueprint.lock_free is None else None,
            events=self.events,
        )
        self._undo.callback(self.updater.close)
        gradient_pages = pages.take_gradient_pages()
        self.flats = tuple(pages.flats(store) for store in self.stores)
        self.wholes = Wholes(self.allocator, self._communicators, self.stores, self.flats, blueprint.holders)
        self.values = Values(self.wholes, self.bars)
        self.optimizer_values = OptimizerValues(self.wholes, self.bars)
        self.sharded_kinds = ShardedKinds(self.wholes, self.optimizer_values, self.values.original_of)
        self.lending = Lending(self.wholes, self.values)
        self._first_values(given)
        self._module_buffers = None
        if not self.communicator.alone:
            self._module_buffers = ModuleBuffers(self.module, self.communicator, trains=bool(self._optimizers))
            self._module_buffers.follow_rank_0()
        self._taken_over = True
        for flats in self.flats:
            for flat in flats:
                if flat.gradient.route.waits is Waits.KEPT:
                    flat.gradient.reserve()
        for row in blueprint.inventory.of(What.STAGING):
            self.updater.take_staging(row.tier, taken_dtype(row), row.count, row.numel)
        self._save_buffers = pages.buffers_for_saves() if blueprint.saves_behind else None
        self.updates = self._update_scheduler(pages)
        self._undo.callback(self.updates.close)
        self._check_taken()
        if blueprint.lock_free is None:
            for unit, flats in enumerate(self.flats):
                for flat in flats:
                    flat.gradient.before_change = partial(self.updates.finish, unit)
        if gradient_pages is not None:
            gradient_pages.while_waiting = self.updates.make_room
        states = {flat.store.layout.index: flat.states for flats in self.flats for flat in flats}
        self._read_ahead = [
            states[flat.index]
            for flat in read_ahead(blueprint.layout, blueprint.placement)
            if flat.unit not in blueprint.by_need
            and (home := states[flat.index].home()) is not None
            and not home.updates
        ]
        self.clipping = Clipping(self.communicator, self.updates, self._optimizers)
        self.reduction = Reduction(self.flats, self.rendezvous.agreement, lambda: self.executor.release_all())
        planner = Planner(blueprint, self._communicators.along(blueprint.holders.alike), self.communicator.rank)
        self.tracer = Tracer(blueprint.units, self._non_model_bytes, self.backend)
        self.executor = Executor(
            self.stores,
            self.tracer,
            self.rendezvous.agreement,
            self.updates.pending,
            self.updates.finish,
            planner.replan,
            self.wholes.read,
            self.reduction.reclaim,
            self.events,
            self._used_bytes,
            blueprint.by_need,
            one_way=self.backend.apart,
        )
        self._undo.callback(self.executor.abandon)
        for mode, trace in ((Mode.TRAIN, blueprint.trace), (Mode.FORWARD, forward_trace(blueprint.layout))):
            trace = blueprint.planned(trace)
            if mode is Mode.FORWARD or self._optimizers:
                self.executor.adopt(mode, planner.plan(mode, trace), trace)
        self.offload = self._offload() if blueprint.activations_to_host else None
        if self.offload is not None:
            self._undo.callback(self.offload.close)
        for flat in self._all_flats():
            self._undo.callback(flat.gradient.let_go)
        self.hooks = Hooks(
            blueprint.units,
            self.stores,
            self.executor,
            self,
            recomputed_units(len(blueprint.units), recompute),
            self.stream,
            self.offload,
        )
        self._undo.callback(self.hooks.close)
        self._state_dicts = StateDicts(
            [module for module in self.module.modules() if not self._always_readable(module)],
            self.readable,
            lambda: self.hooks.copyable,
        )
        self._undo.callback(self._state_dicts.close)
        if blueprint.experts is not None:
            group, expect = self._communicators.along((Axis.EXPERT,)), self.executor.expect
            self.expert_groups = ExpertGroups(blueprint.experts, group, self.rendezvous.agreement, expect)
            self._undo.callback(self.expert_groups.close)
        self.updates.start()

    def _check_taken(self) -> None:
        """I3. What is taken without a row would be missing where the plan counts on it."""
        for tier in self.blueprint.budget:
            taken = self.allocator.capacity_bytes(tier) - self.allocator.free_bytes(tier)
            rows = self.blueprint.inventory.held_bytes(tier, Lifetime.RUN)
            if taken != rows:
                raise InternalError(
                    f"set-up has taken {taken} bytes of the {tier.name.lower()} tier, and the rows of its inventory come to "
                    f"{rows}; nothing was trained; please report this with the settings of the strategy"
                )

    def _update_scheduler(self, pages: Pages) -> UpdateScheduler:
        blueprint = self.blueprint
        if blueprint.lock_free is None:
            in_thread = self.backend.apart and any(self.flats)
            return SynchronousUpdates(
                self.stores,
                self.flats,
                self._optimizers,
                self.updater,
                blueprint.gradient_room_bytes,
                in_thread=in_thread,
                # From the disk, what is read ahead comes in the order of gradients.
                in_turn=in_thread and all(home.master.updates for home in blueprint.placement.homes),
            )
        return LockFreeUpdates(
            self.stores,
            self.flats,
            self._optimizers,
            self.updater,
            pages.spares(),
            max_staleness=blueprint.lock_free.max_staleness,
            warmup=blueprint.lock_free.warmup,
            room=blueprint.staging_chunks,
            cores=blueprint.lock_free.cores,
            forecast=blueprint.lock_free.forecast,
            reach=blueprint.lock_free.reach,
            paced=blueprint.lock_free.paced_steps > 1,
            adds=torch.get_num_threads() >= blueprint.lock_free.cores_in_all,
        )

    def _offload(self) -> offload.Offload:
        buffers = HostBuffers(self.backend, free_bytes=free_host_bytes)
        mover = Mover(self.backend, copy_streams(self.backend), buffers, self.events)
        least = offload.LEAST_BYTES
        modules, in_pages = self.module.modules(), self.allocator.holds
        return offload.Offload(mover, self.backend, self.stream, modules, in_pages, least_bytes=least)

    def _first_values(self, given: Given) -> None:
        bindings = [binding for store in self.stores for binding in store.bindings]
        parts = [pair for each in bindings for pair in zip(each.parameters, each.boxes, strict=True)]
        boxes = {id(parameter): box for parameter, box in parts if box is not None}
        first = FirstValues(self.module, given, boxes)
        # A run that trains nothing keeps no masters: what was not the user's own tensor is kept if it is cheap, that is, if
        # RAM, and what the user allows of it, has room for it beside the pages. A true precision converts it for good.
        blueprint, ram = self.blueprint, self.blueprint.ram
        allowed = blueprint.budget[ram] - blueprint.pool_bytes[ram]
        room = 2 * self.precise_bytes() < free_host_bytes() and self.precise_bytes() <= allowed
        first.buffers()
        with self.bars.bar("weights into pages", self.values.bytes_to_lay()) as seen:
            for store in self.stores:
                built = not any(item.parameter.is_meta for item in store.unit.parameters)
                first.parameters(store.unit)
                self.values.take_over(
                    store,
                    given.parameters,
                    keep_originals=not self._optimizers and any(blueprint.copies) and (built or room),
                    keep_frozen=built,
                    seen=seen,
                )
        first.check()
        first.fill_buffers()
        move_beside_parameters(self.module, self.device)

    # -- iterations ---------------------------------------------------------------------------------------------------

    @contextmanager
    def iteration(self, mode: Mode, *, manual: bool = False) -> Iterator[None]:
        """One training, validation, test or predict step.

        Args:
            mode: TRAIN when a backward may follow; it then ends with the next iteration.
            manual: the step itself calls backward passes.
        """
        self._check_open()
        self.stream.begin()
        self._iteration += 1
        self.rendezvous.iteration_begins()
        self._backwards = 0
        computes_only = mode is Mode.FORWARD and self.blueprint.may_be_outside
        for store in self.stores:
            for binding in store.bindings:
                binding.check(computes_only=computes_only)
        self.values.check_known()
        if mode is Mode.TRAIN:
            self._check_frozen()
        if self._heap is not None:
            self._heap.between_steps()
        self.updates.begin_iteration(training=mode is Mode.TRAIN)
        if mode is Mode.TRAIN and self._read_ahead:
            # Behind the forward: what the first updates of the backward will need.
            self.updater.prefetch(self._read_ahead)
        flags = _TRACES if self.executor.wants_trace(mode) else 0
        if self._module_buffers is not None and self._module_buffers.changed():
            flags |= _CHANGED_BUFFERS
        if mode is Mode.TRAIN:
            seen, together = self.rendezvous.come_together(Together.TRAINING_STEP, flags=flags), True
        else:
            seen = self.rendezvous.reach(0, flags)
            together = not seen & ANY_TOGETHER  # else some ranks have no such batch any more
        if self._module_buffers is not None:
            if together and seen & _CHANGED_BUFFERS:
                self._module_buffers.follow_rank_0()
            # As DDP does, behind a forward whose gradients are reduced. A step that calls backward passes itself is what DDP
            # takes for a forward, and Lightning tells it then that no gradients are to come.
            self._module_buffers.iteration_begins(compare_next=mode is Mode.TRAIN and not self._adds_up and not manual)
            self._manual = manual
        # All ranks that are here end the iteration before, and plan anew, together (executor I3).
        self.executor.begin(mode, trace=together and bool(seen & _TRACES), together=together)
        self.hooks.begin_iteration()
        self.executor.computation_begins(Phase.FORWARD)
        self._forward_root()
        self._inside = True
        try:
            with self.hooks.step():
                yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._inside = False
            self.executor.computation_ends(Phase.FORWARD)
        if mode is Mode.FORWARD:
            seen = self.rendezvous.reach(STEP_ENDS)
            # A rank that waits for others elsewhere, in what this one has not come to, would not hear of a new plan.
            self.executor.end(together=not seen & ANY_TOGETHER)

    def _forward_root(self) -> None:
        self.executor.enter(0, Phase.FORWARD)
        # The root is used by code outside any hooked forward: it stays until the iteration ends.
        self.executor.hold(0)
        self.executor.leave(0)

    def abandon(self) -> None:
        """An iteration was cut short by an error; its gathers and hooks' contexts are dropped."""
        self.hooks.abandon()
        self.executor.abandon()
        self.updates.abandon()
        self.reduction.forget()
        self._behind = []
        self._of_the_loss = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, the strategy runs a backward pass of the loss.

        Raises:
            UsageError: it would add to what a step has used up.
        """
        for flat in self._all_flats():
            flat.gradient.check_forgotten()
        if self._manual and not self._inside and self._module_buffers is not None:
            self._module_buffers.backward_outside(reduced=not self._adds_up)
        self.backward_begins()
        self._of_the_loss = True
        with self.hooks.backward():
            yield
        self._of_the_loss = False

    @property
    def iterations(self) -> int:
        """Iterations that have begun."""
        return self._iteration

    @property
    def in_mid_step(self) -> bool:
        """Whether some units have been updated in a step that has not been taken to its end."""
        return self.updates.in_mid_step

    # -- what hooks tell ----------------------------------------------------------------------------------------------

    def another_gradient(self, unit: int, parameter: Tensor) -> None:
        """Several gradients of a parameter come in one pass, each in a backward of its own (a reentrant checkpoint's)."""
        self.reduction.add_up(unit, parameter)

    def unit_backward_ended(self, unit: int) -> None:
        """Gradients of a unit are complete: reduce or offload them, and update the unit before if its turn has come."""
        if not self.flats[unit]:
            return
        if not self.stores[unit].resident and not self.executor.called(unit):
            uncalled = self.blueprint.units[unit]
            raise UsageError(
                f"weights of {uncalled.name} ({type(uncalled.module).__name__}) were used without a call of that module, so "
                f"they were not fetched; call the module, move that code into its forward, or choose other units=[...]"
            )
        self.reduction.collect(unit)
        # One unit behind: its reduction overlaps this unit's backward.
        self._behind.append(unit)
        if self.communicator.alone or len(self._behind) > 1:
            self._update_ready(self._behind.pop(0))

    def backward_begins(self) -> None:
        """Gradients are about to be added up in `.grad`."""
        for flat in self._all_flats():
            flat.gradient.resolve()
        for flat in self._all_flats():
            flat.gradient.hide()

    def _all_flats(self) -> Iterator[FlatUpdate]:
        return (flat for flats in self.flats for flat in flats)

    def backward_ended(self) -> None:
        """All units have ended."""
        self.executor.rest()
        self._backwards += 1
        self.updates.graph_ended()
        self.rendezvous.reach(self._backwards)
        while self._behind:
            self._update_ready(self._behind.pop(0))
        if not self.updates.armed:
            for flat in self._all_flats():
                flat.gradient.show()
        self.executor.stay(0, held=self._inside)

    def progress(self) -> None:
        """Called at ticks."""
        self.updates.progress()

    def _update_ready(self, unit: int) -> None:
        # A pass of the user's own, such as autograd.grad in the step, is none that the optimizer's step was armed for.
        if self.updates.armed and self.reduction.complete(unit) and self._of_the_loss:
            self.updates.unit_ready(unit)

    @on_compute_stream
    def _take_part(self, decision: Decision) -> None:
        if decision.request.operation is Operation.GATHER:
            self.executor.take_part(decision.request.unit)
        else:
            self.reduction.take_part(decision)

    # -- optimizer step -----------------------------------------------------------------------------------------------

    def arm(self, optimizer: Optimizer) -> None:
        """The next backward pass may update units as they end."""
        if self.steps_itself(optimizer):
            return
        self.reduction.begin_step()
        self.updates.arm(optimizer)

    @on_compute_stream
    def unscale(self, optimizer: Optimizer, scale: LossScale) -> bool:
        """The next step takes the loss scale off the gradients.

        Returns:
            False where there must be none, since they hold inf or NaN: they are skipped.
        """
        self._check_open()
        self._collect_postponed(STEP_ENDS)
        index = self.updates.index_of(optimizer)
        self._follow(index)
        self.clipping.unscale(index, scale)
        finite = self.clipping.all_finite(index)
        scale.update(not finite)
        if not finite:
            self.clipping.take(index)
            self.updates.skip(index)
        return finite

    def unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the next step takes a loss scale off the gradients."""
        return self.clipping.unscales(self.updates.index_of(optimizer))

    def steps_itself(self, optimizer: Optimizer) -> bool:
        """Whether its own step updates its parameters, which are whole, and its states are its own."""
        return self.updates.index_of(optimizer) in self.blueprint.selfstepping

    def traits_of(self, optimizer: Optimizer) -> list[OptimizerTraits]:
        """What is known of its class, by the kinds of parameters that it updates."""
        return [flat.states.traits for _, flat in self.updates.flats_of(self.updates.index_of(optimizer))]

    @on_compute_stream
    def step(self, optimizer: Optimizer) -> None:
        """One optimizer step with the gradients collected so far."""
        self._check_open()
        index = self.updates.index_of(optimizer)
        self._check_rearranged(optimizer, index)
        self._check_of_the_module(optimizer)
        self._collect_postponed(STEP_ENDS)
        self._follow(index)
        transform = self.clipping.take(index)
        self.updates.step(index, transform)
        for _, flat in self.updates.flats_of(index):
            scratch = flat.states.traits.writes_gradient
            if scratch or not flat.gradient.route.outlives_step:
                flat.gradient.retire(clipped=not transform.is_identity, scratch=scratch)
        self.executor.updates_begin()
        if self._inside:
            self.executor.hold(0)  # manual optimization: code that no hook sees goes on to use the root

    def _check_rearranged(self, optimizer: Optimizer, index: int) -> None:
        """Nothing of what `outgrown` finds between two batches has happened since: this step would miss it."""
        if any(item.parameter.requires_grad for item in self._frozen):
            self._check_frozen({id(parameter) for group in optimizer.param_groups for parameter in group["params"]})
        if self.blueprint.may_be_outside:
            for _, flat in self.updates.flats_of(index):
                if flat.store.binding.replaced():
                    flat.store.binding.check()

    def strangers(self, optimizer: Optimizer) -> list[Tensor]:
        """Parameters in the groups of an optimizer that the module has not, so that no pages have them."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in self._known.strangers if id(parameter) in known]

    def _check_of_the_module(self, optimizer: Optimizer) -> None:
        """What is in no pages needs no update as long as nothing computes with it."""
        for parameter in self.strangers(optimizer) if self._known.strangers else ():
            if parameter.grad is not None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is in a group of {type(optimizer).__name__} and has a "
                    f"gradient, and no module has it, so no pages have it and this step would leave it as it is; make it an "
                    f"attribute of a module (self.name = parameter), or take it out of the group"
                )

    def forget_states(self, optimizer: int, parameter: Tensor) -> None:
        """An optimizer keeps nothing any more of earlier updates of a parameter: its next one begins afresh. Not collective;
        to be done on all ranks."""
        self.updates.finish_all()
        for _, flat in self.updates.flats_of(optimizer):
            known = zip(flat.store.binding.layout.slots, flat.store.binding.parameters, strict=True)
            for place, (slot, each) in enumerate(known):
                if parameter is self.lending.resized.get(slot.spec.name, each):
                    flat.states.set_scalars(place, None)

    def outgrown(self) -> bool:
        """Whether the module's parameters are others (`other_parameters`), were unfrozen, or were put into groups that they
        had not been in, so that pages fit it no longer; of a run that could do without, also whether they were given other
        data."""
        paged = (index for index in range(len(self._optimizers)) if index not in self.blueprint.selfstepping)
        return (
            self.other_parameters()
            or any(item.parameter.requires_grad for item in self._frozen)
            or any(map(self.updates.outgrown, paged))
            or (
                self.blueprint.may_be_outside
                and self.gradients_in_place
                and any(flat.binding.replaced() for store in self.stores for flat in store.flats)
            )
        )

    def other_parameters(self) -> bool:
        """Whether the module has parameters that it had not when its pages were laid out, or of other shapes, or lacks some.

        Raises:
            UsageError: a shape differs where what has the parameter in pages does not let it.
        """
        return self.lending.follow_shapes() or self._known.changed()

    def waiting_gradients(self) -> tuple[str, ...]:
        """Names of units of which pages hold gradients that no step has used."""
        return tuple(
            store.unit.name or "the root"
            for store, flats in zip(self.stores, self.flats, strict=True)
            if any(flat.gradient.waits_for_step for flat in flats)
        )

    def leave(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Other pages are about to take over: nothing is given back, and what steps have left in `.grad` goes.

        Args:
            dtypes: of the parameters' precise values, by id.
        """
        for flat in self._all_flats():
            if not flat.gradient.in_place:
                flat.gradient.clear()
        self.lending.leave(dtypes)

    def _follow(self, optimizer: int) -> None:
        """What the user has done to `.grad` of an optimizer's parameters counts."""
        for flat in self._all_flats():
            flat.gradient.resolve()
        for _, flat in self.updates.flats_of(optimizer):
            flat.gradient.follow()

    def _collect_postponed(self, position: int) -> None:
        """Reduces all gradients that are still in `.grad`, on all ranks, which meet at `position`."""
        self.rendezvous.reach_step(position)
        self.reduction.collect_postponed()
        if self.blueprint.holders.apart:
            self.rendezvous.reach(position)  # others may have more units to reduce: what follows may be collective

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Backward passes inside leave their gradients to be reduced with those of a later one, or at the step."""
        self._adds_up, before = True, self._adds_up
        try:
            with self.reduction.postponed():
                yield
        finally:
            self._adds_up = before

    @on_compute_stream
    def zero_grad(self, optimizer: Optimizer, *, forget: bool) -> None:
        """Forgets the gradients of an optimizer's parameters; or they are about to be overwritten in place."""
        for _, flat in self.updates.flats_of(self.updates.index_of(optimizer)):
            if forget:
                flat.gradient.clear()
            else:
                flat.gradient.zero()

    @on_compute_stream
    def show_gradients(self, optimizer: Optimizer) -> None:
        """`.grad` of an optimizer's parameters shows what is in pages."""
        for _, flat in self.updates.flats_of(self.updates.index_of(optimizer)):
            flat.gradient.show()

    @on_compute_stream
    def clip_by_norm(self, optimizer: Optimizer, max_norm: float, scale: LossScale | None) -> None:
        self._collect_postponed(STEP_ENDS - 1)
        self._follow(self.updates.index_of(optimizer))
        self.clipping.by_norm(self.updates.index_of(optimizer), max_norm, scale)

    @on_compute_stream
    def clip_by_value(self, optimizer: Optimizer, clip_value: float, scale: LossScale | None) -> None:
        self._collect_postponed(STEP_ENDS - 1)
        self._follow(self.updates.index_of(optimizer))
        self.clipping.by_value(self.updates.index_of(optimizer), clip_value, scale)

    @property
    def gradients_in_place(self) -> bool:
        """Whether every gradient stays in `.grad` until the optimizer's step."""
        return all(flat.gradient.in_place for flats in self.flats for flat in flats)

    @on_compute_stream
    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0, scale: LossScale | None = None) -> Tensor:
        """The global norm of an optimizer's gradients, over all ranks, wherever they are kept. Collective."""
        if self.steps_itself(optimizer):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            return total_norm([torch.linalg.vector_norm(each, norm_type) for each in gradients], norm_type)
        self._collect_postponed(STEP_ENDS - 2)
        self._follow(self.updates.index_of(optimizer))
        return self.clipping.norm(self.updates.index_of(optimizer), norm_type, scale)

    # -- weights by hand ----------------------------------------------------------------------------------------------

    def drain(self, deed: str = "drain") -> None:
        """Blocks until every update is in the compute parameters and at home, here and on all ranks. Collective.

        Args:
            deed: as for `meet`.
        """
        self.stream.begin()  # what follows reads and writes pages on the caller's
        self.updates.finish_all()
        for store in self.stores:
            for flat in store.flats:
                flat.await_reads()
        self.rendezvous.come_together(Together.BY_HAND, deed)

    def begin_snapshot(self, parts: Sequence[Part], failed: Callable[[], None] | None = None) -> Snapshot:
        """The states of now, to be taken in any thread while updates go on. One at a time; end it with `end_snapshot`.

        Args:
            failed: see `Snapshot`.
        """
        self.drain("snapshot")
        self.executor.release_all()
        cell_numel = self.saved_at_once
        if self._save_buffers is None:
            self._save_buffers = Buffers.for_now(self.allocator, self._save_sizes())
        snapshot = Snapshot(self.allocator, parts, cell_numel, self._save_buffers, failed)
        self.updater.watch(snapshot.before_write)
        return snapshot

    @property
    def saved_at_once(self) -> int:
        """Elements of a paged tensor that the next snapshot takes at once: a chunk, where updates go on meanwhile."""
        chunk = self.updater.chunk_numel
        if self._save_buffers is not None:
            return chunk
        # Buffers that are taken for one save hold a page at most, which is less than a chunk of fp64.
        return min([chunk, *(self.allocator.page_size // dtype.itemsize for dtype, _ in self._save_sizes())])

    def _save_sizes(self) -> list[tuple[torch.dtype, int]]:
        return [(taken_dtype(row), row.numel) for row in save_rows(self.blueprint)]

    def end_snapshot(self) -> None:
        """It has been taken, or given up."""
        self.updater.watch(None)
        if self._save_buffers is not None and not self.blueprint.saves_behind:
            self._save_buffers.close()  # the plan has no room of its own for them
            self._save_buffers = None

    @property
    def with_other_parts(self) -> Communicator:
        """Of the ranks that have the other parts of what is in parts here, in the order of the parts."""
        return self._communicators.along((Axis.TENSOR,))

    @property
    def behind_with_other_parts(self) -> Channel | None:
        """The same ranks, for what they exchange behind training; None where there are no others."""
        return self._communicators.behind

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the block raises on one rank raises on all of them. Collective, at the end of the block."""
        with together(self.communicator, partial(self.rendezvous.meet, Together.BY_HAND, "results")):
            yield

    def told(self, value: Any, source: int = 0) -> Any:
        """A value of one rank, on all of them. Collective."""
        self.rendezvous.meet(Together.BY_HAND, f"value of rank {source}")
        return self.communicator.broadcast_object(value, source)

    def all_ranks(self, agree: bool) -> bool:
        """Whether all ranks say yes. Collective."""
        self.rendezvous.meet(Together.BY_HAND, "question")
        refused = torch.tensor([0 if agree else 1], dtype=torch.int64)
        return not self.communicator.all_reduce(refused, maximum=True).item()

    def fail(self, error: BaseException) -> None:
        """The run has failed on this rank: the others, if any, are told, and nothing collective happens here any more."""
        self.rendezvous.fail(f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS])
        self.abandon()

    @contextmanager
    def gathered(self, modules: Sequence[nn.Module], *, write: bool = True) -> Iterator[None]:
        """The parameters of `modules` whole and real inside the block; collective. See `AngelPTMStrategy.gathered`.

        Raises:
            CapacityError: some rank's RAM has no room for them.
        """
        wanted = self._units_in(modules)
        self.values.check_known()
        self.drain(f"gathered {sorted(wanted)} {write}")
        self.executor.release_all()
        needed, free = self.lending.bytes_to_lend(wanted) * self._ranks_here, free_host_bytes()
        if not self.all_ranks(needed <= free):
            names = ", ".join(type(module).__name__ for module in modules)
            raise CapacityError(
                f"the weights of {names} take {format_bytes(needed)} of RAM where they are whole (state_dict(), gathered), "
                f"and {format_bytes(free)} are free, or too few on another rank; take part after part, such as "
                f"block.state_dict(), or save a checkpoint with state_dict_type='sharded', which gathers nothing"
            )
        ending = self._until_all_have(f"edited {sorted(wanted)}") if write else nullcontext()
        with (
            self.lending.gathered(wanted, write=write, may_write=lambda: not self.rendezvous.failed),
            ending,
            self.hooks.lending(),
        ):
            yield
            self._check_memory()

    def _check_memory(self) -> None:
        """What is in the user's hands now and goes back to pages would be in them twice."""
        looked_at = self._known.changed() and not self.blueprint.outside
        shared = overlap(self.module, self.module.parameters()) if looked_at else None
        if shared is not None:
            raise UsageError(
                f"{shared[0]} and {shared[1]} lie in the same memory, so that what changes one of them changes the other, "
                f"and pages are each one's own; make them one parameter (`decoder.weight = encoder.weight`), or give what is "
                f"new memory of its own, nn.Parameter(tensor.clone())"
            )

    @contextmanager
    def _until_all_have(self, deed: str) -> Iterator[None]:
        """The block ends when all ranks are at its end: what follows is collective."""
        try:
            yield
        except BaseException:
            with suppress(RankError):  # the error of the block is the cause
                self.rendezvous.meet(Together.BY_HAND, deed)
            raise
        self.rendezvous.meet(Together.BY_HAND, deed)

    def _units_in(self, modules: Sequence[nn.Module]) -> set[int]:
        inside = {id(parameter) for module in modules for parameter in module.parameters()}
        return {
            unit.index for unit in self.blueprint.units if any(id(item.parameter) in inside for item in unit.parameters)
        }

    def _always_readable(self, module: nn.Module) -> bool:
        return all(self.stores[unit].readable for unit in self._units_in([module]))

    @contextmanager
    def readable(self, module: nn.Module) -> Iterator[None]:
        """Inside the block the parameters of `module` can be read and are precise; gathers nothing where they are so already.
        Collective otherwise. Raises as `gathered`."""
        if all(self.stores[unit].readable or self.stores[unit].lent for unit in self._units_in([module])):
            yield
            return
        with self.gathered([module], write=False):
            yield

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan_text(self, mode: Mode = Mode.TRAIN) -> str:
        """The plan that is followed, as a table."""
        plan = self.executor.plan(mode)
        return render(plan, self.blueprint.layout) if plan is not None else "(fetch on use: no plan)"

    def _non_model_bytes(self) -> int:
        return self.backend.bytes_beside(self.blueprint.pool_bytes[Tier.DEVICE])

    def _used_bytes(self) -> tuple[int, ...]:
        return tuple(
            self.allocator.capacity_bytes(tier) - self.allocator.free_bytes(tier) for tier in self.blueprint.budget
        )

    def precise_bytes(self, *, with_other_parts: bool = False) -> int:
        """Bytes that all weights take outside of pages in their precise dtype.

        Args:
            with_other_parts: of parameters of which this rank has parts, the whole ones.
        """
        return sum(
            flat.numel * (8 if flat.dtype == "float64" else 4) * (flat.parts if with_other_parts else 1)
            for flat in self.blueprint.layout.everywhere()
        )

    def optimizer_state_bytes(self, *, on_disk: bool) -> int:
        """Bytes of all ranks' optimizer states, masters not counted, that are at home on disk, or in memory."""
        return sum(
            flat.states.bytes_of_ranks(self.communicator.world_size)
            for flats in self.flats
            for flat in flats
            if self.blueprint.placement.homes[flat.store.layout.unit].master.addressable != on_disk
        )

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes hooks off, stops threads, frees pages. Parameters are left as they are; see `Values.restore`."""
        if self._closed:
            return
        self._closed = True
        self._undo.close()

    def _check_frozen(self, among: Collection[int] | None = None) -> None:
        for item in self._frozen:
            if item.parameter.requires_grad and (among is None or id(item.parameter) in among):
                raise UsageError(
                    f"parameter {item.name} was frozen when its pages were laid out and requires a gradient now; it has no "
                    f"master states in this step; unfreeze it between two batches (on_train_epoch_start, "
                    f"on_train_batch_start)"
                )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this run has ended and its pages are gone; start a new fit, validate, test or predict")
