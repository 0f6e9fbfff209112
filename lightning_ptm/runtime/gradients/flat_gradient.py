"""Where gradients wait between backward and update: in the parameters' `.grad`, or reduced, in pages of their own.

Owns the way of each trainable flat's gradient. Where it waits, and until when, its route says (gradient_route.py):

* **in place** (`Waits.IN_GRAD`): autograd accumulates into `.grad`; nothing is copied.
* **in pages** (all others): when a unit's backward has ended, its gradients are laid into a full flat, reduced to this rank's
  shard, added to what earlier micro-batches left there, and `.grad` is dropped.

What is in `.grad` and what the user does to it is grad_attribute.py's; the pages are gradient_shard.py's.

I1: a gradient is in exactly one place: what runs out of pages (CapacityError) has changed nothing and may be tried again.
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
    """Gradients of one trainable flat.

    Args:
        store: the flat's compute parameters.
        route: where the gradient waits.
        sharing: with which ranks.
        supply: where its pages come from; never asked where it waits in `.grad`.
        in_ram: adds what a device has to sums there; None: there is no device apart.
        stream: of the run; None: whatever is current.
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
    ) -> None:
        self.route = route
        self.store = store
        self._allocator = allocator
        self._sharing = sharing
        self.in_place = route.waits is Waits.IN_GRAD
        self.shard = GradientShard(store, route, allocator, supply, in_ram)
        self._content = self.shard.content
        self.grad_attribute = GradAttribute(store, route, self.shard, sharing, allocator.backend, stream)
        # state
        self.stepped = False
        """Whether a step has used what is here, which stays until it is forgotten (`outlives_step`)."""

    def reserve(self) -> None:
        """Takes the gradient pages, if this flat's gradients wait in pages between steps."""
        if not self.in_place:
            self.shard.reserve()

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether any parameter of the flat has a gradient."""
        return any(self.grad_attribute.present())

    def waits_for_step(self, *, used_are_forgotten: bool) -> bool:
        """Whether there is one outside of `.grad`, or of the way there, that no step has used.

        Args:
            used_are_forgotten: what a step has used and left in pages is forgotten before the next backward pass or step, so
                that it does not count.
        """
        if self.in_place or self.grad_attribute.used.any or self.grad_attribute.is_forgotten or not self.any:
            return False
        return not (used_are_forgotten and self.stepped and not any(self.grad_attribute.here()))

    def step_has_used(self) -> None:
        """A step has used what is here, which stays until it is forgotten."""
        self.stepped = self.any

    @property
    def bytes(self) -> int:
        """What this flat's gradient takes on this rank."""
        return self.store.layout.gradient_bytes

    @property
    def adds_in_pages(self) -> bool:
        """Whether sums over passes are made in pages, as a single device makes them in `.grad`."""
        return not self.in_place and self._sharing.needs_no_reduction

    # -- it comes -----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """The pages are about to be used: they get what the user has done to `.grad`, or has put there by hand.

        Raises:
            UsageError: several ranks hold the gradient; or a step has used it up.
        """
        grad_attribute = self.grad_attribute
        grad_attribute.used.check_forgotten()
        if self.in_place:
            return
        grad_attribute.follow_edits(stay=True)
        given = grad_attribute.assigned()
        if given:
            shown = grad_attribute.lay_aside(given)
            try:
                self.collect()
            except CapacityError:  # no plan counts gradients that users put there
                self.shard.settle()
                self.shard.give_units_up()
                self.collect()
            grad_attribute.show_again(shown)

    def collect(self, present: Sequence[bool] | None = None) -> None:
        """The unit's backward has ended: take the gradients out of the parameters. With several ranks, collective.

        Args:
            present: which parameters have a gradient on any rank; by default those that have one here.
        """
        self.grad_attribute.hide()
        if self.in_place:
            return
        self.grad_attribute.check_dense()
        here = self.grad_attribute.here()
        present = here if present is None else present
        if not any(present):
            return
        self.stepped = False
        self.shard.settle()
        layout, pages = self.store.layout, self.shard.reserve()
        if self._sharing.needs_no_reduction and pages.tier.computes:
            self.shard.add_where_they_are(self.grad_attribute.take)
            return
        full = self.shard.take("full gradient", layout.padded_numel)
        other: PagedTensor | None = None
        so_far: Sequence[PagedTensor] = ()
        try:
            if layout.shared:
                other = self.shard.take("reduced gradient", layout.shard_numel)
            else:
                so_far = self.shard.take_so_far()
        except CapacityError:
            self._allocator.release(full)
            raise
        self._lay_out(full.tensor(), here)
        self.grad_attribute.drop()
        self._content.comes_to_have(present)
        communicator, divisor = self.store.communicator, self._sharing.divisor
        if other is None:  # all ranks' tokens are in the gradient of an expert that is this one's
            communicator.reduce_scatter(full.tensor(), full.tensor(), layout, divisor).wait()
            self.shard.add(full, so_far)
            return
        work = communicator.reduce_scatter(full.tensor(), other.tensor(), layout, divisor)
        self.shard.arrives(work, full, other)

    def add_up(self, slot: int) -> None:
        """Before a further gradient of the same pass comes to a parameter: the one in `.grad` is added to the pages, where
        there is something to add it to, or sums have a wider dtype."""
        gradient = self.store.binding.parameters[slot].grad
        if gradient is None or isinstance(gradient, GradPlaceholder) or not (self._content.filled or self.shard.sums):
            return
        self.stepped = False
        self.shard.add_to_slot(slot, gradient)
        self.grad_attribute.take(slot)

    def _lay_out(self, full: Tensor, here: Sequence[bool]) -> None:
        if not all(here) or full.numel() != sum(slot.numel for slot in self.store.layout.slots):
            full.zero_()  # gaps, padding, and parameters without a gradient here
        binding, beside = self.store.binding, self.grad_attribute.beside
        for slot, grad in enumerate(binding.gradients()):
            sum_ = beside[slot]
            grad = None if isinstance(grad, GradPlaceholder) else grad  # of a step before
            if sum_ is not None:
                binding.arrangement.view(full, slot).copy_(sum_ if grad is None else sum_.add_(grad))
            elif grad is not None:
                binding.arrangement.view(full, slot).copy_(grad)

    # -- it is used ---------------------------------------------------------------------------------------------------

    def source(self) -> GradientSource:
        """What the update reads, once what is `leaving` has left."""
        if self.in_place:
            return ParameterGradients(self.store.binding.arrangement.in_orders(self._in_grad()))
        self.shard.land()
        if self.shard.pages is None or not self._content.filled:
            raise InternalError(f"flat {self.store.layout.index} has no gradient to update with")
        return ShardGradient(self.shard.pages, tuple(self._content.present))

    def _in_grad(self) -> list[Tensor | None]:
        gradients = self.store.binding.gradients()
        return [grad if here else None for grad, here in zip(gradients, self.grad_attribute.here(), strict=True)]

    def detach(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """Gives the gradient away: nothing of it is left here.

        Returns:
            The gradient, what it still waits for, and what gives its pages back.
        """
        source = self.source()
        if isinstance(source, ParameterGradients):
            self.hand_over()
            return source, (), _nothing
        return source, self.shard.leaving(), partial(self.shard.supply_back, self.shard.give_away())

    def duplicate(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """As `detach`, with a copy: the gradient stays here until it is cleared."""
        self.shard.settle()
        source = self.source()
        if isinstance(source, ParameterGradients):
            copies = [None if gradient is None else gradient.clone() for gradient in self._in_grad()]
            return ParameterGradients(self.store.binding.arrangement.in_orders(copies)), (), _nothing
        copy, transfer = self.shard.copy()
        present = tuple(self._content.present)
        return ShardGradient(copy, present), (transfer,), partial(self.shard.supply_back, copy)

    def used(self) -> None:
        """The update has read the gradients."""
        if self.route.waits is Waits.PASSING:
            self.shard.use_up()

    def hand_over(self) -> None:
        """A job has the gradients now and nobody else needs them: drop `.grad`, so that memory is free when it is done."""
        if self.in_place:
            self._content.spend_others(self.grad_attribute.here())
            self.grad_attribute.drop()

    def transform_(self, how: Transform) -> None:
        """Changes the gradients where they are."""
        if self.in_place:
            self.shard.before_change()
            for gradient in self._in_grad():
                if gradient is not None:
                    how.apply_(gradient)
            return
        with self.shard.changing() as values:
            how.apply_(values)
        self.grad_attribute.show_anew()

    def zero(self) -> None:
        """All gradients that there are become zero; those in `.grad` are the caller's to overwrite."""
        if self.in_place:
            self.shard.before_change()
            return
        self.shard.settle()
        for sum_ in self.grad_attribute.beside:
            if sum_ is not None:
                sum_.zero_()
        if self._content.filled:
            self.grad_attribute.follow_edits(stay=False)
            with self.shard.changing() as values:
                values.zero_()

    def clear(self) -> None:
        """Forgets all gradients (zero_grad, or the update has used them)."""
        self.stepped = False
        self.shard.settle()
        self.grad_attribute.forget()


def _nothing() -> None:
    """Gives nothing back."""
