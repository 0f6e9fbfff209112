"""Operations on gradients around an optimizer step: unscale, clip, compute norms, step, clear.

Owns the flag that backward passes accumulate without reduction. All operations are collective.

I1: before a step uses gradients, postponed reductions are done on all ranks, and the user's changes to `.grad` are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.runtime.autograd.backward_actions import BackwardActions
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.module_changes import ModuleChanges
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.full_params.gathered_parameters import GatheredParameters
from lightning_ptm.runtime.gradients.flat_gradient import CarriedGradient, FlatGradient
from lightning_ptm.runtime.ranks.barriers import STEP_ENDS, Barriers
from lightning_ptm.runtime.updates.clipping import Clipping
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.reduction import Reduction
from lightning_ptm.runtime.updates.updates import UpdateScheduler
from lightning_ptm.update.gradient_source import NO_TRANSFORM
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.norms import total_norm
from lightning_ptm.update.trial.traits import OptimizerTraits

Carried = Mapping[tuple[str, ...], CarriedGradient]


def names_of(gradient: FlatGradient) -> tuple[str, ...]:
    """Returns the names of a flat's parameters."""
    return tuple(slot.spec.name for slot in gradient.store.layout.slots)


class StepGradients:
    """Optimizer steps, and the operations on gradients before and after them.

    Args:
        check_open: raises UsageError if the run has ended.
        stream: stream that computes with the gradients.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        flats: Sequence[Sequence[FlatUpdate]],
        executor: Executor,
        reduction: Reduction,
        clipping: Clipping,
        updates: UpdateScheduler,
        barriers: Barriers,
        backwards: BackwardActions,
        changes: ModuleChanges,
        gathered_parameters: GatheredParameters,
        check_open: Callable[[], None],
        stream: ComputeStream,
    ) -> None:
        self._blueprint = blueprint
        self._flats = tuple(flat for of_unit in flats for flat in of_unit)
        self._executor = executor
        self._reduction = reduction
        self._clipping = clipping
        self._updates = updates
        self._barriers = barriers
        self._backwards = backwards
        self._changes = changes
        self._gathered_parameters = gathered_parameters
        self._check_open = check_open
        self.stream = stream

        self._adds_up = False

    # -- a step -------------------------------------------------------------------------------------------------------

    def arm(self, optimizer: Optimizer) -> None:
        """Allows the next backward pass to update each unit when its backward ends."""
        if self.steps_itself(optimizer):
            return
        self._reduction.begin_step()
        self._updates.arm(optimizer)

    @on_compute_stream
    def step(self, optimizer: Optimizer) -> None:
        """Runs one optimizer step with the gradients collected so far."""
        self._check_open()
        index = self._updates.groups.index_of(optimizer)
        self._changes.check_not_unfrozen(optimizer, index)
        self._changes.check_strangers(optimizer)
        if self._blueprint.placement.passing_bytes and not (self._updates.armed or self._clipping.waiting):
            self._updates.arm(optimizer)  # gradients in `.grad` pass through few pages to their updates
        self._collect_postponed(STEP_ENDS)
        self._follow(index)
        transform = self._clipping.take(index) if self._clipping.waiting else NO_TRANSFORM
        replaced = self._changes.data_replaced(index) if self._blueprint.may_be_outside else nullcontext()
        with replaced:
            self._updates.step(index, transform)
        self._executor.guard_policy.updates_begin()
        if self._backwards.in_step:
            self._executor.hold(0)  # manual optimization: code outside any hook continues to use the root

    def steps_itself(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer is unpaged: its own `step` updates ordinary tensors, and it keeps its states itself."""
        return self._updates.groups.index_of(optimizer) in self._blueprint.unpaged_optimizers

    def traits_of(self, optimizer: Optimizer) -> list[OptimizerTraits]:
        """Returns the traits of an optimizer, one entry for each flat that it updates."""
        return [
            flat.states.traits for _, flat in self._updates.groups.flats_of(self._updates.groups.index_of(optimizer))
        ]

    @property
    def in_mid_step(self) -> bool:
        """Whether some units have been updated in a step that has not finished."""
        return self._updates.in_mid_step

    @property
    def torn(self) -> bool:
        """Whether only some flats have the update of a step that is in progress or was abandoned, so that the
        parameters belong to no step."""
        return self._updates.torn

    def forget_states(self, optimizer: int, parameter: Tensor) -> None:
        """Resets an optimizer's states of a parameter. Not collective, but must be called on all ranks."""
        self._updates.finish_all()
        for _, flat in self._updates.groups.flats_of(optimizer):
            known = zip(flat.store.binding.layout.slots, flat.store.binding.parameters, strict=True)
            for place, (slot, each) in enumerate(known):
                if parameter is self._gathered_parameters.resized.get(slot.spec.name, each):
                    flat.states.set_scalars(place, None)

    # -- gradients before it, and after it ----------------------------------------------------------------------------

    @on_compute_stream
    def unscale(self, optimizer: Optimizer, scale: LossScale) -> bool:
        """Makes the next step unscale the gradients.

        Returns:
            Whether to step; False if gradients contain inf or NaN, in which case they are discarded.
        """
        self._check_open()
        self._collect_postponed(STEP_ENDS)
        index = self._updates.groups.index_of(optimizer)
        self._follow(index)
        self._clipping.unscale(index, scale)
        finite = self._clipping.all_finite(index)
        scale.update(not finite)
        if not finite:
            self._clipping.take(index)
            self._updates.skip(index)
        return finite

    def unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the next step unscales the gradients."""
        return self._clipping.unscales(self._updates.groups.index_of(optimizer))

    @on_compute_stream
    def clip_by_norm(self, optimizer: Optimizer, max_norm: float, scale: LossScale | None) -> None:
        """Clips an optimizer's gradients by their norm over all ranks. Collective."""
        self._collect_postponed(STEP_ENDS - 1)
        self._follow(self._updates.groups.index_of(optimizer))
        self._clipping.by_norm(self._updates.groups.index_of(optimizer), max_norm, scale)

    @on_compute_stream
    def clip_by_value(self, optimizer: Optimizer, clip_value: float, scale: LossScale | None) -> None:
        """Clips each element of an optimizer's gradients. Collective."""
        self._collect_postponed(STEP_ENDS - 1)
        self._follow(self._updates.groups.index_of(optimizer))
        self._clipping.by_value(self._updates.groups.index_of(optimizer), clip_value, scale)

    @on_compute_stream
    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0, scale: LossScale | None = None) -> Tensor:
        """Returns the norm of an optimizer's gradients over all ranks and tiers. Collective."""
        if self.steps_itself(optimizer):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            return total_norm([torch.linalg.vector_norm(each, norm_type) for each in gradients], norm_type)
        self._collect_postponed(STEP_ENDS - 2)
        self._follow(self._updates.groups.index_of(optimizer))
        self.show_gradients(optimizer)  # those that were in `.grad` until now
        return self._clipping.norm(self._updates.groups.index_of(optimizer), norm_type, scale)

    @on_compute_stream
    def zero_grad(self, optimizer: Optimizer, *, forget: bool) -> None:
        """Clears the gradients of an optimizer's parameters.

        Args:
            forget: whether gradients are dropped; else they become zero (`set_to_none=False`), and the caller overwrites
                those that are in `.grad`.
        """
        flats = [flat for _, flat in self._updates.groups.flats_of(self._updates.groups.index_of(optimizer))]
        self._updates.check_before_updates("zero gradients", flats)
        for flat in flats:
            if forget:
                flat.gradient.clear()
            else:
                flat.gradient.zero()

    def carried_bytes(self) -> int | None:
        """Returns the bytes of the gradients in pages that the user has still to clear, if the next layout of the run can go
        on with them (`carried`); None: it cannot."""
        waiting = [each for each in self._gradients() if each.waits_for_step(used_are_forgotten=False)]
        shared = not self._barriers.alone or self._blueprint.lock_free is not None
        if waiting and (shared or not all(each.can_be_carried for each in waiting)):
            return None
        return sum(each.bytes for each in waiting)

    @on_compute_stream
    def carried(self) -> Carried:
        """Returns copies in RAM of the gradients in pages, by the names of their parameters."""
        waiting = [each for each in self._gradients() if each.waits_for_step(used_are_forgotten=False)]
        return {names_of(each): each.carried() for each in waiting}

    @on_compute_stream
    def carry(self, carried: Carried) -> None:
        """Goes on with the gradients of the layout before.

        Raises:
            InternalError: one of them has no flat of the same parameters here.
        """
        left = dict(carried)
        for gradient in self._gradients():
            found = left.pop(names_of(gradient), None)
            if found is not None:
                gradient.carry(found)
        if left:
            raise InternalError(
                f"the gradients of {', '.join(next(iter(left)))} have no place in the new layout of the run"
            )

    def _gradients(self) -> list[FlatGradient]:
        """Returns the gradients of all flats, of which several optimizers may update one."""
        return list(dict.fromkeys(flat.gradient for flat in self._flats))

    @on_compute_stream
    def show_gradients(self, optimizer: Optimizer) -> None:
        """Makes `.grad` of an optimizer's parameters show the gradients in pages."""
        for _, flat in self._updates.groups.flats_of(self._updates.groups.index_of(optimizer)):
            flat.gradient.view.show()

    def withhold_gradients(self) -> None:
        """Makes `.grad` refuse to be read until the next backward pass, since other ranks have other parameters."""
        for flat in self._flats:
            flat.gradient.view.withhold()

    @property
    def adds_up(self) -> bool:
        """Whether the context `without_reduction` is active."""
        return self._adds_up

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Context in which backward passes postpone the reduction of their gradients to a later pass, or to the step."""
        self._adds_up, before = True, self._adds_up
        try:
            with self._reduction.postponed():
                yield
        finally:
            self._adds_up = before

    def _follow(self, optimizer: int) -> None:
        """Applies the user's changes to `.grad` of an optimizer's parameters."""
        for flat in self._flats:
            flat.gradient.view.resolve()
        for _, flat in self._updates.groups.flats_of(optimizer):
            flat.gradient.apply_user_changes()

    def _collect_postponed(self, position: int) -> None:
        """Reduces all gradients that are still in `.grad`, on all ranks, after a barrier at `position`."""
        if not self._barriers.alone:
            self._barriers.reach_step(position)
        self._reduction.collect_postponed()
        if self._blueprint.holders.by_unit:
            self._barriers.reach(position)  # other ranks may have more units to reduce; the caller may run a collective
