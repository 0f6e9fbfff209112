"""`step` of the user's own optimizers, whoever calls it: Lightning's wrapper, or the user by any handle, with or without a
closure.

The class's `step` is called as anywhere, so hooks, schedulers, profilers and whatever else is wrapped around it see a step.
torch's hooks around it are where the run comes in: the class is given a closure that runs the caller's and then the run's
update, and finds no parameters of its own to update afterwards.

Owns two hooks of each optimizer until `close`, and its parameter groups while the class's own code runs after the update.
I1: one update for one call of `step`, after its closure. I2: the groups are the user's own whenever a closure or a hook of
somebody else runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.engine import Engine


class _Call:
    """The closure that the class's `step` gets: the caller's, then the update."""

    def __init__(self, closure: Callable[[], Any] | None, update: Callable[[], None]) -> None:
        self._closure = closure
        self._update = update

        self.updated = False
        self.inner_calls = 0
        """Calls that the class's `step` makes to that of a base class, which torch puts the same hooks around."""

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


class OptimizerSteps:
    """Brings the run's update into `step` of all its optimizers.

    Args:
        optimizers: the user's, without Lightning's wrappers.
        scaled: gradients are multiplied by a loss scale until Lightning's wrapper takes it off.
        arm: told of an optimizer and the closure that is about to run for it.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        *,
        scaled: bool,
        arm: Callable[..., None],
    ) -> None:
        self._steps = [_Step(engine, optimizer, scaled, arm) for optimizer in optimizers]

    def settle(self) -> None:
        """A step may have been cut short: groups are the user's again."""
        for step in self._steps:
            step.settle()

    def close(self) -> None:
        """The run is over: `step` is the class's own again."""
        for step in self._steps:
            step.close()
        self._steps = []


class _Step:
    """`step` of one optimizer."""

    def __init__(self, engine: Engine, optimizer: Optimizer, scaled: bool, arm: Callable[..., None]) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._scaled = scaled
        self._arm = arm
        self._takes_closure = "closure" in inspect.signature(type(optimizer).step).parameters
        self._call: _Call | None = None
        self._groups: list[dict[str, Any]] | None = None
        """The user's, while the class sees groups without parameters."""

        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # Before those of users: they shall find their groups.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        given = dict(zip(("self", "closure"), args, strict=False)) | kwargs
        closure = given.get("closure")
        if self._call is not None and (closure is self._call or self._call.updated):
            self._call.inner_calls += 1
            return None
        self.settle()  # what a call left that was cut short by an error which the caller has caught
        unknown = sorted({*kwargs} - {"closure"}) or [str(value) for value in args[2:]]
        if unknown:
            raise UsageError(
                f"optimizer.step was given {', '.join(unknown)}; angel_ptm runs the update page by page and cannot pass "
                f"arguments on; set them in the optimizer's param_groups"
            )
        if self._scaled and not self._engine.unscaled(optimizer):
            raise UsageError(
                f"step of the {type(optimizer).__name__} itself was called, whose gradients are still multiplied by the loss "
                f"scale of precision='16-mixed'; call step of what self.optimizers() returns, which takes it off, or use "
                f"precision='bf16-mixed'"
            )
        if closure is not None:
            self._arm(optimizer, closure=closure)
        self._call = _Call(closure, self._update)
        if self._takes_closure:
            return (optimizer,), {"closure": self._call}
        self._call.update()
        return None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = self._call
        if call is None:
            return
        if call.inner_calls:
            call.inner_calls -= 1
            return
        if not call.updated:
            call.update()
        self.settle()

    def _update(self) -> None:
        self._engine.step(self._optimizer)
        self._groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**group, "params": []} for group in self._groups]

    def settle(self) -> None:
        self._call = None
        groups, self._groups = self._groups, None
        if groups is not None:
            self._optimizer.param_groups = groups

    def close(self) -> None:
        self.settle()
        for hook in self._hooks:
            hook.remove()
