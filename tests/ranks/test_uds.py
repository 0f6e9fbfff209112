"""Ranks of one machine tell each other numbers and words over sockets; who is gone, or late, is found out."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_ptm.comm import uds
from lightning_ptm.comm.uds import Arriving, Peer, UdsConnections, connected

LIMIT = timedelta(seconds=5)


class Table:
    """Where threads that stand for ranks put what they give, until all have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=10)
        self.given: list[Any] = [None] * size

    def gather(self, rank: int) -> Callable[[Any], Sequence[Any]]:
        def gathered(value: Any) -> Sequence[Any]:
            self.given[rank] = value
            self.barrier.wait()
            found = list(self.given)
            self.barrier.wait()
            return found

        return gathered


def all_ranks(size: int, act: Callable[[int], Any]) -> list[Any]:
    """Returns the results or errors of `act` for each rank, each in its own thread."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


@contextlib.contextmanager
def ranks(size: int, limit: timedelta = LIMIT) -> Iterator[list[UdsConnections]]:
    table = Table(size)
    made = all_ranks(size, lambda rank: connected(rank, size, limit, table.gather(rank)))
    assert all(isinstance(each, tuple) for each in made), made
    try:
        yield [each[0] for each in made]
    finally:
        for each in made:
            each[0].close()


def wait(arriving: Any) -> None:
    arriving.wait()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_are_told_what_each_tells_by_rank(size: int) -> None:
    rows = [(rank, -rank, (1 << 62) + rank) for rank in range(size)]
    with ranks(size) as made:
        for _ in range(3):
            assert all_ranks(size, lambda rank: made[rank].all_gather_row(rows[rank], wait)) == [rows] * size


@pytest.mark.parametrize("lengths", [(0, 7), (3, 0, 200_000), (0, 0), (2_000_000, 2_000_000), (1 << 14, (1 << 14) + 1)])
def test_texts_of_any_length_reach_all(lengths: tuple[int, ...]) -> None:
    texts = [str(rank) * length for rank, length in enumerate(lengths)]
    with ranks(len(lengths)) as made:
        assert all_ranks(len(lengths), lambda rank: made[rank].all_gather_text(texts[rank])) == [texts] * len(lengths)
        assert all_ranks(len(lengths), lambda rank: made[rank].all_gather_row((1, 2, rank), wait)[-1][2]) == [
            len(lengths) - 1
        ] * len(lengths)


def test_who_waits_in_vain_goes_on_where_it_was() -> None:
    """I3: a message may come in parts, between which the waiting ends."""
    ours, theirs = socket.socketpair()
    arriving = Arriving({1: Peer(ours)}, 4, 60.0)
    with ours, theirs:
        for part in (b"ab", b"c"):
            theirs.send(part)
            with pytest.raises(RuntimeError, match="Timed out waiting 60 s for rank 1"):
                arriving.wait(timedelta(milliseconds=20))
            assert not arriving.is_completed()
        theirs.send(b"dxyz")
        arriving.wait(timedelta(seconds=5))
        assert arriving.is_completed()
        assert arriving.messages() == {1: b"abcd"}
        assert ours.recv(8) == b"xyz"  # of the next message


def test_a_rank_that_does_not_come_is_waited_for_so_long_and_no_longer() -> None:
    with ranks(2, timedelta(seconds=0.2)) as made:
        began_s = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out waiting 0 s for rank 1"):
            made[0].all_gather_row((0, 0, 0), wait)
        assert 0.15 < time.monotonic() - began_s < 5


@pytest.mark.parametrize("why", ["gone", "too late", "too late from the beginning"])
def test_to_wait_again_for_who_does_not_come_any_more_is_of_no_use(why: str) -> None:
    """Who waits for a while again and again, as long as that is of use, would do so for ever."""
    ours, theirs = socket.socketpair()
    arriving = Arriving({1: Peer(ours)}, 4, {"gone": 60.0, "too late": 0.05}.get(why, -1.0))
    with ours:
        if why == "gone":
            theirs.close()
        with theirs, pytest.raises(RuntimeError, match="has ended" if why == "gone" else "Timed out"):
            arriving.wait(timedelta(seconds=5))
        assert arriving.is_completed()


def interrupted(after_s: Sequence[float]) -> threading.Thread:
    """Ctrl-C comes so long after each other."""

    def interrupt() -> None:
        for seconds in after_s:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_ctrl_c_waits_for_messages_that_come() -> None:
    """I4: else this rank would have left a round that the others have ended."""
    ours, theirs = socket.socketpair()
    arriving = Arriving({1: Peer(ours)}, 4, 60.0)
    with ours, theirs:
        later = threading.Timer(0.6, theirs.send, [b"abcd"])
        later.start()
        thread = interrupted([0.1])
        with pytest.raises(KeyboardInterrupt):
            arriving.wait()
        thread.join()
        later.join()
    assert arriving.messages() == {1: b"abcd"}
    assert arriving.is_completed()


@pytest.mark.parametrize("how", ["again", "for some seconds"])
def test_ctrl_c_ends_the_waiting_for_messages_that_do_not_come(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uds, "_INTERRUPTED_S", 60.0 if how == "again" else 0.3)
    ours, theirs = socket.socketpair()
    arriving = Arriving({1: Peer(ours)}, 4, 60.0)
    with ours, theirs:
        theirs.send(b"ab")
        thread = interrupted([0.1, 0.3] if how == "again" else [0.1])
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            arriving.wait()
        assert time.monotonic() - began_s < 20
        thread.join()
        assert not arriving.is_completed()
        theirs.send(b"cd")
        arriving.wait()
    assert arriving.messages() == {1: b"abcd"}  # I3


@pytest.mark.parametrize("waits_for", [1, 2])
def test_a_rank_that_is_gone_ends_the_waiting_of_all(waits_for: int) -> None:
    """Also while another one's message is still missing."""
    with ranks(3) as made:

        def act(rank: int) -> None:
            if rank == waits_for:
                made[rank].close()
            elif rank == 0:
                made[rank].all_gather_row((0, 0, 0), wait)

        found = all_ranks(3, act)
        assert isinstance(found[0], RuntimeError), found
        assert f"the connection to rank {waits_for} has ended" in str(found[0])


