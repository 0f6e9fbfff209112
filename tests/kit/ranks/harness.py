"""Runs a function on several ranks, each a process of its own, and brings back what each returned, or why it did not.

Ranks get the environment that torchrun gives, so Lightning launches nothing itself. They are forked from a server that
has done what `server.py` does and nothing else, so that a rank starts in a fraction of a second. Processes whose function
has returned, and has left nothing behind, wait for the next function of the same file of tests (process.py): what a
process does the first time, it need not do in each test.

I1: `watch_ranks` returns within its limit (counted from when all ranks have been started), and of the processes that it
started those alone are alive then that wait. It ends its own processes only.
I2: a rank that raises, exits or hangs is told apart, with its traceback (of a hang: that of every thread) and its output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kit.ranks.process import Answer, End, Job, serve

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["kit.ranks.server"])
_GRACE_S = 10.0
"""For a rank that was told to end, until it is killed."""


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """Outcome of one rank.

    Attributes:
        value: what the function returned.
        error: type and text of what it raised.
        report: traceback, and what the process printed.
        exit_code: of the process; minus the signal that ended it.
    """

    rank: int
    end: End
    value: Any
    error: str
    report: str
    exit_code: int | None

    def __str__(self) -> str:
        return f"rank {self.rank} {self.end.value} (exit code {self.exit_code}) {self.error}\n{self.report}"


class RanksFailed(AssertionError):
    """Some rank did not return."""


@dataclasses.dataclass
class _Rank:
    """One process, and what it does now."""

    rank: int
    process: Any
    connection: Connection
    log: Path = Path(os.devnull)
    answer: Answer | None = None
    silent: bool = False
    hung: bool = False

    @property
    def waits(self) -> bool:
        """Whether it has done what it was told, and can be told more."""
        return self.answer is not None and self.answer.goes_on

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    def begin(self, job: Job) -> None:
        self.log, self.answer, self.silent, self.hung = job.log, None, False, False
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code tells
            self.connection.send_bytes(pickle.dumps(job))

    def read(self) -> None:
        self.silent = True
        with contextlib.suppress(EOFError, ConnectionResetError):  # ended without a word: its exit code tells
            self.answer = pickle.loads(self.connection.recv_bytes())

    def outcome(self) -> RankOutcome:
        end, value, error, trace = End.EXITED, None, "", ""
        if self.answer is not None:
            answer = self.answer
            end, value, error, trace = answer.end, pickle.loads(answer.value), answer.error, answer.report
        if self.hung:
            end, value = End.HUNG, None
        elif self.process.exitcode not in (0, None):
            end, value = End.EXITED, None
        report = f"{trace}\n{self.log.read_text(errors='replace')}"
        return RankOutcome(self.rank, end, value, error, report, self.process.exitcode)


class _Waiting:
    """The processes that wait for another function of one file of tests, by rank."""

    def __init__(self) -> None:
        self._file = ""
        self._ranks: dict[int, _Rank] = {}

    def take(self, rank: int, file: str) -> _Rank | None:
        """One that has been `rank` before, in this file."""
        if file != self._file:
            self.end()
            self._file = file
        found = self._ranks.pop(rank, None)
        return found if found is not None and found.alive else None

    def give(self, rank: _Rank, file: str) -> None:
        if file and file == self._file and rank.rank not in self._ranks:
            self._ranks[rank.rank] = rank
        else:
            rank.connection.close()

    def end(self) -> None:
        """Each ends by itself when nobody can tell it anything any more."""
        for rank in self._ranks.values():
            rank.connection.close()
        for rank in self._ranks.values():
            rank.process.join(_GRACE_S)
        self._ranks = {}


_WAITING = _Waiting()


def end_waiting() -> None:
    """Ends the processes that wait for another function."""
    _WAITING.end()


def run_ranks(
    body: Callable[..., Any], world_size: int, *args: Any, limit_s: float = 90.0, fresh: bool = False
) -> list[Any]:
    """Returns the results of `body(*args)` on each rank.

    Args:
        body: a function of a module, and args that can be pickled; it may ask the environment for its rank.
        fresh: in processes that have done nothing before, and do nothing else.
    Raises:
        RanksFailed: a rank raised, exited or was still running after `limit_s`.
    """
    outcomes = watch_ranks(body, world_size, *args, limit_s=limit_s, fresh=fresh)
    failed = [outcome for outcome in outcomes if outcome.end is not End.RETURNED]
    if failed:
        raise RanksFailed("\n".join(map(str, failed)))
    return [outcome.value for outcome in outcomes]


def watch_ranks(
    body: Callable[..., Any], world_size: int, *args: Any, limit_s: float = 90.0, fresh: bool = False
) -> list[RankOutcome]:
    """Runs `body` on ranks, as `run_ranks`, and returns how each rank ended."""
    call = pickle.dumps((body, args))
    file = "" if fresh else os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[0]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            _start_server()
            port = _free_port()
            for rank in range(world_size):
                ranks.append((_WAITING.take(rank, file) if file else None) or _start(rank))
                ranks[-1].begin(_job(call, rank, world_size, port, Path(folder), last=not file))
            _listen(ranks, time.monotonic() + limit_s)
        finally:
            _end(ranks, file)
        return [rank.outcome() for rank in ranks]


def _start_server() -> None:
    """Unless it runs. It imports with the path of a new interpreter, and says nothing of what it does not find."""
    before = os.environ.get("PYTHONPATH")
    ours = [str(Path(__file__).parents[2])]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, before] if before else ours)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _start(rank: int) -> _Rank:
    ours, its = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=serve, args=(its,), daemon=True)
    process.start()
    its.close()  # the process's copy is the last: its end is seen as the end of the pipe
    return _Rank(rank, process, ours)


def _job(call: bytes, rank: int, world_size: int, port: int, folder: Path, *, last: bool) -> Job:
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": 1,
    }
    home = folder / f"rank{rank}"
    home.mkdir()
    settings = {name: str(value) for name, value in environment.items()}
    return Job(call, settings, home, folder / f"rank{rank}.log", list(sys.path), last)


def _listen(ranks: Sequence[_Rank], deadline_s: float) -> None:
    """Until every process has ended or waits, or time is up."""
    while True:
        # Asked once a round: a process may end between two questions.
        busy = [rank for rank in ranks if rank.alive and not rank.waits]
        unread = [rank for rank in ranks if not rank.silent]
        left_s = deadline_s - time.monotonic()
        if not busy and not unread:
            return
        if left_s <= 0:
            for rank in busy:
                rank.hung = True
            return
        ready = wait([rank.connection for rank in unread] + [rank.process.sentinel for rank in busy], timeout=left_s)
        for rank in unread:
            if rank.connection in ready:
                rank.read()


def _end(ranks: Sequence[_Rank], file: str) -> None:
    """Ends the ranks of a test.

    If all ranks wait for more work, keeps their processes for the next test; if one failed, ends all, as the others'
    state is unknown.
    """
    keep = all(rank.waits for rank in ranks)
    for rank in ranks:
        if keep:
            _WAITING.give(rank, file)
        elif rank.waits:
            rank.connection.close()  # it ends by itself
        elif rank.alive:
            os.kill(rank.process.pid, signal.SIGUSR1)
    for rank in ranks if not keep else ():
        rank.process.join(_GRACE_S)
        if rank.alive:
            rank.process.kill()
            rank.process.join()
        rank.connection.close()


def _free_port() -> int:
    """Returns a port that nothing listens on, below those that systems give to sockets without one: ranks of other tests
    would take such a port before rank 0 does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
