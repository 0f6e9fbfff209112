"""Unix domain sockets between ranks of one machine, for messages of a few numbers.

gloo passes a message of 24 bytes through three threads of each rank. Here the sending thread writes it to a socket and
the waiting thread reads it, at a fiftieth of the CPU time (benchmarks/LOG.md: intra_node).

Owns one socket per other rank, and a handle of its process. Knows numbers and bytes, not their meaning.

I1: each message goes to all other ranks, and all ranks send the same number of messages: a rank that waits for the n-th
    has sent its own n-th.
I2: a rank whose process has ended also ends the waiting of all others, even if child processes remain: a killed rank
    cannot close its sockets, and DataLoader workers still have copies of them.
I3: a wait that times out can be continued: no part of a message is lost.
I4: Ctrl-C takes effect when all messages have come, as while torch waits; or after some seconds, or the second time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

Row = tuple[int, int, int]
_ROW = struct.Struct("<3q")
_LENGTH = struct.Struct("<q")
_HELLO = struct.Struct("<3q")
"""A rank, whether it sends a handle of its process, and whether it sends a file."""
_MOST_RANKS = 16
"""Ranks per machine: each has a socket for each of the others."""
_PART_BYTES = 1 << 14
"""Bytes of a text sent before the others' are read: a socket buffers ten times as much, so no writer blocks."""
_CONNECT_S = 30.0
"""Seconds to connect, for ranks that have all announced that they are about to."""
_INTERRUPTED_S = 5.0
"""Seconds that a rank waits on after an interrupt."""
_MOST_WAIT_S = 86400.0
"""Longest single poll: the kernel's limit is 24 days."""
_MACHINE = Path("/proc/sys/kernel/random/boot_id")
_FILES = Path("/proc/self/ns/mnt")
"""Identifies the files that this process sees: a rank in another container cannot find this rank's socket."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Another rank.

    Attributes:
        socket: connection to it.
        process: a file that becomes readable when its process has ended (a pidfd); None if the system has none.
    """

    socket: socket.socket
    process: int | None = None

    def close(self) -> None:
        """Closes the connection, which the other rank notices. Idempotent."""
        if self.socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # the other rank has closed it first
            self.socket.shutdown(socket.SHUT_RDWR)  # closing is not enough: forked processes have copies (I2)
        self.socket.close()
        if self.process is not None:
            os.close(self.process)


