"""Where a rank is: the innermost line of the thread's stack that is no library's."""

from __future__ import annotations

import _thread
import queue
import sys
from collections.abc import Callable
from types import FunctionType

import pytest

from lightning_ptm.runtime.ranks.barriers import whereabouts


def calls(function: Callable[[], str]) -> str:
    return function()


def in_module(name: str, function: Callable[..., str]) -> Callable[..., str]:
    """Returns the same code, as if it were in a module of that name."""
    return FunctionType(function.__code__, {**function.__globals__, "__name__": name})


def test_the_line_that_asks() -> None:
    line = sys._getframe().f_lineno + 1
    assert whereabouts() == f"at test_whereabouts.py:{line} in test_the_line_that_asks"


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        "torch.nn.modules.module",
        "lightning.pytorch.trainer",
        "lightning_ptm.hooks",
        "contextlib",
        "torchmetrics",
        "typing_extensions",  # around collectives that torch has deprecated
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_libraries_are_passed_over(name: str, depth: int) -> None:
    ask = whereabouts
    for _ in range(depth):
        ask = in_module(name, calls).__get__(ask)
    line = sys._getframe().f_lineno + 1
    assert ask() == f"at test_whereabouts.py:{line} in test_libraries_are_passed_over"


@pytest.mark.parametrize("name", ["torchvision.models", "lightning_mine", "contextlib2", "__main__", ""])
def test_the_innermost_of_others_counts(name: str) -> None:
    line = calls.__code__.co_firstlineno + 1
    assert in_module("torch.nn", calls)(in_module(name, calls).__get__(whereabouts)) == (
        f"at test_whereabouts.py:{line} in calls"
    )


def test_a_thread_without_code_of_the_users() -> None:
    told: queue.Queue[str] = queue.Queue()

    def ask(tell: Callable[[str], None], where: Callable[[], str]) -> str:
        tell(where())
        return ""

    _thread.start_new_thread(in_module("torch.autograd", ask), (told.put, whereabouts))
    assert told.get(timeout=60) == "in no code of the user's"
