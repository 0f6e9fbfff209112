"""Exchanges of values in RAM among ranks of one machine, through memory that they share.

gloo sends what is in RAM over the loopback device, by threads of its own: a sum of 512 KiB over two ranks took ten times
the processor's time of this (benchmarks/LOG.md).

Owns a window of shared memory of each rank, and how many exchanges there were. What they are for, others know.

I1: nobody reads what a rank has written before it has told so, and all have told the same: which exchange it is, and of how
    many bytes. If they tell different ones, all raise, and nothing has been read.
I2: a rank writes to the half of its window that the exchange before the last one used. Who has told of the last one has read
    that, and this rank has heard it from all.
I3: windows are in no graph, whatever is exchanged.
I4: a sum is the same to the bit on all ranks: added in their order, in fp32 at least, and rounded once.
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
"""Larger values go piece by piece, which are still in the cache when the others read them."""
_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ShmCollectives:
    """Of one rank.

    Args:
        windows: of all ranks, by rank, each of two halves.
        wait: waits for what it is given, as it likes.
        differ: raises, where ranks have come to different exchanges, from a connection over which all can say what.
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
        """Whether values of this dtype can be added up."""
        return dtype in _SUMMED

    def sum(self, value: Tensor, word: int) -> Tensor:
        """The sum over the ranks.

        Args:
            word: tells which exchange of whose it is.
        """
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        flat, total = value.detach().reshape(-1), out.view(-1)
        for piece, place in zip(self._pieces(flat), self._pieces(total), strict=True):
            _add(self._swapped(piece, word), place)
        return out

    def gathered(self, value: Tensor, word: int) -> Tensor:
        """All ranks' values, (size, *shape)."""
        out = value.new_empty((self._size, *value.shape))
        flat, rows = value.detach().reshape(-1), out.view(self._size, -1)
        start = 0
        for piece in self._pieces(flat):
            for rank, theirs in enumerate(self._swapped(piece, word)):
                rows[rank, start : start + piece.numel()].copy_(theirs)
            start += piece.numel()
        return out

    def pieces(self, pieces: Tensor, word: int) -> Tensor:
        """Of (size, *shape), a piece for each rank: those of all ranks for this one, (size, *shape)."""
        out = torch.empty_like(pieces, memory_format=torch.contiguous_format)
        given, got = pieces.detach().reshape(self._size, -1), out.view(self._size, -1)
        step = self._step(pieces) // self._size
        for start in range(0, max(1, given.shape[1]), step):
            part = given[:, start : start + step]
            for rank, theirs in enumerate(self._swapped(part.reshape(-1), word)):
                got[rank, start : start + step].copy_(theirs.view(part.shape)[self._rank])
        return out

    def close(self) -> None:
        """The others see that this rank is gone. Idempotent."""
        self._connections.close()

    def _step(self, value: Tensor) -> int:
        return HALF_BYTES // value.itemsize

    def _pieces(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split(self._step(flat)) if flat.numel() else [flat]

    def _swapped(self, piece: Tensor, word: int) -> Sequence[Tensor]:
        """The pieces of all ranks, by rank, until the exchange behind the next one begins."""
        start = self._exchanges % 2 * HALF_BYTES
        self._exchanges += 1
        theirs = [window[start : start + piece.nbytes].view(piece.dtype) for window in self._windows]
        theirs[self._rank].copy_(piece)
        told = self._connections.tell((self._exchanges, word, piece.nbytes), self._wait)
        if any(row != told[0] for row in told):
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
    """Of ranks on one machine; None where they are not. Collective.

    Args:
        limit: after this long without an answer, waiting fails.
        gather: what every rank gives, on all of them. Collective.
        wait, differ: as of `ShmCollectives`.
    """
    own = _shared_file()
    found = connected(rank, world_size, limit, gather, own)
    files = [] if found is None else found[1]
    try:
        if found is None:
            return None
        windows = _windows(files, world_size)
        # One rank alone may lack them: its limit of open files or of memory is its own.
        if any(gather(windows is None)) or windows is None:
            found[0].close()
            return None
        return ShmCollectives(found[0], windows, wait, differ)
    finally:
        for file in {*files, *([] if own is None else [own])} - {-1}:
            os.close(file)


def _shared_file() -> int | None:
    """A new file in RAM that holds a window; None where there is none, or no room for it."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "posix_fallocate"):
        return None
    try:
        file = os.memfd_create("lightning_ptm")
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, 2 * HALF_BYTES)  # a lack of memory shows here, and not when it is written to
    except OSError:
        os.close(file)
        return None
    return file


def _windows(files: Sequence[int], world_size: int) -> list[Tensor] | None:
    """Of all ranks, by rank; None where one has given none, or it cannot be had here."""
    if len(files) < world_size or min(files) < 0:
        return None
    try:
        return [torch.frombuffer(mmap.mmap(file, 2 * HALF_BYTES), dtype=torch.uint8) for file in files]
    except OSError:
        return None
