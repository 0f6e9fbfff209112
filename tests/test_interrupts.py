"""Ctrl-C inside a block: the first waits for its end, the second does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_ptm.interrupts import interrupted_later


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """Calls of a user's handler; it raises nothing. It is installed again at the end."""
    told: list[Any] = []

    def handler(number: int, frame: Any) -> None:
        told.append((number, frame.f_code.co_name))

    before = signal.signal(signal.SIGINT, handler)
    yield told
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)


IT = (signal.SIGINT, "ctrl_c")
"""The handler is told where the interrupt came, not where it took effect."""


def test_the_first_takes_effect_at_the_end(heard: list[Any]) -> None:
    with interrupted_later():
        ctrl_c()
        assert heard == []
    assert heard == [IT]


def test_the_second_takes_effect_at_once_and_no_third_time(heard: list[Any]) -> None:
    with interrupted_later():
        ctrl_c()
        ctrl_c()
        assert heard == [IT]
    assert heard == [IT]


def test_nothing_comes_of_a_block_without_one(heard: list[Any]) -> None:
    with interrupted_later():
        pass
    assert heard == []
    ctrl_c()
    assert heard == [IT]


@pytest.mark.parametrize("depth", [2, 3])
def test_blocks_may_be_nested(heard: list[Any], depth: int) -> None:
    with interrupted_later():
        with ExitStack() as blocks:
            for _ in range(depth - 1):
                blocks.enter_context(interrupted_later())
            ctrl_c()
        assert heard == []
    assert heard == [IT]


def test_a_block_that_fails_is_interrupted_too(heard: list[Any]) -> None:
    with pytest.raises(ValueError, match="mine"), interrupted_later():
        ctrl_c()
        raise ValueError("mine")
    assert heard == [IT]


def test_an_interrupt_that_raises_tells_of_the_error_before_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught, interrupted_later():
            ctrl_c()
            raise ValueError("mine")
        assert isinstance(caught.value.__context__, ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_stays(action: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, action)
    try:
        with interrupted_later():
            assert signal.getsignal(signal.SIGINT) is action
        assert signal.getsignal(signal.SIGINT) is action
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing(heard: list[Any]) -> None:
    found = []

    def run() -> None:
        with interrupted_later():  # where signal.signal would raise
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