class Arriving:
    """One message of each other rank, in flight. Like torch's handles, it can be waited for with or without a timeout.

    Args:
        peers: by rank.
        size: bytes of a message.
        limit_s: seconds after which the wait fails for good.
    """

    def __init__(self, peers: Mapping[int, Peer], size: int, limit_s: float) -> None:
        self._peers = peers
        self._size = size
        self._limit_s = limit_s
        self._until_s = monotonic() + limit_s
        # state
        self._failed = False
        self._missing = dict.fromkeys(peers, size) if size else {}
        self._parts: dict[int, bytes] = dict.fromkeys(peers, b"")

    def messages(self) -> Mapping[int, bytes]:
        """Returns the messages by rank; call after `wait`."""
        return self._parts

    def is_completed(self) -> bool:
        """Whether another `wait` would change nothing: all messages have come, or the wait has failed."""
        return self._failed or not self._missing

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits for all messages.

        Raises:
            RuntimeError: they have not all come in time, or a rank is gone.
        """
        until_s = self._until_s
        if timeout is not None:
            until_s = min(until_s, monotonic() + timeout.total_seconds())
        interrupt: KeyboardInterrupt | None = None
        while self._missing:
            try:
                ready = self._ready(until_s)
            except KeyboardInterrupt as error:
                if interrupt is not None:
                    raise
                interrupt, until_s = error, min(until_s, monotonic() + _INTERRUPTED_S)
                continue
            if not ready and interrupt is None:
                self._failed = monotonic() >= self._until_s
                others = ", ".join(map(str, self._missing))
                raise RuntimeError(f"Timed out waiting {self._limit_s:.0f} s for rank {others}")
            if not ready:
                break
            for rank in ready:
                self._read(rank)
        if interrupt is not None:
            raise interrupt

    def _ready(self, until_s: float) -> list[int]:
        """Returns the ranks that have sent something or are gone; none if nothing came in time."""
        poll = select.poll()
        ranks: dict[int, int] = {}
        for rank in self._missing:
            peer = self._peers[rank]
            for place in (peer.socket.fileno(), peer.process):
                if place is not None:
                    ranks[place] = rank
                    poll.register(place, select.POLLIN)
        while True:
            left_s = max(0.0, until_s - monotonic())
            found = poll.poll(1000 * min(left_s, _MOST_WAIT_S))
            if found or left_s <= _MOST_WAIT_S:
                return list(dict.fromkeys(ranks[place] for place, _ in found))

    def _read(self, rank: int) -> None:
        try:
            part = self._peers[rank].socket.recv(self._missing[rank], socket.MSG_DONTWAIT)
        except BlockingIOError:  # its process has ended, and everything that it sent has been read
            part, reason = b"", ": its process has ended"
        except OSError as error:
            part, reason = b"", f": {error}"
        else:
            reason = ""
        if not part:
            self._failed = True
            raise RuntimeError(f"the connection to rank {rank} has ended{reason}")
        self._parts[rank] += part
        self._missing[rank] -= len(part)
        if not self._missing[rank]:
            del self._missing[rank]


class UdsConnections:
    """Connections to all other ranks of a group on one machine.

    Args:
        rank: this rank.
        peers: by rank.
        limit_s: after this long without an answer, waiting fails.
    """

    def __init__(self, rank: int, peers: Mapping[int, Peer], limit_s: float) -> None:
        self.rank = rank
        self.world_size = len(peers) + 1
        self._peers = peers
        self._limit_s = limit_s

    def all_gather_row(self, row: Row, wait: Callable[[Any], None]) -> list[Row]:
        """All-gathers rows: returns those of all ranks, by rank.

        Args:
            row: this rank's numbers.
            wait: waits for the messages that it is given.

        Raises:
            RuntimeError: a rank is gone, or does not come.
        """
        arriving = self._exchange(_ROW.pack(*row))
        wait(arriving)
        received = arriving.messages()
        return [row if rank == self.rank else _ROW.unpack(received[rank]) for rank in range(self.world_size)]

    def all_gather_text(self, text: str) -> list[str]:
        """All-gathers texts: returns those of all ranks, by rank. Raises as `all_gather_row`."""
        ours = text.encode()
        arriving = self._exchange(_LENGTH.pack(len(ours)))
        arriving.wait()
        lengths = {rank: _LENGTH.unpack(message)[0] for rank, message in arriving.messages().items()}
        texts = dict.fromkeys(range(self.world_size), b"") | {self.rank: ours}
        for start in range(0, max(len(ours), *lengths.values()), _PART_BYTES):
            self._send(ours[start : start + _PART_BYTES])
            for rank, length in lengths.items():
                size = min(_PART_BYTES, max(0, length - start))
                part = Arriving({rank: self._peers[rank]}, size, self._limit_s)
                part.wait()
                texts[rank] += part.messages()[rank]
        return [texts[rank].decode() for rank in range(self.world_size)]

    def close(self) -> None:
        """Closes the connections, which the other ranks notice. Idempotent."""
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, message: bytes) -> Arriving:
        self._send(message)
        return Arriving(self._peers, len(message), self._limit_s)

    def _send(self, message: bytes) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.socket.sendall(message)
            except OSError as error:
                raise RuntimeError(f"the connection to rank {rank} has ended: {error}") from error


Gather = Callable[[Any], Sequence[Any]]
"""All-gathers an object: returns those of all ranks, by rank."""


def connected(
    rank: int, world_size: int, limit: timedelta, gather: Gather, own: int | None = None
) -> tuple[UdsConnections, Sequence[int]] | None:
    """Connects all ranks with each other; None if they are not on one machine. Collective.

    Args:
        rank: this rank.
        world_size: number of ranks.
        limit: after this long without an answer, waiting on the connections fails.
        gather: all-gathers an object. Collective.
        own: descriptor of a file of this rank that is sent to all others.

    Returns:
        The connections, and the descriptors of all ranks' files, by rank, including its own; the caller closes those of
        the others.
    """
    if not 1 < world_size <= _MOST_RANKS:
        return None
    with contextlib.ExitStack() as listening:
        place, listener = _listen(listening)
        places = gather(place)
        if "" in places or len({machine for machine, _, _ in (each.partition(" ") for each in places)}) > 1:
            return None
        assert listener is not None
        paths = [each.partition(" ")[2] for each in places]
        called: list[socket.socket] = []
        met: dict[int, tuple[Peer, int]] = {}
        # Each step's success is agreed on before the next, so that no rank waits for a connection that never comes, as
        # from a process of another user.
        for step in (
            partial(_connect, paths[:rank], called),
            partial(_greet, rank, world_size, called, listener, own, met),
        ):
            done = _succeeds(step)
            if not done:  # the others may wait for this rank before they can reach the agreement
                _close_all(listener, called)
            if not all(gather(done)):
                _close_all(listener, called)
                for peer, file in met.values():
                    peer.close()
                    if file >= 0:
                        os.close(file)
                return None
    files = {other: file for other, (_, file) in met.items()} | ({} if own is None else {rank: own})
    peers = {other: peer for other, (peer, _) in sorted(met.items())}
    return UdsConnections(rank, peers, limit.total_seconds()), [file for _, file in sorted(files.items())]


def _close_all(listener: socket.socket, called: Sequence[socket.socket]) -> None:
    """Closes sockets, so that ranks connected to them stop waiting."""
    for each in (listener, *called):
        each.close()


def _succeeds(act: Callable[[], None]) -> bool:
    """Calls `act`; whether the system permitted it."""
    try:
        act()
    except OSError:
        return False
    return True


def _listen(listening: contextlib.ExitStack) -> tuple[str, socket.socket | None]:
    """Returns "machine path" where this rank listens, and its socket; ("", None) if it cannot listen."""
    try:
        machine = f"{_MACHINE.read_text().strip()}/{_FILES.readlink()}"
        folder = tempfile.mkdtemp(prefix="ptm")  # accessible to this user only
        path = f"{folder}/rank"
        # By name: shutil.rmtree opens files, which fails at the limit of open files.
        listening.callback(_remove, os.rmdir, folder)
        listening.callback(_remove, os.unlink, path)
        listener = listening.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(_CONNECT_S)
        listener.bind(path)
        listener.listen(_MOST_RANKS)
    except (OSError, AttributeError):  # another operating system, or no writable folder
        return "", None
    return f"{machine} {path}", listener


def _remove(remove: Callable[[str], None], path: str) -> None:
    with contextlib.suppress(OSError):
        remove(path)


def _connect(paths: Sequence[str], called: list[socket.socket]) -> None:
    """Connects to the listening sockets at `paths` and appends the sockets to `called`; does not wait for `accept`."""
    for path in paths:
        called.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        called[-1].settimeout(_CONNECT_S)
        called[-1].connect(path)


def _greet(
    rank: int,
    world_size: int,
    called: Sequence[socket.socket],
    listener: socket.socket,
    own: int | None,
    met: dict[int, tuple[Peer, int]],
) -> None:
    """Exchanges greetings with each other rank and adds it to `met`, with its file (-1: none).

    Lower ranks have been called by this rank; higher ranks call this one.
    """
    with contextlib.ExitStack() as given:
        files = [] if own is None else [own]
        process = _own_process()
        if process is not None:
            given.callback(os.close, process)
            files.insert(0, process)
        for call in [*called, *(None for _ in range(rank + 1, world_size))]:
            peer = call or listener.accept()[0]
            theirs: list[int] = []
            try:
                peer.settimeout(_CONNECT_S)
                socket.send_fds(peer, [_HELLO.pack(rank, process is not None, own is not None)], files)
                greeting, theirs, _, _ = socket.recv_fds(peer, _HELLO.size, 2)
                if len(greeting) != _HELLO.size:
                    raise ConnectionError(
                        "a rank closed its connection while ranks connected to each other; look for the first error among "
                        "the ranks' logs"
                    )
                peer.settimeout(None)
            except BaseException:
                for each in theirs:
                    os.close(each)
                peer.close()
                raise
            other, has_process, has_file = _HELLO.unpack(greeting)
            if len(theirs) != has_process + has_file:  # this process is at its limit of open files
                for each in theirs:
                    os.close(each)
                has_process = has_file = 0
            met[other] = (Peer(peer, theirs[0] if has_process else None), theirs[-1] if has_file else -1)


def _own_process() -> int | None:
    """Returns a pidfd of this process (`Peer.process`); None if the system has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (OSError, AttributeError):  # another operating system, or an old kernel
        return None
