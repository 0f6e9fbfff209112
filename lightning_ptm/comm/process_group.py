"""The collectives of pages over several ranks: one stripe of a flat at a time (section 3 of the design).

The process groups are `process_groups.py`'s, and what ranks of one machine tell each other without one is
`intra_node.py`'s. What some
ranks only share has a communicator of theirs (`ProcessGroupCommunicator.part`): its ranks are counted among themselves, and
it ends with the one of all.

I1: an all-gather of stripe i writes piece r of rank r straight into its place in the full flat; nothing is merged. Shares of
    different lengths (whole parameters of each rank) go from their owner to all others, and come to it.
I2: a reduction adds the ranks' pieces in rank order, in fp32 on CPU, and rounds once.
I3: on a device, torch's own groups keep the order: a collective is behind what the current stream has queued when it is
    issued, on a stream of its group's, and its handle's `wait` has the stream wait that is the current one then.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lightning_ptm.comm.agreement import Row
from lightning_ptm.comm.background_group import BackgroundGroup
from lightning_ptm.comm.deadlock_detector import Exchanged
from lightning_ptm.comm.intra_node import IntraNode
from lightning_ptm.comm.process_groups import GLOO, ProcessGroups
from lightning_ptm.comm.shm_collectives import ShmCollectives
from lightning_ptm.comm.work import Work
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.backend import Backend, in_ram
from lightning_ptm.planning.layout import FlatLayout

Exchange = Callable[[dist.ProcessGroup, bool], tuple[Tensor, Any]]
NearExchange = Callable[[ShmCollectives, int], Tensor]
"""See `ProcessGroupCommunicator.issue`."""


class ProcessGroupCommunicator:
    """Collectives over torch.distributed, by the library of the device, and a gloo group for agreements.

    Args:
        backend: the compute device of this rank; decides the library of the data group.
        timeout: after this long without an answer of the others a collective fails (`RankError`).
        events: told of every collective of pages or tokens.
        within: see `part`.
        partition: see `part`.
        exchanging: see `part`.
    """

    def __init__(
        self,
        backend: Backend,
        timeout: datetime.timedelta,
        events: Events | None = None,
        *,
        within: ProcessGroupCommunicator | None = None,
        partition: Sequence[Sequence[int]] | None = None,
        exchanging: bool = False,
    ) -> None:
        self._events = events or Events()
        self._timeout = timeout
        self._backend = backend
        self._lines: ProcessGroups = ProcessGroups(
            backend.collectives, timeout, within=None if within is None else within._lines, partition=partition
        )
        self._ranks = self._lines.ranks
        self.rank, self.world_size = self._lines.rank, len(self._ranks)
        self.deadlock_detector = self._lines.deadlock_detector
        # torch 2.13 renamed the flat collectives and warns for the old names.
        self._all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._rows_in = torch.zeros(3, dtype=torch.int64)
        self._rows_out = torch.zeros(3 * self.world_size, dtype=torch.int64)
        self._rows_options = AllgatherOptions()
        self._behind: list[BackgroundGroup] = []
        exchanges = exchanging and not backend.apart
        self._direct = IntraNode(self._lines, timeout, rounds=within is None, exchanges=exchanges)

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def part(self, partition: Sequence[Sequence[int]], *, exchanging: bool = False) -> ProcessGroupCommunicator:
        """See `Communicator.part`.

        Args:
            exchanging: its ranks exchange activations (`issue`).
        """
        return ProcessGroupCommunicator(
            self._backend, self._timeout, self._events, within=self, partition=partition, exchanging=exchanging
        )

    def behind(self, partition: Sequence[Sequence[int]]) -> BackgroundGroup | None:
        made: BackgroundGroup | None = None
        for ranks in partition:  # every rank makes all groups, in the same order
            members = list(ranks)
            group = self._lines.guard(lambda: dist.new_group(members, backend=GLOO, timeout=self._timeout))  # noqa: B023
            if self._lines.own_rank in members and len(members) > 1:
                made = BackgroundGroup(group, members)
                self._behind.append(made)
            del group  # the last reference must be `close`'s
        return made

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        if flat.shares:
            return self.gather_shares(shard, full, flat.shares)

        def start() -> list[Any]:
            return [
                self._all_gather_flat(stripe, piece, group=self._lines.data, async_op=True)
                for stripe, piece in _stripes(flat, full, shard)
            ]

        told = _told(self._events, "all_gather", full)
        return Work(self._lines.issue(start), [shard, full], guard=self._lines.guard, done=told)

    def gather_shares(self, share: Tensor | None, full: Tensor, shares: Sequence[int]) -> Work:
        places = [full[start:end] for start, end in itertools.pairwise(shares)]

        def start() -> list[Any]:
            if share is not None:
                places[self.rank].copy_(share)
            return [
                dist.broadcast(place, src=source, group=self._lines.data, async_op=True)
                for place, source in zip(places, self._ranks, strict=True)
                if place.numel()
            ]

        told = _told(self._events, "all_gather", full)
        buffers = [full] if share is None else [share, full]
        return Work(self._lines.issue(start), buffers, guard=self._lines.guard, done=told)

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        if flat.shares and self._backend.collectives != GLOO:
            return self._reduce_to_owners(full, shard, flat, divisor)
        if self._backend.collectives != GLOO:

            def start() -> list[Any]:
                return [
                    self._reduce_scatter_flat(
                        piece, stripe, op=dist.ReduceOp.AVG, group=self._lines.data, async_op=True
                    )
                    for stripe, piece in _stripes(flat, full, shard)
                ]

            return self._average(start, full, shard, divisor)
        return self._exchange_and_add(full, shard, flat, divisor)

    def _reduce_to_owners(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        places = [full[start:end] for start, end in itertools.pairwise(flat.shares)]

        def start() -> list[Any]:
            return [
                dist.reduce(place, dst=owner, op=dist.ReduceOp.AVG, group=self._lines.data, async_op=True)
                for place, owner in zip(places, self._ranks, strict=True)
            ]

        return self._average(start, full, shard, divisor, places[self.rank])

    def _average(
        self, start: Callable[[], list[Any]], full: Tensor, shard: Tensor, divisor: float, mean: Tensor | None = None
    ) -> Work:
        """A reduction whose mean over the ranks comes to `mean`, by default to `shard`."""

        def finish() -> None:
            if mean is not None:
                shard.copy_(mean)
            if divisor != self.world_size:
                shard.mul_(self.world_size / divisor)

        told = _told(self._events, "reduce_scatter", full)
        return Work(self._lines.issue(start), [full, shard], finish, self._lines.guard, told)

    def _exchange_and_add(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        # gloo's reduce-scatter moves all ranks' data to all ranks and adds in 16 bit; an all-to-all moves each piece
        # once, and we add in fp32, in rank order (I2).
        sent: list[int] | None = None
        theirs: list[int] | None = None
        if flat.shares:
            sent = [end - start for start, end in itertools.pairwise(flat.shares)]
            received = full.new_empty(self.world_size * shard.numel())
            pairs, stripes = [(received, shard)], [full]
            theirs = len(sent) * [shard.numel()]
        else:
            received = torch.empty_like(full)
            pairs = _stripes(flat, received, shard)
            stripes = [stripe for stripe, _ in _stripes(flat, full, shard)]

        def start() -> list[Any]:
            return [
                dist.all_to_all_single(into, stripe, theirs, sent, group=self._lines.data, async_op=True)
                for stripe, (into, _) in zip(stripes, pairs, strict=True)
            ]

        def add() -> None:
            for into, piece in pairs:
                parts = into.view(self.world_size, piece.numel())
                total = parts[0].to(torch.promote_types(piece.dtype, torch.float32), copy=True)
                for rank in range(1, self.world_size):
                    total.add_(parts[rank])
                piece.copy_(total.div_(divisor))

        told = _told(self._events, "reduce_scatter", full)
        return Work(self._lines.issue(start), [full, received, shard], add, self._lines.guard, told)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out, work = self.start_all_to_all(rows, sent, received)
        work.wait()
        return out

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Work]:
        group = self._lines.data if self._backend.holds(rows) else self._lines.control
        out = rows.new_empty(sum(received), *rows.shape[1:])
        rows = rows.contiguous()

        def start() -> Any:
            return dist.all_to_all_single(out, rows, list(received), list(sent), group=group, async_op=True)

        told = _told(self._events, "all_to_all", rows)
        return out, Work([self._lines.issue(start)], [rows, out], guard=self._lines.guard, done=told)

    def issue(self, collective: Exchange, value: Tensor, near: NearExchange | None = None, word: int = 0) -> Tensor:
        """An exchange of activations, behind what the current stream has queued, and before what it queues next. These ranks
        have agreed that it is the next one.

        Args:
            collective: issues it on a process group, and returns what it results in when the current stream is behind it; or,
                where told that it is asynchronous, its handle, too.
            value: what it sends; decides by which way.
            near: the same among ranks of one machine.
            word: tells which one it is; where ranks of one machine do not tell the same, all raise before they read.

        Raises:
            RankError: one of the ranks will not come, or has come to another exchange.
        """
        shm_collectives = self._direct.exchanges
        if shm_collectives is not None and near is not None and in_ram(value):
            self._lines.check_open()
            result: Tensor = self._lines.issue(lambda: near(shm_collectives, word))
            return result
        group = self._lines.data if self._backend.holds(value) else self._lines.control
        waits = self._backend.collectives == GLOO or group is self._lines.control  # the host waits

        def start() -> Tensor:
            out, handle = collective(group, waits)
            if waits:
                self.deadlock_detector.in_exchange(handle, self._ranks)
            return out

        out: Tensor = self._lines.issue(start)
        return out

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        # On the control group: values are small and the host needs them.
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        on_host = values.cpu()
        self._lines.issue(lambda: dist.all_reduce(on_host, op=operation, group=self._lines.control))
        values.copy_(on_host)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        group = self._lines.control if in_ram(tensor) else self._lines.data
        self._lines.issue(lambda: dist.broadcast(tensor, src=self._ranks[source], group=group))

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        box = [value]
        self._lines.issue(lambda: dist.broadcast_object_list(box, src=self._ranks[source], group=self._lines.control))
        return box[0]

    def exchange(self, row: Row) -> Sequence[Row]:
        connections = self._direct.rounds
        if connections is not None:
            self._lines.check_open()
            told: list[Row] = self._lines.issue(lambda: connections.tell(row, self.deadlock_detector.in_round))
            return told
        self._rows_in.copy_(torch.tensor(row, dtype=torch.int64))

        # Of the backend itself: on the way there torch spends as long in Python as on the exchange.
        def exchange() -> None:
            gloo: Any = self._lines.control._get_backend(self._rows_in.device)
            self.deadlock_detector.in_round(gloo._allgather_base(self._rows_out, self._rows_in, self._rows_options))

        self._lines.issue(exchange)
        values = self._rows_out.tolist()
        return [(values[3 * rank], values[3 * rank + 1], values[3 * rank + 2]) for rank in range(self.world_size)]

    def exchanged(self) -> Exchanged:
        return self.deadlock_detector.exchanged()

    def send(self, page: Tensor, rank: int) -> Work:
        handle = self._lines.issue(lambda: dist.isend(page, self._ranks[rank], group=self._lines.data))
        return Work([handle], [page], guard=self._lines.guard)

    def receive(self, page: Tensor, rank: int) -> Work:
        handle = self._lines.issue(lambda: dist.irecv(page, self._ranks[rank], group=self._lines.data))
        return Work([handle], [page], guard=self._lines.guard)

    def meet(self, word: str | None, within_s: float) -> bool:
        return self._lines.meet(word, within_s)

    def fail(self, reason: str) -> None:
        self._lines.fail(reason)

    @property
    def group_names(self) -> list[str]:
        """Of all groups that collectives are issued on here."""
        return [*self._lines.group_names, *(each.group_name for each in self._behind)]

    def close(self) -> None:
        """Destroys the two groups, those of its parts and those behind training. Not collective: a rank that failed closes
        alone. Blocks until collectives in flight have ended, so that afterwards nothing writes into their buffers.
        Idempotent."""
        self._lines.hang_up()
        for each in self._behind:
            each.close()


def _stripes(flat: FlatLayout, full: Tensor, shard: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs (stripe of `full`: world_size pieces; this rank's piece in `shard`)."""
    pairs = []
    for piece in flat.pieces(0):  # stripes lie at the same places for every rank
        start = piece.full_start
        pairs.append(
            (
                full[start : start + flat.world_size * piece.numel],
                shard[piece.shard_start : piece.shard_start + piece.numel],
            )
        )
    return pairs


def _told(events: Events, name: str, full: Tensor) -> Callable[[], None] | None:
    """What the end of a collective that begins now has to tell; None while nobody listens."""
    if not events.active:
        return None
    began_s, size_bytes = perf_counter(), full.nbytes

    def done() -> None:
        event = Event(EventKind.COLLECTIVE, "ranks", name, began_s, perf_counter(), bytes=size_bytes)
        events.emit(event)

    return done
