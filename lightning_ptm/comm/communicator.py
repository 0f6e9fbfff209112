"""The communicator: the operations between ranks that the runtime needs (the paper's Communicator).

Knows flats and tensors, not what units mean. A run with one rank takes the same path, with `SoloCommunicator`; several
ranks use process_group.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_ptm.comm.agreement import Row
from lightning_ptm.comm.background_group import BackgroundGroup
from lightning_ptm.comm.deadlock_detector import NOTHING, Exchanged
from lightning_ptm.comm.work import Work
from lightning_ptm.errors import RankError
from lightning_ptm.planning.layout import FlatLayout


class Communicator(Protocol):
    """Communication with other ranks. All methods are collective, except properties and those that say otherwise."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Communicator:
        """Returns a communicator of the ranks of `partition` that include this one. It is closed with its parent.

        Args:
            partition: every rank once; the same on all ranks. All ranks must call.
        """

    def background_group(self, partition: Sequence[Sequence[int]]) -> BackgroundGroup | None:
        """Returns a group for exchanges in the background of training, partitioned as in `subgroup`; None if alone."""

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        """All-gathers `shard` (shard_numel,) of every rank into `full` (padded_numel,), stripe by stripe."""

    def gather_shares(self, share: Tensor | None, full: Tensor, shares: Sequence[int]) -> Work:
        """Gathers every rank's share into `full`: the share of rank r to [shares[r], shares[r + 1]).

        Args:
            share: this rank's; None if it is empty.
        """

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        """Sums `full` (padded_numel,) over ranks and divides by `divisor`, into this rank's `shard` (shard_numel,)."""

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the first `sent[0]` of `rows` (n, ...) to rank 0, the next `sent[1]` to rank 1, and so on. Blocks.

        Returns:
            The rows received from rank 0, rank 1, and so on, `received[r]` rows from rank r.
        """

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Work]:
        """Starts `all_to_all`; the returned rows may be read after the work has been waited for."""

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """Sums a small tensor over ranks (or takes the maximum), in place; returns it."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...
    def broadcast_object(self, value: Any, source: int = 0) -> Any: ...
    def exchange(self, row: Row) -> Sequence[Row]: ...
    def exchanged(self) -> Exchanged:
        """Returns what this rank has exchanged with ranks of its batch since they last met, for errors. Local."""

    def send(self, page: Tensor, rank: int) -> Work:
        """Sends the bytes of a page to another rank (the paper's Page.send)."""

    def receive(self, page: Tensor, rank: int) -> Work:
        """Receives the bytes of a page from another rank (the paper's Page.receive)."""

    def meet(self, word: str | None, within_s: float) -> bool:
        """Whether all ranks call this with the same word in time; the same answer on all ranks that call.

        Not a collective: for ranks that were interrupted, when it is unknown which ranks will come.

        Args:
            word: compared between ranks; None: this rank knows already that the answer is no.
            within_s: how long to wait.
        """

    def fail(self, reason: str) -> None:
        """Reports that this rank has failed and closes its connections, so that no other rank waits for it.

        Not collective; only `close` may follow.
        """

    def close(self) -> None: ...


class SoloCommunicator:
    """The communicator of a single rank: its shard is the whole flat."""

    rank = 0
    world_size = 1
    alone = True

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Communicator:
        return self

    def background_group(self, partition: Sequence[Sequence[int]]) -> BackgroundGroup | None:
        return None

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        if shard.data_ptr() != full.data_ptr():
            full.copy_(shard)
        return Work()

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        if shard.data_ptr() != full.data_ptr():
            shard.copy_(full)
        if divisor != 1:
            shard.div_(divisor)
        return Work()

    def gather_shares(self, share: Tensor | None, full: Tensor, shares: Sequence[int]) -> Work:
        if share is not None:
            full.copy_(share)
        return Work()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return rows

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Work]:
        return rows, Work()

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return None

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def exchange(self, row: Row) -> Sequence[Row]:
        return [row]

    def exchanged(self) -> Exchanged:
        return NOTHING

    def send(self, page: Tensor, rank: int) -> Work:
        raise RankError(f"the run has one rank only; rank {rank} does not exist")

    def receive(self, page: Tensor, rank: int) -> Work:
        raise RankError(f"the run has one rank only; rank {rank} does not exist")

    def meet(self, word: str | None, within_s: float) -> bool:
        return word is not None

    def fail(self, reason: str) -> None:
        return None

    def close(self) -> None:
        return None
