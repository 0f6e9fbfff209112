"""Exchanges of rows behind training: each rank's pages come in an order of its own, and nobody waits for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest
import torch
from kit.ranks.harness import End, run_ranks, watch_ranks
from test_communicator import connect
from test_tensor_row_exchange import PAGE_NUMEL, PARTS, ROWS, RUN, Found, flat_of, paged
from torch import Tensor

from lightning_ptm.checkpoints.row_exchange import BackgroundRowExchange, RowExchange
from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.errors import CheckpointError, FailedElsewhere

WHOLE = torch.arange(ROWS * PARTS * RUN, dtype=torch.float32).view(ROWS, PARTS, RUN)
STARTS = range(0, 64 + ROWS * RUN, PAGE_NUMEL)


class Given:
    """The pages of one rank, and what becomes of their rows.

    Args:
        room_bytes: beside what cannot do without.
    """

    def __init__(self, group: ProcessGroupCommunicator, room_bytes: int = 0) -> None:
        self.flat, self.found = flat_of(group.rank, torch.float32), Found()
        self.shard = torch.cat([torch.zeros(64), WHOLE[:, group.rank].reshape(-1)])
        self.failures: list[BaseException] = []
        channel = group.background_group([[0, 1]])
        rows = RowExchange(group, [paged(self.flat, PAGE_NUMEL)], channel)
        self.behind = BackgroundRowExchange(rows, room_bytes, self.failures.append)
        self.lock = threading.Lock()

    def give(self, starts: Iterable[int]) -> None:
        for start in starts:
            self.behind.wait_for_room(self.flat, start)
            page = self.shard[start : start + PAGE_NUMEL].clone()
            with self.lock:  # as Snapshot's
                self.behind.begin(self.flat, start, page, self.found, stays=False)
            page.fill_(-1)  # it is changed at once


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def exchange_out_of_turn(room_bytes: int) -> Tensor:
    """A saving thread takes pages in order; another one takes of those that are there the last, or on the other rank one in
    the middle. Training has collectives of its own meanwhile. Returns the elements that this rank wrote, in place."""
    group = connect()
    given = Given(group, room_bytes)
    there = list(STARTS)

    def taken(place: Callable[[], int]) -> Iterator[int]:
        while there:
            with suppress(IndexError):  # the last one has just been taken
                yield there.pop(place())

    given.behind.start()
    update = in_thread(lambda: given.give(taken(lambda: -1 if group.rank else len(there) // 2)))
    save = in_thread(lambda: given.give(taken(lambda: 0)))
    for _ in range(20):
        group.all_reduce(torch.zeros(1))
    update.join()
    save.join()
    given.behind.finish()
    assert not given.failures
    written = torch.full((WHOLE.numel(),), -1.0)
    for _, first, elements in given.found.written:
        values = elements.view(torch.float32)
        written[first : first + values.numel()] = values
    group.all_reduce(torch.zeros(1))
    group.close()
    return written


@pytest.mark.parametrize("room_bytes", [0, 1 << 20])
def test_pages_that_are_taken_out_of_turn_are_exchanged_in_theirs(room_bytes: int) -> None:
    one, other = run_ranks(exchange_out_of_turn, 2, room_bytes)
    assert not torch.any((one >= 0) & (other >= 0)), "both have written"
    both = torch.maximum(one, other)
    there = both >= 0
    assert torch.equal(both[there], WHOLE.reshape(-1)[there])
    assert there.sum() > 0.8 * WHOLE.numel()


def wait_for_room() -> list[bool]:
    """Whether pages beside that whose turn it is wait where there is room for none, one, or all; then all are exchanged."""
    group, waited = connect(), []
    for room_bytes, limit_s in ((0, 0.2), (2 * PAGE_NUMEL * 4, 0.2), (1 << 20, 30)):
        given = Given(group, room_bytes)
        ahead = in_thread(lambda given=given: given.give(STARTS[1:3]))  # type: ignore[misc]
        ahead.join(limit_s)
        waited.append(ahead.is_alive())
        given.behind.start()
        given.give([STARTS[0], *STARTS[3:]])
        ahead.join()
        given.behind.finish()
    group.all_reduce(torch.zeros(1))
    group.close()
    return waited


def test_pages_out_of_turn_wait_until_there_is_room_for_them() -> None:
    assert run_ranks(wait_for_room, 2) == [[True, True, False]] * 2


def fail_at(page: int, late: bool) -> tuple[str, list[str]]:
    """Rank 1 fails before it gives that page, while another thread of it, and of the other, waits for room. `late`: when
    its thread waits for that page already. The other gives pages up to the turn after that one, in which it is told."""
    group = connect()
    given = Given(group)
    given.behind.start()
    ahead = in_thread(lambda: given.give(reversed(STARTS[3:])))
    told = "nothing"
    if group.rank == 1:
        given.give(STARTS[:page])
        if late:
            time.sleep(0.2)
        given.behind.give_up()
    else:
        given.give(STARTS[:3])
        try:
            given.behind.finish()
        except CheckpointError as error:
            told = f"{type(error).__name__}: {error}"
            given.behind.give_up()  # as who has failed does; there is nothing to tell
    ahead.join(60)
    assert not ahead.is_alive(), "still waits for room"
    group.all_reduce(torch.zeros(1))
    group.close()
    return told, [type(each).__name__ for each in given.failures]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("page", [0, 1])
def test_a_rank_that_fails_is_heard_of_and_nobody_waits_for_room_any_more(page: int, late: bool) -> None:
    (told, failures), (_, own) = run_ranks(fail_at, 2, page, late)
    assert (
        told
        == f"{FailedElsewhere.__name__}: the tensor-parallel rank 1 of this rank's group could not write its checkpoint "
        "part, so the checkpoint was not completed; its own error says why"
    )
    assert (failures, own) == ([FailedElsewhere.__name__], [])


def abandon_in_the_midst() -> str:
    """Both ranks give up when all pages have been taken but the last: neither hears of a failure that it has not itself."""
    group = connect()
    given = Given(group, 1 << 20)
    given.behind.start()
    given.give(STARTS[:-1])
    given.behind.abandon()
    try:
        given.behind.finish()
    except CheckpointError as error:
        return str(error)
    finally:
        group.close()
    return "finished"


def test_what_was_given_up_before_its_end_has_not_finished() -> None:
    assert "finished" not in run_ranks(abandon_in_the_midst, 2)


def outlive_the_run() -> int:
    """The run fails on rank 0, and on the other, which hears of it, when half of the pages are exchanged."""
    group = connect()
    given = Given(group)
    given.behind.start()
    given.give(STARTS[:2])
    if group.rank == 0:
        group.fail("no reason")
    else:
        with suppress(Exception):
            group.all_reduce(torch.zeros(1))
        group.fail("the other's")
    given.give(STARTS[2:])
    given.behind.finish()
    group.close()
    return len(given.found.written)


def test_a_checkpoint_in_progress_is_exchanged_to_its_end_where_the_run_has_failed() -> None:
    assert all(run_ranks(outlive_the_run, 2))


def be_gone() -> tuple[str, str]:
    """Rank 1's process ends."""
    group = connect()
    given = Given(group)
    given.behind.start()
    given.give(STARTS[:2])
    if group.rank == 1:
        os._exit(7)
    with pytest.raises(CheckpointError) as caught:
        given.give(STARTS[2:])
        given.behind.finish()
    given.behind.give_up()
    return str(caught.value), type(given.failures[0]).__name__


def test_a_process_that_ends_is_an_error_at_once() -> None:
    first, second = watch_ranks(be_gone, 2)
    assert second.end is not End.RETURNED
    assert first.end is End.RETURNED, first
    text, failure = first.value
    assert text.startswith(
        "one of the ranks 0, 1, which exchange their parts of parameters for a checkpoint, is gone or hangs ("
    ), text
    assert failure == CheckpointError.__name__
