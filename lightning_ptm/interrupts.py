"""Ctrl-C at a time when what is under way is whole. Knows signals, nothing of what is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupted_later() -> Iterator[None]:
    """The first Ctrl-C inside the block takes effect when the block has ended; a second one at once.

    Only the main thread is ever interrupted; in others, and where Ctrl-C is ignored or ends the process, it does nothing.
    Blocks may be nested.
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
