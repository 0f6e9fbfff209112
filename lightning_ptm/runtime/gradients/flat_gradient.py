"""The gradient of a flat between backward and update: in the parameters' `.grad`, or reduced and in pages of its own.

Owns how each trainable flat's gradient moves. The flat's route (gradient_route.py) says where the gradient waits, and
until when:

* **in place** (`Waits.IN_GRAD`): autograd accumulates into `.grad`; nothing is copied.
* **in pages** (all others): at the end of a unit's backward, its gradients are copied into a full flat, reduced to this
  rank's shard and added to the sum of earlier micro-batches, and `.grad` is dropped.

The contents of `.grad`, and the user's changes to it, belong to grad_attribute.py; the pages belong to
gradient_shard.py.

I1: a gradient is in exactly one place: an operation that runs out of pages (CapacityError) has changed nothing and may
    be retried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute, Waits
from lightning_ptm.runtime.gradients.grad_attribute import GradAttribute
from lightning_ptm.runtime.gradients.grad_placeholder import GradPlaceholder
from lightning_ptm.runtime.gradients.gradient_shard import GradientShard
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.update.gradient_source import GradientSource, ParameterGradients, ShardGradient, Transform

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.streams import ComputeStream
    from lightning_ptm.memory.transfer import Transfer
    from lightning_ptm.planning.sharding import ShardGroup
    from lightning_ptm.runtime.gradients.gradient_pages import PageSupply
    from lightning_ptm.runtime.gradients.host_accumulate import Addition, HostAccumulator


class FlatGradient:
    """The gradient of one trainable flat.

    Args:
        store: the flat's compute parameters.
        route: where the gradient waits.
        sharing: the ranks that share the gradient.
        supply: source of the gradient pages; not used if the gradient waits in `.grad`.
        in_ram: adds gradients of a device to sums in RAM; None: the device has no memory of its own.
        stream: the run's compute stream; None: the current one.
        before_change, release_idle_units: see `GradientShard`.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        allocator: Allocator,
        sharing: ShardGroup,
        supply: PageSupply,
        in_ram: HostAccumulator | None = None,
        stream: ComputeStream | None = None,
        *,
        before_change: Callable[[], None] = lambda: None,
        release_idle_units: Callable[[], None] = lambda: None,
    ) -> None:
        self.route = route
        self.store = store
        self._allocator = allocator
        self._sharing = sharing
        self.in_place = route.waits is Waits.IN_GRAD
        self.shard = GradientShard(
            store,
            route,
            allocator,
            supply,
            in_ram,
            before_change=before_change,
            release_idle_units=release_idle_units,
        )
        self._content = self.shard.content
        self.grad_attribute = GradAttribute(store, route, self.shard, sharing, allocator.backend, stream)
        # state
        self.stepped = False
        """Whether a step has used the gradient, which stays until it is forgotten (`outlives_step`)."""

    def reserve(self) -> None:
        """Takes the gradient pages, if this flat's gradient waits in pages between steps."""
        if not self.in_place:
            self.shard.reserve()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether any parameter of the flat has a gradient."""
        return any(self.grad_attribute.present())

    def waits_for_step(self, *, used_are_forgotten: bool) -> bool:
        """Whether a gradient that no step has used is in pages, or on its way there.

        Args:
            used_are_forgotten: a used gradient in pages is forgotten before the next backward pass or step, so it does
                not count.
        """
        if self.in_place or self.grad_attribute.used.any or self.grad_attribute.is_forgotten or not self.any:
            return False
        return not (used_are_forgotten and self.stepped and not any(self.grad_attribute.uncollected()))

    def step_has_used(self) -> None:
        """Records that a step has used the gradient, which stays until it is forgotten."""
        self.stepped = self.any

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
            UsageError: several ranks share the gradient, or a step has used it.
        """
        grad_attribute = self.grad_attribute
        grad_attribute.used.check_forgotten()
        if self.in_place:
            return
        grad_attribute.apply_edits(stay=True)
        given = grad_attribute.assigned()
        if given:
            shown = grad_attribute.set_aside(given)
            try:
                self.collect()
            except CapacityError:  # no plan counts gradients that users assign
                self.shard.settle()
                self.shard.release_idle_units()
                self.collect()
            grad_attribute.show_set_aside(shown)

    def collect(self, present: Sequence[bool] | None = None) -> None:
        """Moves the gradients from the parameters to the pages at the end of the unit's backward.

        Collective if several ranks share the gradient.

        Args:
            present: which parameters have a gradient on any rank; by default, those that have one here.
        """
        self.grad_attribute.hide()
        if self.in_place:
            return
        self.grad_attribute.check_dense()
        here = self.grad_attribute.uncollected()
        present = here if present is None else present
        if not any(present):
            return
        self.stepped = False
        self.shard.settle()
        layout, pages = self.store.layout, self.shard.reserve()
        if self._sharing.needs_no_reduction and pages.tier.computes:
            self.shard.add_on_device(self.grad_attribute.take)
            return
        full = self.shard.take("full gradient", layout.padded_numel)
        other: PagedTensor | None = None
        so_far: Sequence[PagedTensor] = ()
        try:
            if layout.shared:
                other = self.shard.take("reduced gradient", layout.shard_numel)
            else:
                so_far = self.shard.take_sum_buffers()
        except CapacityError:
            self._allocator.release(full)
            raise
        self._lay_out(full.tensor(), here)
        self.grad_attribute.drop()
        self._content.add_present(present)
        communicator, divisor = self.store.communicator, self._sharing.divisor
        if other is None:  # an expert of this rank alone: its gradient covers the tokens of all ranks already
            communicator.reduce_scatter(full.tensor(), full.tensor(), layout, divisor).wait()
            self.shard.add(full, so_far)
            return
        work = communicator.reduce_scatter(full.tensor(), other.tensor(), layout, divisor)
        self.shard.reduction_started(work, full, other)

    def add_up(self, slot: int) -> None:
        """Adds a parameter's `.grad` to the pages before autograd computes a further gradient of the same pass.

        Does nothing if the pages hold no gradient and the sum has no wider dtype: then autograd adds in `.grad`.
        """
        gradient = self.store.binding.parameters[slot].grad
        if gradient is None or isinstance(gradient, GradPlaceholder) or not (self._content.filled or self.shard.widens):
            return
        self.stepped = False
        self.shard.add_to_slot(slot, gradient)
        self.grad_attribute.take(slot)

    def _lay_out(self, full: Tensor, here: Sequence[bool]) -> None:
        if not all(here) or full.numel() != sum(slot.numel for slot in self.store.layout.slots):
            full.zero_()  # zeros for gaps, padding, and parameters without a gradient here
        binding, partial_sums = self.store.binding, self.grad_attribute.partial_sums
        for slot, grad in enumerate(binding.gradients()):
            sum_ = partial_sums[slot]
            grad = None if isinstance(grad, GradPlaceholder) else grad  # a placeholder left by an earlier step
            if sum_ is not None:
                binding.arrangement.view(full, slot).copy_(sum_ if grad is None else sum_.add_(grad))
            elif grad is not None:
                binding.arrangement.view(full, slot).copy_(grad)

    # -- using ---------------------------------------------------------------------------------------------------------

    def source(self) -> GradientSource:
        """The gradient as the update reads it; transfers into the pages (`transfers`) may still run."""
        if self.in_place:
            return ParameterGradients(self.store.binding.arrangement.in_orders(self._in_grad()))
        self.shard.finish_reduction()
        if self.shard.pages is None or not self._content.filled:
            raise InternalError(f"flat {self.store.layout.index} has no gradient to update with")
        return ShardGradient(self.shard.pages, tuple(self._content.present))

    def _in_grad(self) -> list[Tensor | None]:
        gradients = self.store.binding.gradients()
        return [grad if here else None for grad, here in zip(gradients, self.grad_attribute.uncollected(), strict=True)]

    def detach(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """Gives the gradient away: nothing of it stays here.

        Returns:
            The gradient, the transfers that it still waits for, and a function that returns its pages.
        """
        source = self.source()
        if isinstance(source, ParameterGradients):
            self.hand_over()
            return source, (), _nothing
        return source, self.shard.transfers(), partial(self.shard.return_pages, self.shard.give_away())

    def duplicate(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """As `detach`, with a copy: the gradient stays here until it is cleared."""
        self.shard.settle()
        source = self.source()
        if isinstance(source, ParameterGradients):
            copies = [None if gradient is None else gradient.clone() for gradient in self._in_grad()]
            return ParameterGradients(self.store.binding.arrangement.in_orders(copies)), (), _nothing
        copy, transfer = self.shard.copy()
        present = tuple(self._content.present)
        return ShardGradient(copy, present), (transfer,), partial(self.shard.return_pages, copy)

    def used(self) -> None:
        """Records that the update has read the gradient."""
        if self.route.waits is Waits.PASSING:
            self.shard.use_up()

    def hand_over(self) -> None:
        """Drops `.grad` once a job holds the gradients, so that their memory is free when the job ends."""
        if self.in_place:
            self._content.spend_uncollected(self.grad_attribute.uncollected())
            self.grad_attribute.drop()

    def transform_(self, how: Transform) -> None:
        """Applies a transform to the gradients in place."""
        if self.in_place:
            self.shard.before_change()
            for gradient in self._in_grad():
                if gradient is not None:
                    how.apply_(gradient)
            return
        with self.shard.changing() as values:
            how.apply_(values)
        self.grad_attribute.refresh()

    def zero(self) -> None:
        """Sets all gradients in pages to zero; the caller overwrites those in `.grad`."""
        if self.in_place:
            self.shard.before_change()
            return
        self.shard.settle()
        for sum_ in self.grad_attribute.partial_sums:
            if sum_ is not None:
                sum_.zero_()
        if self._content.filled:
            self.grad_attribute.apply_edits(stay=False)
            with self.shard.changing() as values:
                values.zero_()

    def clear(self) -> None:
        """Forgets all gradients (zero_grad, or the update has used them)."""
        self.stepped = False
        self.shard.settle()
        self.grad_attribute.forget()


def _nothing() -> None:
    """Returns nothing to any pool: the gradient had no pages."""
