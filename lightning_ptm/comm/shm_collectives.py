"""Collectives over shared memory between ranks of one machine, for values in RAM.

gloo sends values in RAM over the loopback device, with threads of its own: a sum of 512 KiB over two ranks took ten
times the CPU time of this (benchmarks/LOG.md: intra_node).

Owns a window of shared memory per rank, and the count of exchanges. Does not know what they are for.

I1: a rank reads another rank's window only after all ranks have sent the same row: number of the exchange, its word,
    its bytes. If the rows differ, all ranks raise, and nothing has been read.
I2: a rank writes to the half of its window that the exchange before the last one used. A rank that has sent its row for
    the last exchange has read that half, and this rank has received the rows of all.
I3: windows are part of no autograd graph, whatever is exchanged.
I4: a sum is bitwise equal on all ranks: added in rank order, in fp32 or wider, and rounded once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_ptm.comm.uds import Gather, UdsConnections, connected

HALF_BYTES = 1 << 20
"""Bytes of half a window. Larger values go in pieces, which are still in the cache when other ranks read them."""
_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ShmCollectives:
    """The shared-memory collectives of one rank.

    Args:
        connections: sockets to the other ranks.
        windows: windows of all ranks, by rank, each of two halves.
        wait: waits for the messages that it is given.
        differ: called if ranks have come to different exchanges, with the connections; raises the error.
    """

    def __init__(
        self,
        connections: UdsConnections,
        windows: Sequence[Tensor],
        wait: Callable[[Any], None],
        differ: Callable[[UdsConnections], NoReturn],
    ) -> None:
        self._connections = connections
        self._windows = windows
        self._wait = wait
        self._differ = differ
        self._rank = connections.rank
        self._size = connections.world_size
        # state
        self._exchanges = 0

    @staticmethod
    def adds(dtype: torch.dtype) -> bool:
        """Whether values of this dtype can be summed."""
        return dtype in _SUMMED

    def sum(self, value: Tensor, word: int) -> Tensor:
        """Returns the sum over the ranks.

        Args:
            value: this rank's value.
            word: identifies the exchange.
        """
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        flat, total = value.detach().reshape(-1), out.view(-1)
        for piece, place in zip(self._pieces(flat), self._pieces(total), strict=True):
            _add(self._exchange(piece, word), place)
        return out

    def gathered(self, value: Tensor, word: int) -> Tensor:
        """All-gathers values: returns (size, *shape), by rank."""
        out = value.new_empty((self._size, *value.shape))
        flat, rows = value.detach().reshape(-1), out.view(self._size, -1)
        start = 0
        for piece in self._pieces(flat):
            for rank, theirs in enumerate(self._exchange(piece, word)):
                rows[rank, start : start + piece.numel()].copy_(theirs)
            start += piece.numel()
        return out

    def pieces(self, pieces: Tensor, word: int) -> Tensor:
        """All-to-all of equal pieces.

        Args:
            pieces: (size, *shape): a piece for each rank.
            word: identifies the exchange.
        Returns:
            (size, *shape): the pieces of all ranks for this rank, by rank.
        """
        out = torch.empty_like(pieces, memory_format=torch.contiguous_format)
        given, got = pieces.detach().reshape(self._size, -1), out.view(self._size, -1)
        step = self._step(pieces) // self._size
        for start in range(0, max(1, given.shape[1]), step):
            part = given[:, start : start + step]
            for rank, theirs in enumerate(self._exchange(part.reshape(-1), word)):
                got[rank, start : start + step].copy_(theirs.view(part.shape)[self._rank])
        return out

    def shifted(self, value: Tensor, word: int) -> Tensor:
        """Sends a value to the next rank in a ring; returns that of the rank before."""
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        flat, place = value.detach().reshape(-1), out.view(-1)
        for piece, into in zip(self._pieces(flat), self._pieces(place), strict=True):
            into.copy_(self._exchange(piece, word)[self._rank - 1])
        return out

    def close(self) -> None:
        """Closes the connections, which ends the waiting of other ranks. Idempotent."""
        self._connections.close()

    def _step(self, value: Tensor) -> int:
        return HALF_BYTES // value.itemsize

    def _pieces(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split(self._step(flat)) if flat.numel() else [flat]

    def _exchange(self, piece: Tensor, word: int) -> Sequence[Tensor]:
        """Exchanges a piece; returns those of all ranks, by rank, valid until the exchange after the next one begins."""
        start = self._exchanges % 2 * HALF_BYTES
        self._exchanges += 1
        theirs = [window[start : start + piece.nbytes].view(piece.dtype) for window in self._windows]
        theirs[self._rank].copy_(piece)
        rows = self._connections.all_gather_row((self._exchanges, word, piece.nbytes), self._wait)
        if any(row != rows[0] for row in rows):
            self._differ(self._connections)
        return theirs


def _add(parts: Sequence[Tensor], out: Tensor) -> None:
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)


def shm_collectives(
    rank: int,
    world_size: int,
    limit: timedelta,
    gather: Gather,
    wait: Callable[[Any], None],
    differ: Callable[[UdsConnections], NoReturn],
) -> ShmCollectives | None:
    """Connects ranks of one machine; None if they are not on one, or the system lacks the memory. Collective.

    Args:
        rank: this rank.
        world_size: number of ranks.
        limit: after this long without an answer, waiting fails.
        gather: all-gathers an object. Collective.
        wait: see `ShmCollectives`.
        differ: see `ShmCollectives`.
    """
    own = _shared_file()
    found = connected(rank, world_size, limit, gather, own)
    files = [] if found is None else found[1]
    try:
        if found is None:
            return None
        windows = _windows(files, world_size)
        # A single rank may lack its windows: each process has limits of open files and memory of its own.
        if any(gather(windows is None)) or windows is None:
            found[0].close()
            return None
        return ShmCollectives(found[0], windows, wait, differ)
    finally:
        for file in {*files, *([] if own is None else [own])} - {-1}:
            os.close(file)


def _shared_file() -> int | None:
    """Returns a new file in RAM with room for a window; None if the system has none, or no room."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "posix_fallocate"):
        return None
    try:
        file = os.memfd_create("lightning_ptm")
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, 2 * HALF_BYTES)  # a lack of memory fails here, not as SIGBUS at the first write
    except OSError:
        os.close(file)
        return None
    return file


def _windows(files: Sequence[int], world_size: int) -> list[Tensor] | None:
    """Maps the windows of all ranks, by rank; None if a rank has none, or it cannot be mapped."""
    if len(files) < world_size or min(files) < 0:
        return None
    try:
        return [torch.frombuffer(mmap.mmap(file, 2 * HALF_BYTES), dtype=torch.uint8) for file in files]
    except OSError:
        return None
