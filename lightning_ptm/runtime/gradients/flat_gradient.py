"""The gradient of a flat between backward and update: in the parameters' `.grad`, or reduced and in pages of its own.

Owns how each trainable flat's gradient moves. The flat's route (gradient_route.py) says where the gradient waits, and
until when:

* **in place** (`Waits.IN_GRAD`): autograd accumulates into `.grad`; nothing is copied.
* **in pages** (all others): at the end of a unit's backward, its gradients are copied into a full flat, reduced to this
  rank's shard and added to the sum of earlier micro-batches, and `.grad` is dropped.

The contents of `.grad`, and the user's changes to it, belong to view.py; the pages belong to store.py.

I1: a gradient is in exactly one place: an operation that runs out of pages (CapacityError) has changed nothing and may
    be retried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lightning_ptm.errors import CapacityError, InternalError, UsageError
from lightning_ptm.planning.plan import GradientBuffer
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute, Until, Waits
from lightning_ptm.runtime.gradients.state import COLLECTED, SUMS, GradEvent, GradientRecord, GradientState
from lightning_ptm.runtime.gradients.store import GradientShard
from lightning_ptm.runtime.gradients.view import GradView
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.update.gradient_source import GradientSource, ParameterGradients, ShardGradient, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.streams import ComputeStream
    from lightning_ptm.memory.transfer import Transfer
    from lightning_ptm.planning.sharding import ShardGroup
    from lightning_ptm.runtime.gradients.store import Addition, HostAccumulator, InFlight, PageSupply


@dataclasses.dataclass(frozen=True, slots=True)
class CarriedGradient:
    """A flat's gradient between two layouts of a run.

    Attributes:
        present: for each parameter, whether it has a gradient.
        stepped: whether a step has used it.
    """

    values: Tensor
    present: Sequence[bool]
    stepped: bool


class FlatGradient:
    """The gradient of one trainable flat.

    Args:
        store: the flat's compute parameters.
        route: where the gradient waits.
        sharing: the ranks that share the gradient.
        supply: source of the gradient pages; not used if the gradient waits in `.grad`.
        in_flight: the run's gradients that are in flight.
        in_ram: adds gradients of a device to sums in RAM; None: the device has no memory of its own.
        stream: the run's compute stream; None: the current one.
        before_change, evict_idle_unit: see `GradientShard`.
        divided: see `GradView`.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        allocator: Allocator,
        sharing: ShardGroup,
        supply: PageSupply,
        in_flight: InFlight,
        in_ram: HostAccumulator | None = None,
        stream: ComputeStream | None = None,
        *,
        before_change: Callable[[], None] = lambda: None,
        evict_idle_unit: Callable[[], bool] = lambda: False,
        divided: bool = False,
    ) -> None:
        self.route = route
        self.store = store
        self._allocator = allocator
        self._sharing = sharing
        self.in_place = route.waits is Waits.IN_GRAD
        self.recorded = GradientRecord(f"flat {store.layout.index}", len(store.layout.slots))
        self.shard = GradientShard(
            store,
            route,
            self.recorded,
            allocator,
            supply,
            in_flight,
            in_ram,
            before_change=before_change,
            evict_idle_unit=evict_idle_unit,
        )
        self.view = GradView(
            store, route, self.recorded, self.shard, sharing, allocator.backend, stream, divided=divided
        )

    def reserve(self) -> None:
        """Takes the gradient pages, if this flat's gradient waits in pages between steps."""
        if not self.in_place:
            self.shard.reserve()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether any parameter of the flat has a gradient that no update of this step has got."""
        return (not self.in_place and self.recorded.state in COLLECTED) or any(self.view.uncollected())

    @property
    def handed(self) -> bool:
        """Whether an update of the step in progress has got the gradient."""
        return self.recorded.state is GradientState.HANDED

    def waits_for_step(self, *, used_are_forgotten: bool) -> bool:
        """Whether a gradient that no step has used is in pages, or on its way there.

        Args:
            used_are_forgotten: a used gradient in pages is forgotten before the next backward pass or step, so it does
                not count.
        """
        if self.in_place or self.view.used or self.view.is_forgotten or not self.any:
            return False
        stepped = self.recorded.state is GradientState.STEPPED and not any(self.view.uncollected())
        return not (used_are_forgotten and stepped)

    @property
    def can_be_carried(self) -> bool:
        """Whether the gradient is in pages alone, as its sum, until the user clears it, so that `carried` has all of it."""
        in_pages = not self.in_place and self.recorded.state in COLLECTED and self.route.until is Until.CLEARED
        return in_pages and not self.view.clipped_later and not any(self.view.uncollected())

    def carried(self) -> CarriedGradient:
        """Returns a copy of the gradient in RAM, with the user's changes, for the next layout of the run."""
        self.apply_user_changes()
        values = self.shard.on_device().to("cpu", copy=True)
        self.shard.settle()
        return CarriedGradient(values, tuple(self.recorded.present), self.recorded.state is GradientState.STEPPED)

    def carry(self, carried: CarriedGradient) -> None:
        """Makes a gradient of the layout before that of this flat, which has none."""
        if self.in_place:
            self.view.carry(carried.values, carried.present)
            return
        self.shard.reserve()
        with self.shard.changing() as values:
            values.copy_(carried.values)
        self.recorded.send(GradEvent.ADD, carried.present)
        if carried.stepped:
            self.recorded.send(GradEvent.HAND)
            self.recorded.send(GradEvent.KEEP)
        self.view.show()

    @property
    def bytes(self) -> int:
        """Size of this flat's gradient on this rank."""
        return self.store.layout.gradient_bytes

    @property
    def adds_in_pages(self) -> bool:
        """Whether gradients of several passes are summed in pages, as plain PyTorch sums them in `.grad`."""
        return not self.in_place and self._sharing.needs_no_reduction

    # -- collecting ----------------------------------------------------------------------------------------------------

    def apply_user_changes(self) -> None:
        """Applies the user's edits of `.grad`, and gradients assigned to it, to the pages before these are used.

        Raises:
            UsageError: other ranks share the gradient or have other parameters, or a step has used it.
        """
        self.view.check_forgotten()
        self.view.check_withheld()
        if not self.in_place:
            self.view.apply_edits(stay=True)
            given = self.view.assigned()
            if given:
                self._check_not_handed()
                self.view.apply_assigned(given)

    def collect(self, present: Sequence[bool] | None = None) -> None:
        """Moves the gradients from the parameters to the pages at the end of the unit's backward.

        Collective if several ranks share the gradient.

        Args:
            present: which parameters have a gradient on any rank; by default, those that have one here.
        """
        self.view.hide()
        if self.in_place:
            return
        self.view.check_dense()
        here = self.view.uncollected()
        present = here if present is None else present
        if not any(present):
            return
        self._check_not_handed()
        self.shard.settle()
        layout, pages = self.store.layout, self.shard.reserve()
        if self._sharing.needs_no_reduction and pages.tier.computes:
            self.shard.add_on_device(self.view.take)
            return
        # The plan has no buffer beside pages on the device that hold the gradient until its update.
        fresh = self.recorded.state not in SUMS and not self.shard.widens
        to_pages = layout.shared and self.route.waits is Waits.PASSING and pages.tier.computes and fresh
        full = self.shard.take(GradientBuffer.FULL, layout.padded_numel)
        other: PagedTensor | None = None
        so_far: Sequence[PagedTensor] = ()
        try:
            if to_pages:
                other = pages
            elif layout.shared:
                other = self.shard.take(GradientBuffer.REDUCED, layout.shard_numel)
            else:
                so_far = self.shard.take_sum_buffers()
        except CapacityError:
            self._allocator.release(full)
            raise
        self.view.lay_out(full.tensor())
        self.view.drop()
        divisor = self._sharing.divisor
        if other is None:  # no rank has a part in it; that of an expert covers the tokens of all ranks already
            if divisor != 1:
                full.tensor().div_(divisor)
            self.shard.add(full, so_far, present)
            return
        work = self.store.communicator.reduce_scatter(full.tensor(), other.tensor(), layout, divisor)
        self.shard.reduction_started(work, full, None if to_pages else other, present)

    def _check_not_handed(self) -> None:
        if self.handed:
            raise UsageError(
                f"gradients arrived for {self.store.layout.slots[0].spec.name} and the parameters that are updated with "
                "it after their update of this step had begun, in the backward pass of the loss, so they would be lost; "
                "run that backward pass before, or after the optimizer's step"
            )

    def add_up(self, slot: int) -> None:
        """Adds a parameter's `.grad` to the pages before autograd computes a further gradient of the same pass.

        Does nothing if the pages hold no gradient and the sum has no wider dtype: then autograd adds in `.grad`.
        """
        self.view.withdraw_shown()
        gradient = self.view.gradients()[slot]
        if gradient is None or not (self.recorded.state in SUMS or self.shard.widens):
            return
        self.shard.add_to_slot(slot, gradient)
        self.view.take(slot)

    # -- using ---------------------------------------------------------------------------------------------------------

    def source(self) -> GradientSource:
        """The gradient as the update reads it; transfers into the pages (`transfers`) may still run."""
        if self.in_place:
            return ParameterGradients(self.store.binding.arrangement.in_orders(self.view.gradients()))
        self.shard.finish_reduction()
        if self.shard.pages is None or self.recorded.state not in SUMS:
            raise InternalError(f"flat {self.store.layout.index} has no gradient to update with")
        return ShardGradient(self.shard.pages, tuple(self.recorded.present))

    def detach(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """Moves the gradient to the caller; this object then holds none.

        Returns:
            The gradient, the transfers that it still waits for, and a function that returns its pages.
        """
        source = self.source()
        self.hand_over()
        if isinstance(source, ParameterGradients):
            self.drop_handed()
            return source, (), _nothing
        return source, self.shard.transfers(), partial(self.shard.return_pages, self.shard.give_away())

    def duplicate(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """Copies the gradient for the caller, as `detach`, but keeps this gradient until it is cleared."""
        self.shard.settle()
        source = self.source()
        if isinstance(source, ParameterGradients):
            copies = [None if gradient is None else gradient.clone() for gradient in self.view.gradients()]
            self.hand_over()
            return ParameterGradients(self.store.binding.arrangement.in_orders(copies)), (), _nothing
        copy, transfer = self.shard.copy()
        self.hand_over()
        present = tuple(self.recorded.present)
        return ShardGradient(copy, present), (transfer,), partial(self.shard.return_pages, copy)

    def used(self) -> None:
        """Records that the update has read the gradient."""
        if self.route.waits is Waits.PASSING:
            self.shard.use_up()

    def hand_over(self) -> None:
        """Records that an update of the step in progress has got the gradient."""
        self.recorded.send(GradEvent.HAND, self.view.uncollected() if self.in_place else None)
        if not self.in_place and in_backward():
            self.view.show_handed()

    def drop_handed(self, given: GradientSource | None = None) -> None:
        """Drops `.grad` once a job holds the gradients, so that their memory is free when the job ends.

        Args:
            given: what the job holds and forgets on its own stream, behind all that is queued here; None: unknown.
        """
        if self.in_place:
            self.view.drop(held=given.storages() if isinstance(given, ParameterGradients) else ())
            if self.handed and in_backward():
                self.view.show_handed()

    def step_ends(self, *, clipped: bool, scratch: bool) -> None:
        """Records that the step in progress is over: it has used what its update got.

        Args:
            clipped: the update has changed its copy of the gradient.
            scratch: the optimizer's class has changed a copy of the gradient.
        """
        if self.recorded.state is not GradientState.HANDED:
            return
        self.view.check_handed()
        if self.route.until is Until.CLEARED and not scratch:
            self.view.withdraw_handed()
            self.recorded.send(GradEvent.KEEP)
        else:
            self.view.retire(clipped=clipped, scratch=scratch)

    def give_up_step(self) -> None:
        """Records that the step in progress is given up or left out; what its update got was applied."""
        if self.recorded.state is GradientState.HANDED:
            self.view.withdraw_handed()
            self.recorded.send(GradEvent.GIVE_UP)

    def transform_(self, how: Transform) -> None:
        """Applies a transform to the gradients in place."""
        if self.in_place:
            self.shard.before_change()
            for gradient in self.view.gradients():
                if gradient is not None:
                    how.apply_(gradient)
            return
        with self.shard.changing() as values:
            how.apply_(values)
        self.view.refresh()

    def zero(self) -> None:
        """Sets all gradients in pages to zero; the caller overwrites those in `.grad`."""
        if self.in_place:
            self.shard.before_change()
            return
        self.shard.settle()
        self.view.zero_sums()
        if self.recorded.state in SUMS:
            if self.view.read_bytes():
                self.shard.before_change()  # before edits are compared: a fused optimizer may write gradients
            self.view.apply_edits(stay=False)
            with self.shard.changing() as values:
                values.zero_()

    def clear(self) -> None:
        """Forgets all gradients (zero_grad, or the update has used them)."""
        self.view.forget()


def _nothing() -> None:
    """Returns nothing to any pool: the gradient had no pages."""
