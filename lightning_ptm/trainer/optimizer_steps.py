"""`step` of the user's own optimizers, whoever calls it: Lightning's wrapper, or the user by any handle, with or without a
closure.

The class's `step` is called as anywhere, so hooks, schedulers, profilers and whatever else is wrapped around it see a step.
torch's hooks around it are where the run comes in: the class is given a closure that runs the caller's and then the run's
update, and finds no parameters of its own to update afterwards. For a class that never calls its closure, or has looked up
its parameters before, the update comes before its code.

Owns two hooks of each optimizer until `close`, and what its parameter groups hold while the class's own code runs after the
update.
I1: one update for one call of `step`, after its closure. I2: the groups are the user's own whenever a closure or a hook of
somebody else runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.torch_internals import hooks_after_step, hooks_before_step
from lightning_ptm.trainer.paged_optimizer_state import check_guarded


class _Call:
    """The closure that the class's `step` gets: the caller's, then the update."""

    def __init__(self, closure: Callable[[], Any] | None, update: Callable[[], None]) -> None:
        self._closure = closure
        self._update = update

        self.updated = False

    def __call__(self) -> Any:
        if self.updated:
            raise UsageError(
                "the optimizer evaluates its closure several times a step, and pages are updated once; use an optimizer that "
                "evaluates it once"
            )
        result = self._closure() if self._closure is not None else None
        self.update()
        return result

    def update(self) -> None:
        """What the class does besides is done already, or never was."""
        self._update()
        self.updated = True


class OptimizerStep:
    """Brings the run's update into `step` of one optimizer.

    Args:
        optimizer: the user's, without Lightning's wrapper.
        scaled: gradients are multiplied by a loss scale until Lightning's wrapper takes it off.
        arm: told of the optimizer and the closure that is about to run for it.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, *, scaled: bool, arm: Callable[..., None]) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._scaled = scaled
        self._arm = arm
        traits = engine.stepping.traits_of(optimizer)
        self._ignores_closure = any(each.ignores_closure for each in traits)
        self._holds_parameters = any(each.holds_parameters for each in traits)
        self._call: _Call | None = None
        self._frame: FrameType | None = None
        """Of the call: torch's, around `step` and its hooks. Held no longer than the call, for its closure's sake."""
        self._emptied: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The user's groups while the class sees them without parameters, each with what it holds."""

        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # Before those of users: they shall find their groups.
        hooks_after_step(optimizer).move_to_end(self._hooks[1].id, last=False)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        given = dict(zip(("self", "closure"), args, strict=False)) | kwargs
        closure = given.get("closure")
        if self._is_inner(sys._getframe(1)):
            return None
        check_guarded(optimizer)
        self.settle()  # what a call left that was cut short by an error which the caller has caught
        unknown = sorted({*kwargs} - {"closure"}) or [str(value) for value in args[2:]]
        if unknown:
            raise UsageError(
                f"optimizer.step was given {', '.join(unknown)}; angel_ptm runs the update page by page and cannot pass "
                f"arguments on; set them in the optimizer's param_groups"
            )
        if self._scaled and not self._engine.stepping.unscaled(optimizer):
            raise UsageError(
                f"step of the {type(optimizer).__name__} itself was called, whose gradients are still multiplied by the loss "
                f"scale of precision='16-mixed'; call step of what self.optimizers() returns, which takes it off, or use "
                f"precision='bf16-mixed'"
            )
        if self._ignores_closure:
            self._check_last()
            self._call, self._frame = _Call(None, self._update), sys._getframe(1)
            self._call.update()
            return None
        if self._holds_parameters:
            self._check_last()
        if closure is not None:
            self._arm(optimizer, closure=closure)
        self._call, self._frame = _Call(closure, self._update), sys._getframe(1)
        if not self._holds_parameters:
            return (optimizer,), {"closure": self._call}
        with torch.enable_grad():
            result = self._call()
        return (optimizer,), {"closure": None if closure is None else lambda: result}

    def _is_inner(self, frame: FrameType) -> bool:
        """Whether the class calls the `step` of a base class, which torch puts the same hooks around."""
        if self._frame is None:
            return False
        outer = frame.f_back
        while outer is not None and outer is not self._frame:
            outer = outer.f_back
        return outer is not None

    def _check_last(self) -> None:
        """Hooks behind this one would see a step that is taken already."""
        if next(reversed(hooks_before_step(self._optimizer))) != self._hooks[0].id:
            name = type(self._optimizer).__name__
            raise UsageError(
                f"{name}.step {'never calls' if self._ignores_closure else 'looks up its parameters before it calls'} its "
                f"closure, so angel_ptm updates pages before hooks of register_step_pre_hook that were registered during "
                f"the run; register them in configure_optimizers, or let step call its closure first"
            )

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = self._call
        if call is None or self._frame is not sys._getframe(1):
            return
        if not call.updated:
            call.update()
        self.settle()

    def _update(self) -> None:
        self._engine.stepping.step(self._optimizer)
        # In the groups themselves: the class may have taken the list of them before the closure.
        for group in self._optimizer.param_groups:
            self._emptied.append((group, dict(group)))
            group["params"] = []

    def settle(self) -> None:
        """A step may have been cut short: groups are the user's again."""
        self._call = self._frame = None
        emptied, self._emptied = self._emptied, []
        for group, values in emptied:
            group.clear()  # the class may have advanced its numbers once more
            group.update(values)

    def close(self) -> None:
        """The run is over: `step` is the class's own again."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
