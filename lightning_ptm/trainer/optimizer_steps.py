"""The run's update inside `step` of the user's own optimizers, however it is called: by Lightning's wrapper or the user, with
or without a closure.

The class's `step` is called as usual, so hooks, schedulers, profilers and other wrappers see a step. The run attaches to
torch's step hooks: the class gets a closure that runs the caller's closure and then the run's update, and afterwards finds
its parameter groups empty, so that it updates nothing itself. For a class that never calls its closure, or collects its
parameters first, the update runs before the class's code.

Owns two hooks of each optimizer until `close`, and the content of its parameter groups while the class's code runs after the
update.
I1: one update per call of `step`, after its closure. I2: whenever a closure or another hook runs, the groups have the user's
content.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ptm.checkpoints.optimizer_states import STALE, PagedStates, check_can_step
from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.torch_internals import hooks_after_step, hooks_before_step


class _Call:
    """The closure passed to the class's `step`: the caller's closure, then the update."""

    def __init__(self, closure: Callable[[], Any] | None, update: Callable[[], None]) -> None:
        self._closure = closure
        self._update = update

        self.updated = False

    def __call__(self) -> Any:
        if self.updated:
            raise UsageError(
                "the optimizer evaluates its closure several times a step, and pages are updated once; use an "
                "optimizer that evaluates it once, or keep everything in RAM, on one rank and in a true precision"
            )
        result = self._closure() if self._closure is not None else None
        self.update()
        return result

    def update(self) -> None:
        """Runs the update; the class's own code then finds no parameters."""
        self._update()
        self.updated = True


class OptimizerStep:
    """Runs the update inside `step` of one optimizer.

    Args:
        optimizer: the user's optimizer, without Lightning's wrapper.
        scaled: whether gradients are multiplied by a loss scale until Lightning's wrapper unscales them.
        arm: called with the optimizer and its closure before the closure runs.
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
        """The frame of torch's wrapper around `step` and its hooks, during a call only, since it refers to the closure."""
        self._emptied: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The groups that are empty while the class's code runs, each with its content."""

        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # Runs before users' post hooks, which must find their groups.
        hooks_after_step(optimizer).move_to_end(self._hooks[1].id, last=False)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        given = dict(zip(("self", "closure"), args, strict=False)) | kwargs
        closure = given.get("closure")
        if self._is_inner(sys._getframe(1)):
            return None
        if optimizer in STALE or not isinstance(optimizer.state, PagedStates):
            check_can_step(optimizer)
        self.settle()  # a previous call may have raised an error that the caller has caught
        unknown = sorted({*kwargs} - {"closure"}) or [str(value) for value in args[2:]]
        if unknown:
            raise UsageError(
                f"optimizer.step was given {', '.join(unknown)}; angel_ptm runs the update page by page and cannot pass "
                f"arguments on; set them in the optimizer's param_groups"
            )
        if self._scaled and not self._engine.stepping.unscaled(optimizer):
            raise UsageError(
                f"step of the {type(optimizer).__name__} itself was called, whose gradients are still multiplied by the loss "
                f"scale of precision='16-mixed'; call step of what self.optimizers() returns, which unscales them, or use "
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
        """Whether the class calls `step` of its base class, which torch wraps with the same hooks."""
        if self._frame is None:
            return False
        outer = frame.f_back
        while outer is not None and outer is not self._frame:
            outer = outer.f_back
        return outer is not None

    def _check_last(self) -> None:
        """Refuses pre hooks registered after this one, which would run after the update."""
        if next(reversed(hooks_before_step(self._optimizer))) != self._hooks[0].id:
            name = type(self._optimizer).__name__
            raise UsageError(
                "a hook was registered with register_step_pre_hook during the run, and it would run after pages are "
                f"updated, because {name}.step "
                f"{'never calls' if self._ignores_closure else 'looks up its parameters before it calls'} its "
                "closure; register the hook in configure_optimizers, or let step call its closure first"
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
        # Changes the groups in place: the class may have taken the list of groups before it called the closure.
        for group in self._optimizer.param_groups:
            self._emptied.append((group, dict(group)))
            group["params"] = []

    def settle(self) -> None:
        """Restores the groups' content, also after a step that was cut short by an error."""
        self._call = self._frame = None
        emptied, self._emptied = self._emptied, []
        for group, values in emptied:
            group.clear()  # the class may have advanced its counters once more
            group.update(values)

    def close(self) -> None:
        """Ends the run: removes the hooks."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
