"""The backward pass in progress: its beginning and end, and the execution of the actions that calls.py decides on.

Owns whether a pass is in progress, and whether the strategy announced it. A pass of the whole loss is announced by the
strategy and ends when the strategy says so. A pass that the user runs, also inside `LightningModule.backward`, begins
with its first autograd event and ends with autograd's final callback.

I1: the executor and the listener get the end of a pass once, after the end of each of its units. For a pass that is
    given up, only the executor is informed.
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
    """Receiver of the events of a backward pass."""

    def backward_begins(self) -> None:
        """A backward pass has begun that the strategy did not announce."""

    def another_gradient(self, unit: int, parameter: Tensor) -> None:
        """A further gradient is about to be added to the parameter's `.grad` in this pass."""

    def unit_backward_ended(self, unit: int) -> None:
        """All gradients of `unit` that this backward pass computes are in `.grad` of its parameters."""

    def backward_ended(self) -> None:
        """The backward pass is over, and so is the backward of every unit."""

    def progress(self) -> None:
        """A convenient moment to advance background work."""


class BackwardPass:
    """State of the backward pass in progress; passes follow each other.

    Args:
        names: names of the units.
        calls: table of how far each unit is.
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
        """Whether a pass is in progress. Read by others."""
        self.announced = False
        """Whether the pass is of the whole loss and ends when the strategy says so. Read by others."""

    @contextmanager
    def of_the_loss(self, checked: AbstractContextManager[None], *, by_user: bool = False) -> Iterator[None]:
        """Runs the announced pass in the block, inside `checked`, and ends what the pass left open.

        Args:
            by_user: the user's code runs one pass, several or none, and may read gradients after each: no pass is
                announced.
        """
        if not by_user:
            self.announced = True
            self.start()
        try:
            with checked:
                yield
        except BaseException:  # the step may catch it and run another pass
            if self.begun:
                self.give_up()
            raise
        self.announced = False
        if self.begun:
            self._finish()

    def start(self) -> None:
        """Begins a pass if none is in progress; called at every autograd event."""
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
        """Carries out the actions that the table returned for a unit."""
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
        """Ends a pass in its middle: the executor's leases are returned, gradients are left as they are."""
        for index in range(len(self._names)):
            self._executor.leave_backward(index)
        self.forget()
        self._executor.guard_policy.computation_ends(Phase.BACKWARD)

    def forget(self) -> None:
        """Resets the state of the pass, after the executor has forgotten it."""
        self.begun = self.announced = False
