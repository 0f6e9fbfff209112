"""What the runtime asks of the other ranks (the design, section 3; the paper's Communicator), and what one alone answers.

Knows flats and tensors, never units' meaning. World size 1 takes the same path with `SoloCommunicator`; several ranks have
`process_group.py`.
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
    """What the runtime needs of the other ranks. Every method but the queries is collective."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""

    def part(self, partition: Sequence[Sequence[int]]) -> Communicator:
        """A communicator of those ranks of `partition` that this one is among. It is closed with this one.

        Args:
            partition: every rank once; the same on all ranks. Collective for all of them.
        """

    def behind(self, partition: Sequence[Sequence[int]]) -> BackgroundGroup | None:
        """As `part`, for what is exchanged behind training; None of a rank that is alone."""

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        """`shard` (shard_numel,) of every rank -> `full` (padded_numel,), stripe by stripe."""

    def gather_shares(self, share: Tensor | None, full: Tensor, shares: Sequence[int]) -> Work:
        """What every rank has -> `full`: rank r's to [shares[r], shares[r + 1]). None of a rank whose share is empty."""

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        """Sum over ranks of `full` (padded_numel,), over `divisor` -> this rank's pieces in `shard` (shard_numel,)."""

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The first `sent[0]` of `rows` (n, ...) to rank 0, and so on; returns the rows of rank 0, rank 1..., of which
        `received` says how many there are. Waits for them."""

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Work]:
        """The same; the rows are there when the work has been waited for."""

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """Sum (or maximum) over ranks of a small tensor, in place; returns it."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...
    def broadcast_object(self, value: Any, source: int = 0) -> Any: ...
    def exchange(self, row: Row) -> Sequence[Row]: ...
    def exchanged(self) -> Exchanged:
        """What this rank has exchanged with its tensor group since that has met, if anything. Not collective."""

    def send(self, page: Tensor, rank: int) -> Work:
        """The paper's Page.send: the bytes of a page to another rank."""

    def receive(self, page: Tensor, rank: int) -> Work:
        """The paper's Page.receive."""

    def meet(self, word: str | None, within_s: float) -> bool:
        """Whether all ranks come here with the same word in time; the same answer on all that come. None: this rank knows
        that it cannot be. For ranks that were cut short, so that nobody knows who will come: no collective."""

    def fail(self, reason: str) -> None:
        """This rank has failed: leaves the reason for the others and hangs up, so that none of them waits for it. Not
        collective; only `close` may follow."""

    def close(self) -> None: ...


class SoloCommunicator:
    """One rank: its shard is the whole flat."""

    rank = 0
    world_size = 1
    alone = True

    def part(self, partition: Sequence[Sequence[int]]) -> Communicator:
        return self

    def behind(self, partition: Sequence[Sequence[int]]) -> BackgroundGroup | None:
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
        raise RankError(f"there is one rank only; rank {rank} does not exist")

    def receive(self, page: Tensor, rank: int) -> Work:
        raise RankError(f"there is one rank only; rank {rank} does not exist")

    def meet(self, word: str | None, within_s: float) -> bool:
        return word is not None

    def fail(self, reason: str) -> None:
        return None

    def close(self) -> None:
        return None
