"""The backward pass in progress: when it begins and ends, and what is done upon the table's actions (calls.py).

Owns whether a pass is in progress, and whether it is announced. One is, of the whole loss, which ends when whoever announced
it says so; one of the user's own, also inside of a `LightningModule.backward`, begins with the first that is heard of it, and
ends when autograd is through.

I1: executor and listener hear of a pass's end once, behind the end of each of its units; or, of a pass that is given up,
    the executor alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.runtime.autograd.calls import Action, Calls
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.tensors.autograd_graphs import not_compiled
from lightning_ptm.terms import Phase
from lightning_ptm.torch_internals import at_end_of_backward


class BackwardListener(Protocol):
    """Who is told of the backward pass."""

    def backward_begins(self) -> None:
        """A backward pass has begun, which nobody has announced."""

    def another_gradient(self, unit: int, parameter: Tensor) -> None:
        """A further gradient is about to be added to a parameter's `.grad`, in this pass."""

    def unit_backward_ended(self, unit: int) -> None:
        """All gradients of `unit` that this backward pass computes are in its parameters' `.grad`."""

    def backward_ended(self) -> None:
        """The backward pass is over; every unit has been ended."""

    def progress(self) -> None:
        """A good moment for work in the background to be moved on."""


class BackwardPass:
    """One after the other.

    Args:
        names: of units.
        calls: how far each unit is.
    """

    def __init__(
        self,
        names: Sequence[str],
        executor: Executor,
        listener: BackwardListener,
        calls: Calls,
        stream: ComputeStream,
    ) -> None:
        self.stream = stream
        self._names = names
        self._executor = executor
        self._listener = listener
        self._calls = calls
        self.begun = False
        """Whether a pass is in progress. Others read it."""
        self.announced = False
        """Whether it is of the whole loss, and ends when it is said to. Others read it."""

    @contextmanager
    def of_the_loss(self, checked: AbstractContextManager[None], *, by_user: bool = False) -> Iterator[None]:
        """Inside, and inside of `checked`, the announced pass runs; what it has left open is ended after it.

        Args:
            by_user: the user's code runs one pass, several or none, and may look at gradients behind them: none is announced.
        """
        if not by_user:
            self.announced = True
            self.start()
        try:
            with checked:
                yield
        except BaseException:  # which the step may survive, and go on with another pass
            if self.begun:
                self.give_up()
            raise
        self.announced = False
        if self.begun:
            self._finish()

    def start(self) -> None:
        """Something is heard of a pass."""
        if not self.begun:
            self._begin()

    @on_compute_stream
    def _begin(self) -> None:
        self.begun = True
        self._executor.guard_policy.computation_begins(Phase.BACKWARD)
        self._calls.begin_pass()
        if not self.announced:
            self._listener.backward_begins()
            at_end_of_backward(self._finish)
        self.act(0, self._calls.output(0))

    def act(self, index: int, actions: Sequence[Action]) -> None:
        """Does to a unit what the table has told."""
        for action in actions:
            match action:
                case Action.ENTER:
                    self._executor.enter(index, Phase.BACKWARD)
                case Action.HOLD:
                    self._executor.hold(index)
                case Action.LEAVE:
                    self._executor.leave_backward(index)
                case Action.END:
                    self._executor.end_backward(index)
                    self._listener.unit_backward_ended(index)
                case Action.REFUSE:
                    raise UsageError(
                        f"a gradient arrived for unit {self._names[index] or 'root'} after its backward had ended, as a "
                        f"backward pass inside of this one might bring it, and its update may have begun; run that pass "
                        f"after this one"
                    )

    @not_compiled
    @on_compute_stream
    def _finish(self) -> None:
        if not self.begun:
            return
        for index, actions in self._calls.end_pass():
            self.act(index, actions)
        self.begun = False
        self._executor.guard_policy.computation_ends(Phase.BACKWARD)
        self._listener.backward_ended()

    def give_up(self) -> None:
        """A pass, if one is in progress, is over in its middle."""
        for index in range(len(self._names)):
            self._executor.leave_backward(index)
        self.forget()
        self._executor.guard_policy.computation_ends(Phase.BACKWARD)

    def forget(self) -> None:
        """The executor has forgotten the pass."""
        self.begun = self.announced = False
