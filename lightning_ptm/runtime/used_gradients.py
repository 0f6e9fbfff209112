"""What a step leaves in `.grad` of a flat's parameters where it has used their gradients up: tensors that nobody may read.

Owns these, and whether any of them is still there. They are let go of by any means, as Lightning does behind a step, and by
none of them gone on from.

I1: nothing is added to a gradient that a step has used: what is left of it is gone before the next backward pass of the loss,
    or step, or that is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.binding import FlatBinding
from lightning_ptm.runtime.gradient_shard import GradientShard
from lightning_ptm.runtime.shown import ShownGradient

_USED = "after the step that has used it"


def refuse_gradient(name: str, when: str, what: str = "read") -> NoReturn:
    """Raises UsageError: a gradient was asked for, or changed, when it cannot be."""
    raise UsageError(
        f"the gradient of {name} was {what} {when}; do that between backward and step, in on_after_backward or "
        f"on_before_optimizer_step"
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
        self._left: dict[int, ShownGradient] = {}
        """What `.grad` is behind the newest step that has used it up."""
        self.any = False
        """Whether a step has left something that was not seen to be let go of. Others read it."""
        self._added_to: int | None = None
        """A slot of that, to which a backward pass has added since."""

    def of(self, slot: int) -> ShownGradient | None:
        """What a step has left of a parameter's."""
        return self._left.get(slot)

    def leave(self, slot: int, shown: ShownGradient | None) -> None:
        """A step has used a parameter's gradient, which `.grad` may show."""
        if shown is not None:
            self._left[slot] = shown
            shown.retire(partial(refuse_gradient, self._names[slot], _USED))
        else:
            parameter, left = self._binding.parameters[slot], self._left.get(slot)
            if left is None or left.held is not None:  # those were an earlier step's
                left = ShownGradient(parameter, partial(refuse_gradient, self._names[slot], _USED))
                self._left[slot] = left
            with torch._C.DisableTorchFunctionSubclass():  # closed ones, too
                parameter.grad = left
        self.any = True

    def pass_begins(self) -> None:
        """A backward pass begins, which adds to `.grad`."""
        if self.any and self._added_to is None:
            slot = self._still_there()
            if slot is None:
                self._let_go()
            else:  # a pass of the user's own, in whose step Lightning has still to forget gradients
                self._added_to = slot
                for at, parameter in enumerate(self._binding.parameters):
                    if parameter.grad is self._left.get(at):
                        parameter.grad = None  # autograd cannot add to it, and nobody may read the sum

    def check_forgotten(self) -> None:
        """What a step has left in `.grad` may be let go of by any means, and by none of them used again.

        Raises:
            UsageError: it was not, before a backward pass of the loss, or a step.
        """
        if not self.any:
            return
        slot = self._still_there() if self._added_to is None else self._added_to
        if slot is not None:
            raise UsageError(
                f"the gradient of {self._names[slot]} was used by a step and not forgotten before the next backward pass or "
                f"step, which would go on from it, and it is kept no longer; call zero_grad of the optimizer, set "
                f"accumulate_grad_batches at the start of an epoch, or override optimizer_zero_grad, with which gradients "
                f"are kept until then"
            )
        self._let_go()

    def forget(self) -> None:
        """Gradients are forgotten."""
        self.any = False
        self._added_to = None

    def _still_there(self) -> int | None:
        gradients: Sequence[Tensor | None] = self._binding.gradients()
        found = (at for at, grad in enumerate(gradients) if grad is not None and grad is self._left.get(at))
        return next(found, None)

    def _let_go(self) -> None:
        self._shard.content.forget()
        self.any = False
