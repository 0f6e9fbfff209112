"""What optimizers and the Trainer ask of gradients in pages around a step: unscale, clip, measure, use and forget them.

Owns whether backward passes add up. All of it is collective.

I1: before a step uses gradients, those that were left to be reduced later are reduced, on all ranks, and what the user has
done to `.grad` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.runtime.autograd.backward_actions import BackwardActions
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.module_changes import ModuleChanges
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.full_params.lent_parameters import LentParameters
from lightning_ptm.runtime.ranks.barriers import STEP_ENDS, Barriers
from lightning_ptm.runtime.updates.clipping import Clipping
from lightning_ptm.runtime.updates.reduction import Reduction
from lightning_ptm.runtime.updates.updates import FlatUpdate, UpdateScheduler
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.norms import total_norm
from lightning_ptm.update.trial.traits import OptimizerTraits


class StepGradients:
    """See the file's contract.

    Args:
        check_open: raises UsageError where the run has ended.
        stream: that computes with the gradients.
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
        lent_parameters: LentParameters,
        check_open: Callable[[], None],
        stream: ComputeStream,
    ) -> None:
        self._blueprint = blueprint
        self._flats = flats
        self._executor = executor
        self._reduction = reduction
        self._clipping = clipping
        self._updates = updates
        self._barriers = barriers
        self._backwards = backwards
        self._changes = changes
        self._lent_parameters = lent_parameters
        self._check_open = check_open
        self.stream = stream

        self._adds_up = False

    # -- a step -------------------------------------------------------------------------------------------------------

    def arm(self, optimizer: Optimizer) -> None:
        """The next backward pass may update units as they end."""
        if self.steps_itself(optimizer):
            return
        self._reduction.begin_step()
        self._updates.arm(optimizer)

    @on_compute_stream
    def step(self, optimizer: Optimizer) -> None:
        """One optimizer step with the gradients collected so far."""
        self._check_open()
        index = self._updates.groups.index_of(optimizer)
        self._changes.check_rearranged(optimizer, index)
        self._changes.check_of_the_module(optimizer)
        self._collect_postponed(STEP_ENDS)
        self._follow(index)
        transform = self._clipping.take(index)
        with self._changes.data_replaced(index):
            self._updates.step(index, transform)
        for _, flat in self._updates.groups.flats_of(index):
            scratch = flat.states.traits.writes_gradient
            if scratch or not flat.gradient.route.outlives_step:
                flat.gradient.grad_attribute.retire(clipped=not transform.is_identity, scratch=scratch)
            else:
                flat.gradient.step_has_used()
        self._executor.guard_policy.updates_begin()
        if self._backwards.in_step:
            self._executor.hold(0)  # manual optimization: code that no hook sees goes on to use the root

    def steps_itself(self, optimizer: Optimizer) -> bool:
        """Whether its own step updates its parameters, which are whole, and its states are its own."""
        return self._updates.groups.index_of(optimizer) in self._blueprint.unpaged_optimizers

    def traits_of(self, optimizer: Optimizer) -> list[OptimizerTraits]:
        """What is known of its class, by the kinds of parameters that it updates."""
        return [
            flat.states.traits for _, flat in self._updates.groups.flats_of(self._updates.groups.index_of(optimizer))
        ]

    @property
    def in_mid_step(self) -> bool:
        """Whether some units have been updated in a step that has not been taken to its end."""
        return self._updates.in_mid_step

    @property
    def torn(self) -> bool:
        """The same, also where the step was given up since."""
        return self._updates.torn

    def forget_states(self, optimizer: int, parameter: Tensor) -> None:
        """An optimizer keeps nothing any more of earlier updates of a parameter: its next one begins afresh. Not collective;
        to be done on all ranks."""
        self._updates.finish_all()
        for _, flat in self._updates.groups.flats_of(optimizer):
            known = zip(flat.store.binding.layout.slots, flat.store.binding.parameters, strict=True)
            for place, (slot, each) in enumerate(known):
                if parameter is self._lent_parameters.resized.get(slot.spec.name, each):
                    flat.states.set_scalars(place, None)

    # -- gradients before it, and after it ----------------------------------------------------------------------------

    @on_compute_stream
    def unscale(self, optimizer: Optimizer, scale: LossScale) -> bool:
        """The next step takes the loss scale off the gradients.

        Returns:
            False where there must be none, since they hold inf or NaN: they are skipped.
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
        """Whether the next step takes a loss scale off the gradients."""
        return self._clipping.unscales(self._updates.groups.index_of(optimizer))

    @on_compute_stream
    def clip_by_norm(self, optimizer: Optimizer, max_norm: float, scale: LossScale | None) -> None:
        self._collect_postponed(STEP_ENDS - 1)
        self._follow(self._updates.groups.index_of(optimizer))
        self._clipping.by_norm(self._updates.groups.index_of(optimizer), max_norm, scale)

    @on_compute_stream
    def clip_by_value(self, optimizer: Optimizer, clip_value: float, scale: LossScale | None) -> None:
        self._collect_postponed(STEP_ENDS - 1)
        self._follow(self._updates.groups.index_of(optimizer))
        self._clipping.by_value(self._updates.groups.index_of(optimizer), clip_value, scale)

    @on_compute_stream
    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0, scale: LossScale | None = None) -> Tensor:
        """The global norm of an optimizer's gradients, over all ranks, wherever they are kept. Collective."""
        if self.steps_itself(optimizer):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            return total_norm([torch.linalg.vector_norm(each, norm_type) for each in gradients], norm_type)
        self._collect_postponed(STEP_ENDS - 2)
        self._follow(self._updates.groups.index_of(optimizer))
        return self._clipping.norm(self._updates.groups.index_of(optimizer), norm_type, scale)

    @on_compute_stream
    def zero_grad(self, optimizer: Optimizer, *, forget: bool) -> None:
        """Forgets the gradients of an optimizer's parameters; or they are about to be overwritten in place."""
        for _, flat in self._updates.groups.flats_of(self._updates.groups.index_of(optimizer)):
            if forget:
                flat.gradient.clear()
            else:
                flat.gradient.zero()

    @on_compute_stream
    def show_gradients(self, optimizer: Optimizer) -> None:
        """`.grad` of an optimizer's parameters shows what is in pages."""
        for _, flat in self._updates.groups.flats_of(self._updates.groups.index_of(optimizer)):
            flat.gradient.grad_attribute.show()

    @property
    def adds_up(self) -> bool:
        """Inside of `without_reduction`."""
        return self._adds_up

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Backward passes inside leave their gradients to be reduced with those of a later one, or at the step."""
        self._adds_up, before = True, self._adds_up
        try:
            with self._reduction.postponed():
                yield
        finally:
            self._adds_up = before

    def _follow(self, optimizer: int) -> None:
        """What the user has done to `.grad` of an optimizer's parameters counts."""
        for flat in (each for flats in self._flats for each in flats):
            flat.gradient.grad_attribute.resolve()
        for _, flat in self._updates.groups.flats_of(optimizer):
            flat.gradient.apply_user_changes()

    def _collect_postponed(self, position: int) -> None:
        """Reduces all gradients that are still in `.grad`, on all ranks, which meet at `position`."""
        self._barriers.reach_step(position)
        self._reduction.collect_postponed()
        if self._blueprint.holders.by_unit:
            self._barriers.reach(position)  # others may have more units to reduce: what follows may be collective
