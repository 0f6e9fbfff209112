"""The `.grad` attribute of a flat's parameters: what autograd puts there, what users see there and what they change.

Owns what `.grad` shows while the gradient is in pages (grad_placeholder.py), and sums that are kept in addition to
`.grad`. The pages belong to gradient_shard.py, and the tensors that a step leaves in `.grad` to used_gradients.py.

I1: from the end of a backward pass to the next, `.grad` of a parameter whose gradient is in pages shows it. Changes by
    the user (edits, assignments, None) are applied to the pages before these are used (`apply_edits`).
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
from lightning_ptm.torch_internals import accumulation_hooks_of, version_of

if TYPE_CHECKING:
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.streams import ComputeStream
    from lightning_ptm.planning.sharding import ShardGroup

_EARLIER = "when it was of an earlier step"
_CLIPPED = "when it was clipped already, and the update does the clipping"
_BEFORE_CLIPPING = ", before clip_gradients is called (in configure_gradient_clipping: before super())"


class GradAttribute:
    """`.grad` of the parameters of one flat.

    Args:
        store: the flat's compute parameters.
        shard: the gradient pages, if the gradient waits in pages.
        sharing: the ranks that share the gradient.
        stream: the run's compute stream; None: the current one.
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
        self.partial_sums: list[Tensor | None] = [None] * len(store.layout.slots)
        """By slot, the sums of passes that the ranks have not reduced, shaped as the parameters (`postpone`). Read by
        others."""
        self._shown: dict[int, GradPlaceholder] = {}
        """By slot, the placeholder in `.grad`, while the user leaves it alone."""
        self.clipped_later = False
        """Whether the update will clip this gradient. Read by others."""
        self._to_clip: list[tuple[int, int] | None] = []
        """By slot, object and version of `.grad` when clipping was decided, where `.grad` stays in place."""

    # -- state ---------------------------------------------------------------------------------------------------------

    def uncollected(self) -> list[bool]:
        """For each parameter of the flat, whether it has a gradient that is not collected yet."""
        return [
            (grad is not None and not isinstance(grad, GradPlaceholder)) or sum_ is not None
            for grad, sum_ in zip(self._binding.gradients(), self.partial_sums, strict=True)
        ]

    def present(self) -> Sequence[bool]:
        """For each parameter of the flat, whether it has a gradient, collected or not."""
        if self._in_place or not self._content.filled:
            here = self.uncollected()
            return here if self._in_place else [a or b for a, b in zip(here, self._content.present, strict=True)]
        return tuple(self._content.present)

    @property
    def is_forgotten(self) -> bool:
        """Whether the user has set every shown `.grad` to None (`module.zero_grad()`) while the pages hold gradients."""
        gradients = self._binding.gradients()
        return (
            bool(self._shown) and not any(self.uncollected()) and all(gradients[slot] is None for slot in self._shown)
        )

    def check_dense(self) -> None:
        """Raises UsageError if a gradient is sparse."""
        for slot, grad in enumerate(self._binding.gradients()):
            if grad is not None and not isinstance(grad, GradPlaceholder):
                self._binding.arrangement.check_dense(slot, grad)

    def postpone(self) -> None:
        """Leaves the gradients of a unit whose backward has ended to a later reduction.

        They stay in `.grad`, where autograd adds to them, or, if sums have a wider dtype, are added to a separate sum.
        """
        if not self._shard.widens:
            return
        self.check_dense()
        for slot, sum_ in enumerate(self.partial_sums):
            grad = self.take(slot)  # one by one, so that each `.grad` is freed once it is added
            if grad is not None:
                self.partial_sums[slot] = grad.to(self._route.dtype) if sum_ is None else sum_.add_(grad)

    def take(self, slot: int) -> Tensor | None:
        """Removes and returns `.grad`. The current stream reads it last; autograd may have made it on another one."""
        grad = self._binding.take_gradient(slot)
        if grad is not None and not isinstance(grad, GradPlaceholder):
            self._backend.record_use(grad)
        return grad

    def drop(self) -> None:
        """Removes gradients that are not collected, and the placeholders."""
        for slot in range(len(self.partial_sums)):
            self.take(slot)
            if slot in self._shown:
                self._shown.pop(slot).retire(partial(refuse_gradient, self._names[slot], _EARLIER))
        self.partial_sums = [None] * len(self.partial_sums)

    def forget(self) -> None:
        """Forgets all gradients, wherever they are."""
        self.drop()
        self.used.forget()
        self.clipped_later = False
        self._content.forget()

    # -- showing gradients in pages ------------------------------------------------------------------------------------

    def show(self) -> None:
        """Shows the gradients in the pages in `.grad` after a backward pass (I1)."""
        if not self._in_place:
            self._shard.finish_reduction()  # a reduction in flight is not in the pages yet
            for slot, parameter in enumerate(self._binding.parameters):
                if self._content.filled and self._content.present[slot] and parameter.grad is None:
                    shown = GradPlaceholder(parameter, partial(self._read, slot), self._backend)
                    parameter.grad = self._shown[slot] = shown
        self.used.pass_ended(self._shown)

    def refresh(self) -> None:
        """Replaces the placeholders after the values in the pages have changed."""
        if self._shown:
            self.drop()
            self.show()

    def clip_later(self) -> None:
        """Marks the gradient as clipped by the update; until then `.grad` shows no values."""
        self.clipped_later = True
        self._to_clip = [_version(grad) for grad in self._binding.gradients()] if self._in_place else []
        self.refresh()

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
        """Replaces a placeholder that the user assigned to another parameter's `.grad` by a tensor of its own.

        Must be called for all flats before any of them changes.
        """
        for slot, grad in enumerate(self._binding.gradients()):
            if (
                isinstance(grad, GradPlaceholder)
                and grad is not self._shown.get(slot)
                and grad is not self.used.of(slot)
            ):
                self._binding.parameters[slot].grad = grad.clone()

    def hide(self) -> None:
        """Removes placeholders from `.grad` before a backward pass, which adds to `.grad`."""
        self.used.pass_begins()
        self._refuse_hooks_on_sums()
        if self._shown:
            self.apply_edits(stay=False)
        if self.clipped_later and not any(self.present()):  # the user has set all of them to None one by one
            self.clipped_later = False

    def _refuse_hooks_on_sums(self) -> None:
        """Refuses post-accumulate hooks where `.grad` would hold only this pass's part of a sum that is in pages."""
        if not self._shown and not self.used.any and all(each is None for each in self.partial_sums):
            return
        for slot, parameter in enumerate(self._binding.parameters):
            is_partial = self.partial_sums[slot] is not None or parameter.grad is self._shown.get(slot, self)
            is_partial |= self.used.is_mixed_sum(slot)
            # the engine itself has registered one
            if is_partial and len(accumulation_hooks_of(parameter) or ()) > 1:
                raise UsageError(
                    f"{self._names[slot]} has a hook of register_post_accumulate_grad_hook, which would find only "
                    "this backward pass's gradient in .grad, since the sum of earlier passes is in pages; use "
                    "register_hook, which gets each pass's gradient, or read .grad in on_after_backward"
                )

    # -- changes by the user -------------------------------------------------------------------------------------------

    def assigned(self) -> list[int]:
        """Slots of parameters to whose `.grad` the user has assigned a gradient or added one.

        Raises:
            UsageError: several ranks share the gradient.
        """
        gradients = enumerate(self._binding.gradients())
        given = [slot for slot, grad in gradients if grad is not None and grad is not self._shown.get(slot)]
        if given:
            self._check_alone(given[0], "was assigned")
        return given

    def set_aside(self, given: Sequence[int]) -> dict[int, GradPlaceholder]:
        """Removes the placeholders until `show_set_aside`.

        The pages of parameters to which the user assigned a gradient are set to zero.
        """
        shown, self._shown = self._shown, {}
        for slot in shown:
            self._binding.parameters[slot].grad = None
        for slot in given:  # the assigned gradient replaces the one in the pages
            if self._content.present[slot]:
                self._shard.write(slot, None)
        return shown

    def show_set_aside(self, shown: dict[int, GradPlaceholder]) -> None:
        """Puts the placeholders of `set_aside` back into `.grad`."""
        for slot, each in shown.items():
            self._binding.parameters[slot].grad = self._shown[slot] = each
        self.show()

    def apply_edits(self, *, stay: bool) -> None:
        """Applies the user's changes of the placeholders to the pages.

        Args:
            stay: the placeholders stay; otherwise they are removed, and fetch no values any more.

        Raises:
            UsageError: several ranks share the gradient, or the update will clip it.
        """
        for slot, shown in tuple(self._shown.items()):
            parameter = self._binding.parameters[slot]
            grad = parameter.grad
            if grad is shown:
                values = shown.fetched_values
                # Values are compared, since a write through a view leaves no other trace.
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
        """Forgets the gradient of a parameter whose `.grad` the user set to None or replaced."""
        self._content.forget_slot(slot)
        if not any(self._content.present):
            return
        if self._store.layout.shared:
            others = [self._binding.parameters[each] for each in self._shown if each != slot]
            if any(parameter.grad is not None for parameter in others):
                raise UsageError(
                    f"the gradient of {self._names[slot]} was set to None on several ranks, where the gradients of a unit "
                    "are stored together, so one of them cannot be dropped alone; use zero_grad of the optimizer, or "
                    "make the module that holds it a unit of its own with units=[...]"
                )
            return  # the user has set all gradients of the flat to None
        self._shard.write(slot, None)

    def _read(self, slot: int) -> Tensor:
        self._check_alone(slot, "was read")
        if self.clipped_later:
            refuse_gradient(self._names[slot], _CLIPPED, then=_BEFORE_CLIPPING)
        with nullcontext() if self._stream is None else self._stream.entered():
            value = self._shard.value(slot, self._binding.parameters[slot])
        self._backend.record_use(value)
        return value

    # -- after a step --------------------------------------------------------------------------------------------------

    def retire(self, *, clipped: bool, scratch: bool = False) -> None:
        """Leaves unreadable placeholders in `.grad` after a step has used the gradients.

        In a plain loop, gradients would still be there. Here they are gone or were clipped on their way to the update.
        Lightning forgets gradients next.

        Args:
            clipped: the update has changed its copy of the gradient.
            scratch: the optimizer's class has changed a copy of the gradient.
        """
        untouched = self._in_place and not scratch and (self._route.clips_in_place or not clipped)
        used = self._content.spent or (() if untouched else self.present())
        for slot in range(len(self._names)):
            if slot in self._shown:
                self.used.leave(slot, self._shown.pop(slot))
            elif used and used[slot]:
                self.used.leave(slot, None)

    def make_plain(self) -> None:
        """Makes `.grad` ordinary at the end of a run: a tensor on its parameter's device and of its dtype, or None.

        A gradient in pages becomes a tensor if it was read, else None. A gradient in `.grad` moves to where its
        parameter has moved, as with `module.cpu()`.
        """
        for parameter in self._binding.parameters:
            left = parameter.grad
            if isinstance(left, GradPlaceholder):
                left = parameter.grad = (
                    None if left.fetched_values is None else left.fetched_values.to(parameter.device, parameter.dtype)
                )
            if left is not None and left.device != parameter.device:
                parameter.grad = left.to(parameter.device, parameter.dtype)

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _check_alone(self, slot: int, what: str) -> None:
        if not self._sharing.needs_no_reduction:
            raise UsageError(
                f".grad of {self._names[slot]} {what}, and on several ranks each rank has only its shard of the "
                "gradient; clip with gradient_clip_val or self.clip_gradients, and take the norm from "
                "trainer.strategy.gradient_norm(optimizer)"
            )


def _version(grad: Tensor | None) -> tuple[int, int] | None:
    """Which tensor it is, and how often it has changed."""
    return None if grad is None else (id(grad), version_of(grad))
