"""Handles of started collectives: of pages (`Work`), and of activations (`StartedExchange`).

I1: `Work` keeps its buffers alive until the first `wait` returns; later calls of `wait` return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Guard = Callable[[Callable[[], Any]], Any]
"""Calls its argument; turns the error of a failed collective into RankError."""


def _unguarded(call: Callable[[], Any]) -> Any:
    return call()


class Work:
    """A started collective. `wait` returns when its result may be read on the current stream.

    Args:
        handles: torch's handles.
        buffers: tensors to keep alive.
        finish: called after the handles have been waited on; completes the result.
        guard: see `Guard`.
        done: called at the end of the first `wait`.
    """

    def __init__(
        self,
        handles: Sequence[Any] = (),
        buffers: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
        guard: Guard = _unguarded,
        done: Callable[[], None] | None = None,
    ) -> None:
        self._handles = list(handles)
        self._buffers = list(buffers)
        self._finish = finish
        self._guard = guard
        self._done = done

    def wait(self) -> None:
        """Waits once; later calls return at once.

        Raises:
            RankError: another rank is gone or the collective timed out.
        """
        handles, self._handles = self._handles, []
        for handle in handles:
            self._guard(handle.wait)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._buffers = []
        done, self._done = self._done, None
        if done is not None:
            done()

    def done(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


class StartedExchange:
    """A started exchange of activations.

    Args:
        result: the tensor that the exchange writes to, which may be read once `wait` has returned it.
        finish: waits for the exchange; None: it is done.
    """

    def __init__(self, result: Tensor, finish: Callable[[], None] | None = None) -> None:
        self.result = result
        self._finish = finish

    def wait(self) -> Tensor:
        """Waits once, and returns the result; later calls return it at once.

        Raises:
            RankError: one of the ranks will not come, or is gone.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return self.result
