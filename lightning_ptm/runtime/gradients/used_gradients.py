"""What a step leaves in `.grad` of a flat's parameters where it has used their gradients up: tensors that nobody may read.

Owns these, and whether any of them is still there. They are let go of by any means, as Lightning does behind a step, and by
none of them gone on from.

I1: nothing is added to a gradient that a step has used: what is left of it is gone before the next backward pass of the loss,
    or step, or that is refused. I2: what a pass of the user's own has added to such a gradient cannot be read: elsewhere it
    would be the sum of both.
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
_CONVERTED = (
    ", or forget it first (module.zero_grad()): code that converts a module (module.double()) reads its gradients, too"
)


def refuse_gradient(name: str, when: str, what: str = "read", then: str = "") -> NoReturn:
    """Raises UsageError: a gradient was asked for, or changed, when it cannot be.

    Args:
        then: what else helps.
    """
    raise UsageError(
        f"the gradient of {name} was {what} {when}; do that between backward and step, in on_after_backward or "
        f"on_before_optimizer_step{then}"
    )


class UsedGradients:
    """Of one flat; by slot.

    Args:
        names: of the parameters.
        shard: what was in its pages is forgotten when nothing is left here.
    """

    def __init__(self, binding: FlatBinding, names: Sequence[str], shard: GradientShard) -> None:
        self._binding = binding
        self._names = names
        self._shard = shard
        # state
        self._left: dict[int, GradPlaceholder] = {}
        """What `.grad` is behind the newest step that has used it up."""
        self.any = False
        """Whether a step has left something that was not seen to be let go of. Others read it."""
        self._added_to: list[int] = []
        """Slots of that, to which a backward pass has added since."""
        self._sums: dict[int, GradPlaceholder] = {}
        """By slot, what is in `.grad` behind such a pass, and cannot be read."""
        self._shown: set[int] = set()
        """Of these, those that show what is in pages."""

    def of(self, slot: int) -> GradPlaceholder | None:
        """What a step has left of a parameter's."""
        return self._left.get(slot)

    def leave(self, slot: int, shown: GradPlaceholder | None) -> None:
        """A step has used a parameter's gradient, which `.grad` may show."""
        if shown is not None:
            self._left[slot] = shown
            shown.retire(partial(refuse_gradient, self._names[slot], _USED, then=_CONVERTED))
        else:
            parameter, left = self._binding.parameters[slot], self._left.get(slot)
            if left is None or left.held is not None:  # those were an earlier step's
                left = GradPlaceholder(parameter, partial(refuse_gradient, self._names[slot], _USED, then=_CONVERTED))
                self._left[slot] = left
            with torch.DisableTorchFunctionSubclass():  # closed ones, too
                parameter.grad = left
        self.any = True

    def follow_forgetting(self) -> None:
        """Before a backward pass, or a step: what the user has let go of is neither a step's nor a sum with that."""
        if self._added_to and self._sums:
            gradients = self._binding.gradients()
            self._added_to = [slot for slot, each in self._sums.items() if gradients[slot] is each]
            if not self._added_to:
                self._let_go()

    def pass_begins(self) -> None:
        """A backward pass begins, which adds to `.grad`."""
        if self.any and not self._added_to:
            # Of the user's own, in whose step Lightning has still to forget gradients.
            self._added_to = self._still_there()
            self._withdraw({slot: self._left[slot] for slot in self._added_to})
            if not self._added_to:
                self._let_go()
        self._withdraw({slot: each for slot, each in self._sums.items() if slot not in self._shown})
        self._sums = {}

    def _withdraw(self, gradients: Mapping[int, GradPlaceholder]) -> None:
        """Takes these out of `.grad`, where autograd could not add to them."""
        for slot, gradient in gradients.items():
            if self._binding.parameters[slot].grad is gradient:
                self._binding.parameters[slot].grad = None

    def pass_ended(self, shown: Mapping[int, GradPlaceholder]) -> None:
        """A backward pass has ended (I2).

        Args:
            shown: what `.grad` shows of pages, by slot.
        """
        self._shown = set(shown)
        for slot in self._added_to:
            parameter, refuse = self._binding.parameters[slot], partial(self._refuse_sum, slot)
            with torch.DisableTorchFunctionSubclass():  # closed ones, too
                if slot in shown:
                    shown[slot].retire(refuse)
                elif parameter.grad is None:  # this pass has not come to it
                    parameter.grad = self._left[slot]
                elif not isinstance(parameter.grad, GradPlaceholder):
                    parameter.grad = GradPlaceholder(parameter, refuse)
                self._sums[slot] = parameter.grad  # type: ignore[assignment]

    def of_both(self, slot: int) -> bool:
        """Whether `.grad` of a plain loop would be the sum of what a step has used and what came since."""
        return slot in self._added_to

    def _refuse_sum(self, slot: int) -> NoReturn:
        raise UsageError(
            f"the gradient of {self._names[slot]} was read after a backward pass which a plain loop would have added to the "
            f"gradient that the step before has used, and that is kept no longer; forget gradients before that pass "
            f"(optimizer.zero_grad()), or override optimizer_zero_grad, with which they are kept"
        )

    def check_forgotten(self) -> None:
        """What a step has left in `.grad` may be let go of by any means, and by none of them used again.

        Raises:
            UsageError: it was not, before a backward pass of the loss, or a step.
        """
        if not self.any:
            return
        self.follow_forgetting()
        slots = self._added_to or self._still_there()
        if slots:
            raise UsageError(
                f"the gradient of {self._names[slots[0]]} was used by a step and not forgotten before the next backward pass "
                f"or step, which would go on from it, and it is kept no longer; call zero_grad of the optimizer, set "
                f"accumulate_grad_batches at the start of an epoch, or override optimizer_zero_grad, with which gradients "
                f"are kept until then"
            )
        self._let_go()

    def forget(self) -> None:
        """Gradients are forgotten."""
        self.any = False
        self._added_to = []
        self._sums = {}

    def _still_there(self) -> list[int]:
        gradients: Sequence[Tensor | None] = self._binding.gradients()
        return [at for at, grad in enumerate(gradients) if grad is not None and grad is self._left.get(at)]

    def _let_go(self) -> None:
        self._shard.content.forget()
        self.forget()
