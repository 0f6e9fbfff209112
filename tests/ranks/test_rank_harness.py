"""The harness itself: what a rank returns comes back, and ranks that raise, exit or hang are found out and ended."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import End, RanksFailed, end_waiting, run_ranks, watch_ranks
from lightning.fabric.utilities import registry

from lightning_ptm import AngelPTMStrategy

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


IMPORTED = ["lightning_ptm.trainer.strategy", "kit.ranks.training", "kit.ranks.models", "pytest"]


def what_the_server_did() -> dict[str, bool]:
    started = {name: name in sys.modules for name in IMPORTED}
    found = getattr(registry.entry_points, "cache_info", lambda: None)()  # type: ignore[attr-defined]
    return started | {"callbacks": found is not None and found.currsize > 0, "collections": gc.get_freeze_count() > 0}


def raise_an_error() -> None:
    raise ValueError("no such luck")


def wait_for_ever() -> None:
    threading.Event().wait()


def return_a_function() -> object:
    return lambda: None


def leave_behind(what: str) -> int:
    """Changes what the next function could see; returns the number of this process."""
    {
        "nothing": lambda: None,
        "an_error": lambda: raise_an_error() if os.environ["RANK"] == "1" else None,
        "a_thread": lambda: threading.Thread(target=wait_for_ever, daemon=True).start(),
        "a_handler": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
        "a_function": lambda: setattr(dist, "all_reduce", lambda *_: None),
        "a_method_of_ours": lambda: setattr(AngelPTMStrategy, "setup", lambda *_: None),
        "a_function_of_a_test": lambda: setattr(sys.modules[__name__], "who_am_i", lambda *_: None),
        "a_list_of_a_test": lambda: IMPORTED.append("more"),
        "a_dtype": lambda: torch.set_default_dtype(torch.float64),
    }[what]()
    return os.getpid()


def surroundings(change: bool) -> tuple[int, list[Any]]:
    """The process, and what it finds."""
    seen = [os.environ.get("LEFT"), os.listdir(), torch.rand(()).item(), numpy.random.rand()]
    seen += [len(warnings.filters), torch.get_num_threads(), "left" in sys.path, dist.is_initialized()]
    if change:
        os.environ["LEFT"] = "1"
        open("left", "w").close()
        warnings.simplefilter("error", ResourceWarning)
        torch.set_num_threads(2)
        sys.path.append("left")
        add_up()
    return os.getpid(), seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_come_back_in_the_order_of_ranks(world_size: int) -> None:
    assert run_ranks(who_am_i, world_size, "hello") == [("hello", rank, world_size) for rank in range(world_size)]


def test_a_rank_need_not_do_first_what_their_server_has_done() -> None:
    (done,) = run_ranks(what_the_server_did, 1)
    assert all(done.values()), done


def test_a_process_that_goes_on_finds_what_a_new_one_finds() -> None:
    first, second = run_ranks(surroundings, 2, True), run_ranks(surroundings, 2, False)
    fresh = run_ranks(surroundings, 2, False, fresh=True)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert not {pid for pid, _ in first} & {pid for pid, _ in fresh}
    assert [seen for _, seen in first] == [seen for _, seen in second] == [seen for _, seen in fresh]


@pytest.mark.parametrize(
    "what",
    [
        "an_error",
        "a_thread",
        "a_handler",
        "a_function",
        "a_method_of_ours",
        "a_function_of_a_test",
        "a_list_of_a_test",
        "a_dtype",
    ],
)
def test_a_process_in_which_something_was_left_behind_does_not_go_on(what: str) -> None:
    before = run_ranks(leave_behind, 2, "nothing")
    if what == "an_error":
        assert [outcome.end for outcome in watch_ranks(leave_behind, 2, what)] == [End.RETURNED, End.RAISED]
    else:
        assert run_ranks(leave_behind, 2, what) == before
    assert not set(run_ranks(leave_behind, 2, "nothing")) & set(before)


def test_a_process_goes_on_within_a_file_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    here = run_ranks(leave_behind, 2, "nothing")
    assert run_ranks(leave_behind, 2, "nothing") == here
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_another.py::test")
    assert not set(run_ranks(leave_behind, 2, "nothing")) & set(here)


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
    end_waiting()
    outcomes = watch_ranks(misbehave, 2, how, limit_s=SHORT_S)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.HUNG]
    assert "in wait_for_ever" in outcomes[1].report
    assert outcomes[1].exit_code == -signal.SIGUSR1
    assert multiprocessing.active_children() == []


def test_a_value_that_cannot_be_sent() -> None:
    (outcome,) = watch_ranks(return_a_function, 1)
    assert outcome.end is End.EXITED
    assert "return_a_function" in outcome.report