def test_a_forked_process_of_a_rank_that_is_gone_keeps_nobody_waiting() -> None:
    """I2: a worker of a DataLoader has copies of all sockets."""
    with ranks(2) as made:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        try:
            made[1].close()
            with pytest.raises(RuntimeError, match="the connection to rank 1 has ended"):
                made[0].all_gather_row((0, 0, 0), wait)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def asleep() -> int:
    """A process with copies of all files of this one."""
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    return child


@pytest.mark.parametrize("told", [b"", b"ab", b"abcd"])
def test_a_killed_rank_whose_workers_live_on_keeps_nobody_waiting(told: bytes) -> None:
    """I2: it cannot hang up, and they have copies of its socket; what it has told is heard."""
    ours, theirs = socket.socketpair()
    killed, worker = asleep(), asleep()
    process = os.pidfd_open(killed)
    peer = Peer(ours, process)
    try:
        theirs.send(told)
        theirs.close()
        arriving = Arriving({1: peer}, 4, 60.0)
        kill = threading.Timer(0.2, os.kill, [killed, signal.SIGKILL])
        kill.start()
        began_s = time.monotonic()
        if len(told) == 4:
            kill.join()
            arriving.wait()
            assert arriving.messages() == {1: told}
        else:
            with pytest.raises(RuntimeError, match="the connection to rank 1 has ended: its process has ended"):
                arriving.wait()
        assert time.monotonic() - began_s < 30
    finally:
        for child in (killed, worker):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        peer.close()


def test_ranks_have_handles_of_each_other_s_processes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ranks(3) as made:
        for rank, each in enumerate(made):
            assert sorted(each._peers) == [other for other in range(3) if other != rank]
            for peer in each._peers.values():
                assert peer.process is not None
                assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{peer.process}").read_text()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_who_waits_for_months_waits() -> None:
    """A limit that the kernel would refuse."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arriving = Arriving({1: Peer(ours)}, 4, timedelta(days=365).total_seconds())
        later = threading.Timer(0.2, theirs.send, [b"abcd"])
        later.start()
        arriving.wait()
        later.join()
    assert arriving.messages() == {1: b"abcd"}


def test_nobody_waits_for_a_rank_that_cannot_call() -> None:
    """Such as one of another user, who may not enter the folder."""
    table = Table(3)

    def connect(rank: int) -> Any:
        gather = table.gather(rank)

        def gathered(value: Any) -> Sequence[Any]:
            found = gather(value)
            return [f"{place}x" for place in found] if rank == 2 and value and isinstance(value, str) else found

        return connected(rank, 3, LIMIT, gathered)

    assert all_ranks(3, connect) == [None] * 3  # `all_ranks` and the table wait for less than a rank would


def test_what_was_told_before_a_rank_left_is_heard() -> None:
    with ranks(2) as made:
        told: list[Any] = []
        all_ranks(2, lambda rank: told.append(made[rank].all_gather_row((rank, 0, 0), wait)))
        sender = all_ranks(1, lambda _: made[1]._send(b"x" * 24))
        made[1].close()
        assert sender == [None]
        with pytest.raises(RuntimeError, match="has ended"):
            made[0]._send(b"x" * 24)
        arriving = Arriving({1: made[0]._peers[1]}, 24, 5.0)
        arriving.wait()
        assert arriving.messages()[1] == b"x" * 24


@pytest.mark.parametrize("how", ["another machine", "no folder", "unreachable", "alone", "too many"])
def test_ranks_that_cannot_all_reach_each_other_have_none(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, whichever of them it is, and no socket stays open."""

    def of_rank(rank: int) -> Callable[[Any], Sequence[Any]]:
        gather = table.gather(rank)

        def gathered(value: Any) -> Sequence[Any]:
            if rank == 0 and isinstance(value, str):  # where it can be found
                _, _, path = value.partition(" ")
                value = {"another machine": f"elsewhere {path}", "no folder": "", "unreachable": f"{value}x"}[how]
            return gather(value)

        return gathered

    size = {"alone": 1, "too many": uds._MOST_RANKS + 1}.get(how, 3)
    monkeypatch.setattr(uds, "_CONNECT_S", 1.0)
    table = Table(size)
    before = len(os.listdir("/proc/self/fd"))
    assert all_ranks(size, lambda rank: connected(rank, size, LIMIT, of_rank(rank))) == [None] * size
    assert len(os.listdir("/proc/self/fd")) <= before


