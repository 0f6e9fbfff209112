"""Runs a function on several ranks, each a process of its own, and brings back what each returned, or why it did not.

Ranks get the environment that torchrun gives, so Lightning launches nothing itself. They are forked from a server that
has imported torch, Lightning and the strategy and done nothing else, so that a rank starts in a fraction of a second.

I1: `watch_ranks` returns within its limit (counted from when all ranks have been started), and no process that it
started is alive then. It ends its own processes only.
I2: a rank that raises, exits or hangs is told apart, with its traceback (of a hang: that of every thread) and its output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

_PROCESSES = multiprocessing.get_context("forkserver")
# The strategy by its module: the package imports what it names only when asked, and each rank would then do so for itself.
_PROCESSES.set_forkserver_preload(
    ["torch.distributed", "lightning.pytorch", "lightning_ptm.trainer.strategy", "lightning_ptm.callbacks", "pytest"]
)
_GRACE_S = 10.0
"""For a rank that was told to end, until it is killed."""


class End(enum.Enum):
    """How a rank ended."""

    RETURNED = "returned"
    RAISED = "raised"
    EXITED = "exited"
    HUNG = "hung"


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """What became of one rank.

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
    rank: int
    process: Any
    receiver: Connection
    log: Path
    message: tuple[End, Any, str, str] | None = None
    silent: bool = False
    hung: bool = False

    def read(self) -> None:
        self.silent = True
        with contextlib.suppress(EOFError):  # the process ended without a word: its exit code tells
            self.message = pickle.loads(self.receiver.recv_bytes())

    def outcome(self) -> RankOutcome:
        end, value, error, trace = self.message or (End.EXITED, None, "", "")
        if self.hung:
            end, value = End.HUNG, None
        elif self.process.exitcode != 0:
            end, value = End.EXITED, None
        report = f"{trace}\n{self.log.read_text(errors='replace')}"
        return RankOutcome(self.rank, end, value, error, report, self.process.exitcode)


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any, limit_s: float = 90.0) -> list[Any]:
    """What `body(*args)` returned on each rank.

    Args:
        body: a function of a module, and args that can be pickled; it may ask the environment for its rank.
    Raises:
        RanksFailed: a rank raised, exited or was still running after `limit_s`.
    """
    outcomes = watch_ranks(body, world_size, *args, limit_s=limit_s)
    failed = [outcome for outcome in outcomes if outcome.end is not End.RETURNED]
    if failed:
        raise RanksFailed("\n".join(map(str, failed)))
    return [outcome.value for outcome in outcomes]


def watch_ranks(body: Callable[..., Any], world_size: int, *args: Any, limit_s: float = 90.0) -> list[RankOutcome]:
    """As `run_ranks`, but tells how each rank ended."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            port = _free_port()
            for rank in range(world_size):
                ranks.append(_start(body, args, rank, world_size, port, Path(folder)))
            _listen(ranks, time.monotonic() + limit_s)
        finally:
            _end(ranks)
        return [rank.outcome() for rank in ranks]


def _start(body: Callable[..., Any], args: Sequence[Any], rank: int, world_size: int, port: int, folder: Path) -> _Rank:
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
    log = folder / f"rank{rank}.log"
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    settings = {name: str(value) for name, value in environment.items()}
    process = _PROCESSES.Process(target=_serve, args=(body, args, settings, home, log, sender), daemon=True)
    process.start()
    sender.close()  # the process's copy is the last: its end is seen as the end of the pipe
    return _Rank(rank, process, receiver, log)


def _serve(
    body: Callable[..., Any],
    args: Sequence[Any],
    environment: dict[str, str],
    home: Path,
    log: Path,
    sender: Connection,
) -> None:
    """Runs in the rank's process."""
    with log.open("wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable(file=2)
    # Told to end, a rank writes where it is, and then the signal does what it does by default.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)
    os.environ.update(environment)
    os.chdir(home)
    torch.set_num_threads(1)
    message: tuple[End, Any, str, str]
    try:
        message = (End.RETURNED, body(*args), "", "")
    except Exception as error:
        message = (End.RAISED, None, f"{type(error).__name__}: {error}", traceback.format_exc())
    # Pickled here, by value: torch's own way needs this process to be alive when the other reads.
    sender.send_bytes(pickle.dumps(message))
    sender.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _listen(ranks: Sequence[_Rank], deadline_s: float) -> None:
    """Until every process has ended, or time is up."""
    while True:
        # Asked once a round: a process may end between two questions.
        alive = [rank for rank in ranks if rank.process.exitcode is None]
        unread = [rank for rank in ranks if not rank.silent]
        left_s = deadline_s - time.monotonic()
        if not alive and not unread:
            return
        if left_s <= 0:
            for rank in alive:
                rank.hung = True
            return
        ready = wait([rank.receiver for rank in unread] + [rank.process.sentinel for rank in alive], timeout=left_s)
        for rank in unread:
            if rank.receiver in ready:
                rank.read()


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.process.exitcode is None:
            os.kill(rank.process.pid, signal.SIGUSR1)
    for rank in ranks:
        rank.process.join(_GRACE_S)
        if rank.process.exitcode is None:
            rank.process.kill()
            rank.process.join()
        rank.receiver.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
