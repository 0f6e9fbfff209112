"""The harness itself: what a rank returns comes back, and ranks that raise, exit or hang are found out and ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from rank_harness import End, RanksFailed, run_ranks, watch_ranks

SHORT_S = 4.0
"""Limit where a rank is meant to exceed it: enough for a started process to reach the function."""


def who_am_i(greeting: str) -> tuple[str, int, int]:
    return greeting, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def add_up() -> torch.Tensor:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total


def misbehave(how: str) -> int:
    rank = int(os.environ["RANK"])
    if rank == 1:
        print("about to misbehave", flush=True)
        {
            "raise": raise_an_error,
            "exit": lambda: os._exit(3),
            "system_exit": lambda: exit(4),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "hang": wait_for_ever,
            "leave_thread": lambda: threading.Thread(target=wait_for_ever).start(),
        }[how]()
    return rank


def has_the_strategy() -> bool:
    return "lightning_ptm.trainer.strategy" in sys.modules


def raise_an_error() -> None:
    raise ValueError("no such luck")


def wait_for_ever() -> None:
    threading.Event().wait()


def return_a_function() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_come_back_in_the_order_of_ranks(world_size: int) -> None:
    assert run_ranks(who_am_i, world_size, "hello") == [("hello", rank, world_size) for rank in range(world_size)]


def test_a_rank_need_not_import_the_strategy_first() -> None:
    assert run_ranks(has_the_strategy, 1) == [True]


def test_ranks_find_each_other() -> None:
    assert [total.item() for total in run_ranks(add_up, 3)] == [6.0, 6.0, 6.0]


def test_a_rank_that_raises() -> None:
    outcomes = watch_ranks(misbehave, 2, "raise")
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RAISED]
    assert outcomes[1].error == "ValueError: no such luck"
    assert "in raise_an_error" in outcomes[1].report
    assert "about to misbehave" in outcomes[1].report
    with pytest.raises(RanksFailed, match=r"rank 1 raised.*no such luck"):
        run_ranks(misbehave, 2, "raise")


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("system_exit", 4), ("kill", -signal.SIGKILL)])
def test_a_rank_that_exits(how: str, code: int) -> None:
    outcomes = watch_ranks(misbehave, 2, how)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.EXITED]
    assert outcomes[1].exit_code == code
    assert "about to misbehave" in outcomes[1].report


@pytest.mark.parametrize("how", ["hang", "leave_thread"])
def test_a_rank_that_hangs_is_ended_and_says_where_it_was(how: str) -> None:
    outcomes = watch_ranks(misbehave, 2, how, limit_s=SHORT_S)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.HUNG]
    assert "in wait_for_ever" in outcomes[1].report
    assert outcomes[1].exit_code == -signal.SIGUSR1
    assert multiprocessing.active_children() == []


def test_a_value_that_cannot_be_sent() -> None:
    (outcome,) = watch_ranks(return_a_function, 1)
    assert outcome.end is End.EXITED
    assert "return_a_function" in outcome.report