def test_folders_go_when_no_file_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its limit of open files a rank failed to list its folder, and the run with it."""
    monkeypatch.setattr(uds.tempfile, "tempdir", str(tmp_path))

    def lacking(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "scandir", lacking)
    monkeypatch.setattr(os, "open", lacking)
    table = Table(2)
    made = all_ranks(2, lambda rank: connected(rank, 2, LIMIT, table.gather(rank)))
    monkeypatch.undo()
    for each, _ in made:
        each.close()
    assert not list(tmp_path.iterdir())


def test_files_of_ranks_that_others_cannot_reach_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank has met the first when it finds that it does not come to the second."""
    monkeypatch.setattr(uds, "_CONNECT_S", 1.0)
    table, files = Table(3), [os.memfd_create(f"rank {rank}") for rank in range(3)]
    before = len(os.listdir("/proc/self/fd"))

    def gather(rank: int) -> Callable[[Any], Sequence[Any]]:
        kept = table.gather(rank)
        return lambda value: kept(f"{value}x" if rank == 1 else value)

    assert all_ranks(3, lambda rank: connected(rank, 3, LIMIT, gather(rank), files[rank])) == [None] * 3
    assert len(os.listdir("/proc/self/fd")) == before
    for file in files:
        os.close(file)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_while_it_is_connected_is_waited_for_so_long(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that connects, or is connected to, and sends nothing is waited for until the time limit."""
    monkeypatch.setattr(uds, "_CONNECT_S", 0.2)
    with contextlib.ExitStack() as listening:
        opened = [uds._listen(listening) for _ in range(2)]
        paths, listener = [place.partition(" ")[2] for place, _ in opened], opened[rank][1]
        assert listener is not None
        if rank == 0:
            listening.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)).connect(paths[0])
        called: list[socket.socket] = []
        uds._connect(paths[:rank], called)
        found = all_ranks(1, lambda _: uds._greet(rank, 2, called, listener, None, {}))
        assert isinstance(found[0], TimeoutError), found


def test_a_rank_that_ends_while_it_is_connected_is_gone() -> None:
    with contextlib.ExitStack() as listening:
        place, listener = uds._listen(listening)
        assert listener is not None
        path = place.partition(" ")[2]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(path)
        with pytest.raises(ConnectionError):
            uds._greet(0, 2, [], listener, None, {})
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with peer:
            peer.connect(path)
            peer.send(b"abc")
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError, match="closed its connection while ranks connected"):
                uds._greet(0, 2, [], listener, None, {})


def test_who_is_slow_to_read_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes to connect says nothing of what comes after it."""
    monkeypatch.setattr(uds, "_CONNECT_S", 0.1)
    message = b"x" * (1 << 22)  # more than a socket holds

    def act(rank: int) -> None:
        if rank == 0:
            made[0]._send(message)
        else:
            time.sleep(0.3)
            arriving = Arriving({0: made[1]._peers[0]}, len(message), 5.0)
            arriving.wait()

    with ranks(2) as made:
        assert all_ranks(2, act) == [None, None]


def test_each_rank_has_the_files_of_all() -> None:
    table = Table(3)
    files = [os.memfd_create(f"rank {rank}") for rank in range(3)]
    for rank, file in enumerate(files):
        os.write(file, str(rank).encode())
    made = all_ranks(3, lambda rank: connected(rank, 3, LIMIT, table.gather(rank), files[rank]))
    for rank, (each, theirs) in enumerate(made):
        assert [os.pread(file, 1, 0) for file in theirs] == [b"0", b"1", b"2"]
        assert theirs[rank] == files[rank]
        each.close()
    for file in {file for _, theirs in made for file in theirs}:
        os.close(file)


@pytest.mark.parametrize("size", [2, 3])
def test_no_rank_waits_for_one_that_can_open_no_more(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is called and does not answer makes all ranks continue without connections, at once."""
    accept, calls = socket.socket.accept, []

    def refused(listener: socket.socket) -> Any:
        calls.append(listener)
        if len(calls) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", refused)
    table, before = Table(size), len(os.listdir("/proc/self/fd"))
    assert all_ranks(size, lambda rank: connected(rank, size, LIMIT, table.gather(rank))) == [None] * size
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_a_rank_that_greets_by_half_are_closed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as open_files:
        listener = open_files.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(os.fspath(tmp_path / "rank"))
        listener.listen()
        caller = open_files.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        caller.connect(os.fspath(tmp_path / "rank"))
        socket.send_fds(caller, [b"x"], [caller.fileno()])
        caller.shutdown(socket.SHUT_WR)
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(ConnectionError, match="closed its connection while ranks connected"):
            uds._greet(0, 2, [], listener, None, {})
        assert sorted(os.listdir("/proc/self/fd")) == before
