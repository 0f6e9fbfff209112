"""Delayed Ctrl-C: protects blocks that must not be interrupted halfway. Knows signals only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Context in which a first Ctrl-C takes effect at the end of the block; a second one takes effect at once.

    Python interrupts the main thread only; in other threads, and where SIGINT is ignored or ends the process, this does
    nothing. Blocks may be nested.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[tuple[int, Any]] = []

    def remember(number: int, frame: Any) -> None:
        if waiting:
            waiting.clear()
            handler(number, frame)
        else:
            waiting.append((number, frame))

    try:
        signal.signal(signal.SIGINT, remember)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting.pop())
