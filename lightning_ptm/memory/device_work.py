"""Positions in the queues of a device, queues besides a thread's current stream (backend.py), and ends of copies.

Protocols only; owns nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class DeviceEvent(Protocol):
    """A position in the queue of a stream, reached when the device has done the work queued before it."""

    def done(self) -> bool:
        """Whether the position has been reached; never blocks."""

    def synchronize(self) -> None:
        """Blocks this thread until the position is reached."""

    def order(self) -> None:
        """Makes this thread's current stream, not the thread itself, wait for the position."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Returns the seconds between `earlier` and this mark, by the device's clock. Both must be timed and done."""


class Stream(Protocol):
    """A queue of device work besides the current stream of a thread. The caller keeps the memory of the work alive."""

    def follow(self, mark: DeviceEvent | None = None) -> None:
        """Makes later work on this stream wait for `mark`, or for everything queued on this thread's current stream."""

    def entered(self) -> AbstractContextManager[object]:
        """Makes this stream the thread's current stream inside the context."""

    def join(self) -> None:
        """Makes this thread's current stream wait for everything queued on this stream."""


class Timer(Protocol):
    """Duration of copies launched on a stream. It holds none of their bytes, so it may outlive them."""

    def done(self) -> bool: ...

    def seconds(self) -> float:
        """Returns how long the copies ran; only when done."""


class Completion(Protocol):
    """The end of copies launched on a stream (streams.py)."""

    def done(self) -> bool: ...

    def timer(self) -> Timer:
        """Returns their timer, for code that counts the copies without keeping source and target alive."""

    def synchronize(self) -> None:
        """Blocks this thread until the copies are complete."""

    def order(self) -> None:
        """Makes the current stream, not this thread, wait for the copies."""

    def end(self) -> DeviceEvent:
        """Returns their end, as a position in the queue of their stream."""

    def seconds(self) -> float:
        """Returns how long the copies ran; only when done."""
