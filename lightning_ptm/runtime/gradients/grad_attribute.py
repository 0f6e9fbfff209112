"""`.grad` of a flat's parameters: what autograd leaves there, what the user sees there, and what he does to it.

Owns what `.grad` shows while the gradient is in pages (grad_placeholder.py), and the sums that wait beside it. What
is in the pages is
gradient_shard.py's, what a step leaves used_gradients.py's.

I1: from the end of a backward pass to the next, `.grad` of a parameter whose gradient is in pages shows it. What the user
does to it (edits, assigns, sets to None) is carried out in the pages before they are used (`follow_edits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute, Waits
from lightning_ptm.runtime.gradients.grad_placeholder import GradPlaceholder
from lightning_ptm.runtime.gradients.gradient_shard import GradientShard
from lightning_ptm.runtime.gradients.used_gradients import UsedGradients, refuse_gradient
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.torch_internals import accumulation_hooks_of

if TYPE_CHECKING:
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.streams import ComputeStream
    from lightning_ptm.planning.sharding import ShardGroup

_EARLIER = "when it was of an earlier step"
_CLIPPED = "when it was to be clipped already, which the update does"
_BEFORE_CLIPPING = ", before clip_gradients is called (in configure_gradient_clipping: before super())"


class GradAttribute:
    """Of one flat.

    Args:
        store: the flat's compute parameters.
        shard: the pages, where the gradient waits in any.
        sharing: with which ranks.
        stream: of the run; None: whatever is current.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        shard: GradientShard,
        sharing: ShardGroup,
        backend: Backend,
        stream: ComputeStream | None = None,
    ) -> None:
        self._store = store
        self._binding = store.binding
        self._route = route
        self._in_place = route.waits is Waits.IN_GRAD
        self._shard = shard
        self._content = shard.content
        self._sharing = sharing
        self._backend = backend
        self._stream = stream
        self._names = [slot.spec.name for slot in store.layout.slots]
        self.used = UsedGradients(store.binding, self._names, shard)
        # state
        self.beside: list[Tensor | None] = [None] * len(store.layout.slots)
        """Sums of passes that the ranks have not reduced, shaped as the parameters (`postpone`). Others read it."""
        self._shown: dict[int, GradPlaceholder] = {}
        """By slot, what `.grad` is as long as the user leaves it alone."""
        self.clipped_later = False
        """Whether the update will clip what is here. Others read it."""
        self._to_clip: list[tuple[int, int] | None] = []
        """By slot, object and version of what was in `.grad` then, where it stays there."""

    # -- what is there ------------------------------------------------------------------------------------------------

    def here(self) -> list[bool]:
        """For each parameter of the flat, whether it has a gradient that was not collected."""
        return [
            (grad is not None and not isinstance(grad, GradPlaceholder)) or sum_ is not None
            for grad, sum_ in zip(self._binding.gradients(), self.beside, strict=True)
        ]

    def present(self) -> Sequence[bool]:
        """For each parameter of the flat, whether it has a gradient, in whatever place."""
        if self._in_place or not self._content.filled:
            here = self.here()
            return here if self._in_place else [a or b for a, b in zip(here, self._content.present, strict=True)]
        return tuple(self._content.present)

    @property
    def is_forgotten(self) -> bool:
        """Whether the user has set all of it to None, of which the pages do not know yet (`module.zero_grad()`)."""
        gradients = self._binding.gradients()
        return bool(self._shown) and not any(self.here()) and all(gradients[slot] is None for slot in self._shown)

    def check_dense(self) -> None:
        """Raises UsageError: a gradient is sparse."""
        for slot, grad in enumerate(self._binding.gradients()):
            if grad is not None and not isinstance(grad, GradPlaceholder):
                self._binding.arrangement.check_dense(slot, grad)

    def postpone(self) -> None:
        """The unit's backward has ended, and its gradients are to be reduced with those of a later one: they stay in `.grad`,
        where autograd adds to them, or where sums have a wider dtype, beside it."""
        if not self._shard.sums:
            return
        self.check_dense()
        for slot, sum_ in enumerate(self.beside):
            grad = self.take(slot)  # one by one: what has been added up is freed
            if grad is not None:
                self.beside[slot] = grad.to(self._route.dtype) if sum_ is None else sum_.add_(grad)

    def take(self, slot: int) -> Tensor | None:
        """What was in `.grad` is the current stream's, which reads it last; autograd may have made it on another one."""
        grad = self._binding.take_gradient(slot)
        if grad is not None and not isinstance(grad, GradPlaceholder):
            self._backend.record_use(grad)
        return grad

    def drop(self) -> None:
        """Gradients that were not collected are forgotten, or are elsewhere now."""
        for slot in range(len(self.beside)):
            self.take(slot)
            if slot in self._shown:
                self._shown.pop(slot).retire(partial(refuse_gradient, self._names[slot], _EARLIER))
        self.beside = [None] * len(self.beside)

    def forget(self) -> None:
        """All that is or was there is forgotten."""
        self.drop()
        self.used.forget()
        self.clipped_later = False
        self._content.forget()

    # -- what is shown ------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """A backward pass has ended: `.grad` shows what is in the pages (I1)."""
        if not self._in_place:
            self._shard.land()  # what is being reduced is in no pages yet
            for slot, parameter in enumerate(self._binding.parameters):
                if self._content.filled and self._content.present[slot] and parameter.grad is None:
                    shown = GradPlaceholder(parameter, partial(self._read, slot), self._backend)
                    parameter.grad = self._shown[slot] = shown
        self.used.pass_ended(self._shown)

    def show_anew(self) -> None:
        """The pages have other values now."""
        if self._shown:
            self.drop()
            self.show()

    def clip_later(self) -> None:
        """The update will clip what is here on its way, so `.grad` shows no values until then."""
        self.clipped_later = True
        self._to_clip = [_version(grad) for grad in self._binding.gradients()] if self._in_place else []
        self.show_anew()

    def check_not_edited(self) -> None:
        """Before the update clips what is here: a plain step would take as it is what was written behind the clipping.

        Raises:
            UsageError: something was.
        """
        if not self.clipped_later or not self._in_place:
            return
        for slot, (grad, then) in enumerate(zip(self._binding.gradients(), self._to_clip, strict=True)):
            if grad is not None and _version(grad) != then:
                refuse_gradient(self._names[slot], _CLIPPED, "changed", _BEFORE_CLIPPING)

    def resolve(self) -> None:
        """The user may have assigned what another parameter's `.grad` shows: it is a tensor of its own from now on. To be
        called of all flats before any of them changes."""
        for slot, grad in enumerate(self._binding.gradients()):
            if (
                isinstance(grad, GradPlaceholder)
                and grad is not self._shown.get(slot)
                and grad is not self.used.of(slot)
            ):
                self._binding.parameters[slot].grad = grad.clone()

    def hide(self) -> None:
        """A backward pass begins, which adds to `.grad`."""
        self.used.pass_begins()
        self._refuse_hooks_on_sums()
        if self._shown:
            self.follow_edits(stay=False)
        if self.clipped_later and not any(self.present()):  # forgotten one by one
            self.clipped_later = False

    def _refuse_hooks_on_sums(self) -> None:
        """A hook behind the accumulation of a gradient finds in `.grad` what is added to a sum that is elsewhere."""
        if not self._shown and not self.used.any and all(each is None for each in self.beside):
            return
        for slot, parameter in enumerate(self._binding.parameters):
            elsewhere = self.beside[slot] is not None or parameter.grad is self._shown.get(slot, self)
            elsewhere |= self.used.of_both(slot)
            if elsewhere and len(accumulation_hooks_of(parameter) or ()) > 1:  # one is the run's own
                raise UsageError(
                    f"{self._names[slot]} has a hook of register_post_accumulate_grad_hook, which "
                    f"would find the gradient of this backward pass alone in .grad: what earlier ones have added up is in "
                    f"pages; use register_hook, which gets each pass's gradient, or read .grad in on_after_backward"
                )

    # -- what the user does -------------------------------------------------------------------------------------------

    def assigned(self) -> list[int]:
        """Slots of parameters to whose `.grad` the user has assigned a gradient, or has added one by hand.

        Raises:
            UsageError: several ranks hold the gradient.
        """
        gradients = enumerate(self._binding.gradients())
        given = [slot for slot, grad in gradients if grad is not None and grad is not self._shown.get(slot)]
        if given:
            self._check_alone(given[0], "was assigned")
        return given

    def lay_aside(self, given: Sequence[int]) -> dict[int, GradPlaceholder]:
        """Nothing is shown until `show_again`, and what was assigned takes the place of what is in the pages."""
        shown, self._shown = self._shown, {}
        for slot in shown:
            self._binding.parameters[slot].grad = None
        for slot in given:  # a sum is not what was meant
            if self._content.present[slot]:
                self._shard.write(slot, None)
        return shown

    def show_again(self, shown: dict[int, GradPlaceholder]) -> None:
        """What was laid aside is shown by the same tensors as before."""
        for slot, each in shown.items():
            self._binding.parameters[slot].grad = self._shown[slot] = each
        self.show()

    def follow_edits(self, *, stay: bool) -> None:
        """What the user has done to what is shown is done to the pages.

        Args:
            stay: what is shown stays; else it goes, and gets no values any more.

        Raises:
            UsageError: several ranks hold the gradient, or it is to be clipped already.
        """
        for slot, shown in tuple(self._shown.items()):
            parameter = self._binding.parameters[slot]
            grad = parameter.grad
            if grad is shown:
                values = shown.held
                # What is written in place by way of a view leaves no other trace.
                if values is not None and not torch.equal(values, self._shard.value(slot, parameter)):
                    if self.clipped_later:
                        refuse_gradient(self._names[slot], _CLIPPED, "changed", _BEFORE_CLIPPING)
                    self._shard.write(slot, values)
                if not stay:
                    parameter.grad = None
            else:
                if grad is not None:
                    self._check_alone(slot, "was assigned")
                self._forget(slot)
            if not stay or grad is not shown:
                del self._shown[slot]
                shown.retire(partial(refuse_gradient, self._names[slot], _EARLIER))

    def _forget(self, slot: int) -> None:
        """The user has let go of a parameter's gradient."""
        self._content.forget_slot(slot)
        if not any(self._content.present):
            return
        if self._store.layout.shared:
            others = [self._binding.parameters[each] for each in self._shown if each != slot]
            if any(parameter.grad is not None for parameter in others):
                raise UsageError(
                    f"the gradient of {self._names[slot]} was set to None, in a flat that several ranks share and that holds "
                    f"others, too; use zero_grad of the optimizer, or make the module that holds it a unit of its own with "
                    f"units=[...]"
                )
            return  # all of them were
        self._shard.write(slot, None)

    def _read(self, slot: int) -> Tensor:
        self._check_alone(slot, "was read")
        if self.clipped_later:
            refuse_gradient(self._names[slot], _CLIPPED, then=_BEFORE_CLIPPING)
        # Whoever looks may do so on a stream that the run's never waits for: pages keep the order of the run's.
        with nullcontext() if self._stream is None else self._stream.entered():
            value = self._shard.value(slot, self._binding.parameters[slot])
        self._backend.record_use(value)
        return value

    # -- behind a step ------------------------------------------------------------------------------------------------

    def retire(self, *, clipped: bool, scratch: bool = False) -> None:
        """A step has used the gradient, which Lightning forgets next. What is left of it is no plain loop's: it is gone, or
        was clipped on its way to the update.

        Args:
            clipped: the update has done something to it.
            scratch: so has the optimizer's class, to a copy.
        """
        untouched = self._in_place and not scratch and (self._route.clips_in_place or not clipped)
        used = self._content.spent or (() if untouched else self.present())
        for slot in range(len(self._names)):
            if slot in self._shown:
                self.used.leave(slot, self._shown.pop(slot))
            elif used and used[slot]:
                self.used.leave(slot, None)

    def let_go(self) -> None:
        """The run is over: `.grad` is an ordinary tensor where somebody has looked at it, with its parameter's device and
        dtype, and None where it was in pages. What was in `.grad` itself goes where its parameter has gone, as with
        `module.cpu()`."""
        for parameter in self._binding.parameters:
            left = parameter.grad
            if isinstance(left, GradPlaceholder):
                left = parameter.grad = None if left.held is None else left.held.to(parameter.device, parameter.dtype)
            if left is not None and left.device != parameter.device:
                parameter.grad = left.to(parameter.device, parameter.dtype)

    # -- refusals -----------------------------------------------------------------------------------------------------

    def _check_alone(self, slot: int, what: str) -> None:
        if not self._sharing.alone:
            raise UsageError(
                f".grad of {self._names[slot]} {what}, and each of several ranks has a part of that "
                f"gradient alone; clip with gradient_clip_val or self.clip_gradients, and take the norm from "
                f"trainer.strategy.gradient_norm(optimizer)"
            )


def _version(grad: Tensor | None) -> tuple[int, int] | None:
    """Which tensor it is, and how often it has changed."""
    return None if grad is None else (id(grad), grad._version)
