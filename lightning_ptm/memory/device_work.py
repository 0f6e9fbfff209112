"""Positions in the queues of a device, and queues besides a thread's current stream, as backends provide them (backend.py).

Protocols only; owns nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Mark(Protocol):
    """A position in the queue of a stream, reached when the device has done the work queued before it."""

    def done(self) -> bool:
        """Whether the position has been reached; never blocks."""

    def synchronize(self) -> None:
        """Blocks this thread until the position is reached."""

    def order(self) -> None:
        """Makes this thread's current stream, not the thread itself, wait for the position."""

    def seconds_since(self, earlier: Mark) -> float:
        """Returns the seconds between `earlier` and this mark, by the device's clock. Both must be timed and done."""


class Stream(Protocol):
    """A queue of device work besides the current stream of a thread. The caller keeps the memory of the work alive."""

    def follow(self, mark: Mark | None = None) -> None:
        """Makes later work on this stream wait for `mark`, or for everything queued on this thread's current stream."""

    def entered(self) -> AbstractContextManager[object]:
        """Makes this stream the thread's current stream inside the context."""

    def join(self) -> None:
        """Makes this thread's current stream wait for everything queued on this stream."""
