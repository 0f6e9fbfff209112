"""Unreadable placeholders in `.grad` of parameters whose gradients a step has used.

Owns these placeholders, and whether any is still in place. The user or Lightning may remove them in any way after a
step, but may not continue from them.

I1: nothing is added to a gradient that a step has used: its placeholder must be gone before the next backward pass of
    the loss, or step, or these are refused.
I2: a gradient that a pass run by the user has added to a used one cannot be read: in a plain loop it would be the sum
    of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.gradients.grad_placeholder import GradPlaceholder
from lightning_ptm.runtime.gradients.gradient_shard import GradientShard
from lightning_ptm.runtime.units.binding import FlatBinding

_USED = "after the step that has used it"
_CONVERTED = "; if you convert the module (module.double()), which reads its gradients, call module.zero_grad() first"


def refuse_gradient(name: str, when: str, what: str = "read", then: str = "") -> NoReturn:
    """Raises UsageError: a gradient was read or changed when it cannot be.

    Args:
        then: a further remedy, appended to the message.
    """
    raise UsageError(
        f"the gradient of {name} was {what} {when}, and its values are no longer available; read "
        "and change gradients between backward and step, in on_after_backward or "
        f"on_before_optimizer_step{then}"
    )


class UsedGradients:
    """Used gradients of one flat, by slot.

    Args:
        names: names of the parameters.
        shard: the gradient pages; their content is forgotten when no placeholder is left.
    """

    def __init__(self, binding: FlatBinding, names: Sequence[str], shard: GradientShard) -> None:
        self._binding = binding
        self._names = names
        self._shard = shard
        # state
        self._placeholders: dict[int, GradPlaceholder] = {}
        """The placeholders that the latest step has left in `.grad`."""
        self.any = False
        """Whether a step has left placeholders that have not all been seen to be removed. Read by others."""
        self._added_to: list[int] = []
        """Slots of placeholders to which a backward pass has added since."""
        self._unreadable_sums: dict[int, GradPlaceholder] = {}
        """By slot, the unreadable placeholder in `.grad` after such a pass."""
        self._shown_sums: set[int] = set()
        """Slots of those that stand for a gradient in pages."""

    def of(self, slot: int) -> GradPlaceholder | None:
        """The placeholder that a step has left for a parameter."""
        return self._placeholders.get(slot)

    def leave(self, slot: int, shown: GradPlaceholder | None) -> None:
        """Leaves a placeholder in `.grad` after a step has used the gradient.

        Args:
            shown: the placeholder that is in `.grad` already, if any; it is reused.
        """
        if shown is not None:
            self._placeholders[slot] = shown
            shown.retire(partial(refuse_gradient, self._names[slot], _USED, then=_CONVERTED))
        else:
            parameter, left = self._binding.parameters[slot], self._placeholders.get(slot)
            if left is None or left.fetched_values is not None:  # its fetched values are of an earlier step
                left = GradPlaceholder(parameter, partial(refuse_gradient, self._names[slot], _USED, then=_CONVERTED))
                self._placeholders[slot] = left
            with torch.DisableTorchFunctionSubclass():
                parameter.grad = left
        self.any = True

    def drop_removed(self) -> None:
        """Before a backward pass or step: drops slots whose placeholder the user has removed."""
        if self._added_to and self._unreadable_sums:
            gradients = self._binding.gradients()
            self._added_to = [slot for slot, each in self._unreadable_sums.items() if gradients[slot] is each]
            if not self._added_to:
                self._forget_all()

    def pass_begins(self) -> None:
        """Removes placeholders from `.grad` before a backward pass, which adds to `.grad`."""
        if self.any and not self._added_to:
            # A pass run by the user, in a step after which Lightning has still to forget gradients.
            self._added_to = self._still_there()
            self._withdraw({slot: self._placeholders[slot] for slot in self._added_to})
            if not self._added_to:
                self._forget_all()
        self._withdraw({slot: each for slot, each in self._unreadable_sums.items() if slot not in self._shown_sums})
        self._unreadable_sums = {}

    def _withdraw(self, gradients: Mapping[int, GradPlaceholder]) -> None:
        """Removes these placeholders from `.grad`, since autograd cannot add to them."""
        for slot, gradient in gradients.items():
            if self._binding.parameters[slot].grad is gradient:
                self._binding.parameters[slot].grad = None

    def pass_ended(self, shown: Mapping[int, GradPlaceholder]) -> None:
        """Puts unreadable placeholders for sums into `.grad` after a backward pass (I2).

        Args:
            shown: the placeholders for gradients in pages, by slot.
        """
        self._shown_sums = set(shown)
        for slot in self._added_to:
            parameter, refuse = self._binding.parameters[slot], partial(self._refuse_sum, slot)
            with torch.DisableTorchFunctionSubclass():  # parameter guards must not intercept this
                if slot in shown:
                    shown[slot].retire(refuse)
                elif parameter.grad is None:  # this pass computed no gradient for it
                    parameter.grad = self._placeholders[slot]
                elif not isinstance(parameter.grad, GradPlaceholder):
                    parameter.grad = GradPlaceholder(parameter, refuse)
                self._unreadable_sums[slot] = parameter.grad  # type: ignore[assignment]

    def is_mixed_sum(self, slot: int) -> bool:
        """Whether `.grad` of a plain loop would be the sum of a used gradient and later ones."""
        return slot in self._added_to

    def _refuse_sum(self, slot: int) -> NoReturn:
        raise UsageError(
            f"the gradient of {self._names[slot]} was read after a second backward pass without zero_grad(): a "
            "plain Trainer would have the sum of both, but the first gradient is no longer stored, since a step "
            "has used it; call optimizer.zero_grad() before the second backward pass, or override "
            "optimizer_zero_grad, with which gradients are kept"
        )

    def check_forgotten(self) -> None:
        """Checks that all placeholders of a step were removed, in whatever way.

        Raises:
            UsageError: some were not, before a backward pass of the loss or a step.
        """
        if not self.any:
            return
        self.drop_removed()
        slots = self._added_to or self._still_there()
        if slots:
            raise UsageError(
                f"the gradient of {self._names[slots[0]]} was used by a step and not forgotten before the next "
                "backward pass or step, which would add to it, but it is no longer stored; call zero_grad of the "
                "optimizer, set accumulate_grad_batches at the start of an epoch, or override optimizer_zero_grad, "
                "with which gradients are kept until then"
            )
        self._forget_all()

    def forget(self) -> None:
        """Forgets all placeholders."""
        self.any = False
        self._added_to = []
        self._unreadable_sums = {}

    def _still_there(self) -> list[int]:
        gradients: Sequence[Tensor | None] = self._binding.gradients()
        return [at for at, grad in enumerate(gradients) if grad is not None and grad is self._placeholders.get(at)]

    def _forget_all(self) -> None:
        self._shard.content.forget()
        self.forget()
