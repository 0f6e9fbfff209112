"""Two halves of a batch that compute in turns, so that sums over the ranks of one half pass while the other computes.

Source: Oases ("Automated Tensor Model Parallelism with Overlapped Communication for Efficient Foundation Model Training"),
section 3, which divides a batch and schedules the parts of its layers. Here the module's own training step computes each
half, in two threads of which one runs at a time. The turn changes where a sum was started. One ordinary backward pass of
both follows; the numbers of autograd's nodes, which order it, are set so that one half computes while a sum of the other one
passes.

Owns whose turn it is, and the second thread. Knows nothing of models; parallel/exchange.py starts the sums.

I1: one thread runs at a time, and the turn changes at started sums only: ranks that compute the same batch change it at the
    same points, and so exchange in the same order.
I2: all nodes behind the losses get new numbers: one that kept a low number would hold its half back until the end of the
    other.
I3: if one half raises, the other one is ended at its next turn, and the first error is raised.
"""

from __future__ import annotations

import contextvars
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from lightning_ptm.parallel.exchange import HalfState, TensorGroup
from lightning_ptm.runtime.autograd.recompute import early_recomputation
from lightning_ptm.torch_internals import node_numbering, nodes_made, number_of_node

Result = TypeVar("Result")

_SEGMENT = 1 << 32
"""Distance between the first numbers of two segments of nodes."""


class _OtherHalfFailedError(BaseException):
    """Raised in a half of a batch after the other half has raised. Not an Exception, which a step may catch."""


class TwoHalves:
    """The halves of one batch: computed in turns, then ordered for one backward pass.

    Args:
        group: the ranks that compute the batch.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        # State, changed by the thread that has the turn.
        self._changed = threading.Condition()
        self._turn = 0
        self._ended = [False, False]
        self._errors: list[BaseException] = []
        self._states = [HalfState(), HalfState()]
        self._first_numbers = [0, 0]
        """By half, the number of its first node."""
        self._cuts: tuple[list[int], list[int]] = ([], [])
        """By half, the numbers of nodes that start the sum of a gradient, in the order of the forward."""

    def compute(
        self, half: Callable[[int], Result], second_thread: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Result, Result]:
        """Computes both halves, the first one in this thread; returns the results.

        Args:
            half: computes the half of this number.
            second_thread: context of the second half's thread.
        """
        results: list[Any] = [None, None]

        def computed(me: int) -> None:
            try:
                if not self._errors:
                    self._first_numbers[me] = nodes_made()
                    with early_recomputation():
                        results[me] = half(me)
            except BaseException as error:  # raised again below
                self._errors.append(error)

        def second() -> None:
            self._take(1)
            try:
                with second_thread():
                    computed(1)
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._end(1)

        before = self._group.half_state()
        began = self._states[1] = self._group.second_half()
        thread = threading.Thread(target=contextvars.copy_context().run, args=(second,), name="second half of a batch")
        with self._group.taking_turns(self):
            thread.start()
            computed(0)
            self._end(0)
            self._join(thread)
        self._group.resume(self._states[0])
        if self._errors:
            error, self._errors = self._errors[0], []
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        self._group.after_halves(before, began, self._states[1])
        return results[0], results[1]

    def order_backward(self, losses: Sequence[Tensor]) -> None:
        """Numbers the nodes behind the halves' losses, for one backward pass of both.

        Each half is cut into segments at the nodes that start a sum. The pass executes the last segment of the second half,
        that of the first half, the segment before of the second half, and so on: a half awaits a sum after the other one's
        segment.
        """
        set_number = node_numbering()
        for me, loss in enumerate(losses):
            first, cuts = self._first_numbers[me], self._cuts[me]
            for node in _nodes_behind(loss):
                own = number_of_node(node)
                segment = 2 * bisect_right(cuts, own) + me
                set_number(node, segment * _SEGMENT + max(0, own - first))

    @property
    def turn(self) -> int:
        """The number of the half that computes now."""
        return self._turn

    # -- turns --------------------------------------------------------------------------------------------------------

    def change(self) -> None:
        """Lets the other half compute until it starts a sum or ends."""
        me = self._turn
        if not self._ended[1 - me]:
            self._give(me)
            self._take(me)
        if self._errors:
            raise _OtherHalfFailedError

    def entered(self, node: Any) -> None:
        """Records a node that starts the sum of a gradient."""
        self._cuts[self._turn].append(number_of_node(node))

    def _give(self, me: int) -> None:
        self._states[me] = self._group.half_state()
        with self._changed:
            self._turn = 1 - me
            self._changed.notify_all()

    def _take(self, me: int) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == me)
        except BaseException as error:  # an interrupt: the other half ends at its next turn, and gives this one its own
            self._errors.append(error)
            with self._changed:
                self._changed.wait_for(lambda: self._turn == me)
        self._group.resume(self._states[me])

    def _end(self, me: int) -> None:
        self._ended[me] = True
        self._give(me)

    def _join(self, thread: threading.Thread) -> None:
        try:
            thread.join()
        except BaseException as error:  # an interrupt, as in `_take`
            self._errors.append(error)
            thread.join()


def _nodes_behind(loss: Tensor) -> set[Any]:
    """Returns the nodes of a loss's graph but those that accumulate gradients, which autograd executes first."""
    found: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found and type(node).__name__ != "AccumulateGrad":
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found
