"""Collectives of pages between several ranks over torch.distributed, one collective for each stripe of a flat.

The process groups are in process_groups.py, and direct connections between ranks of one machine in intra_node.py. Ranks
that share only a part of the states have a communicator of their own (`ProcessGroupCommunicator.subgroup`): its ranks
are numbered among themselves, and it is closed with the communicator of all ranks.

I1: an all-gather of stripe i writes the piece of rank r directly to its position in the full flat; nothing is copied
    afterwards. Shares of different lengths (whole parameters of each rank) are broadcast by their owners.
I2: on a CPU, a reduction adds the ranks' pieces in rank order, in fp32, and rounds once.
I3: on a device, torch's own groups keep the order: a collective runs on a stream of its group, after the work that the
    current stream has queued when it is issued; `wait` of its handle makes the stream that is current then wait for it.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptm.comm.agreement import Row
from lightning_ptm.comm.background_group import BackgroundGroup
from lightning_ptm.comm.deadlock_detector import Exchanged
from lightning_ptm.comm.intra_node import IntraNode
from lightning_ptm.comm.process_groups import GLOO, ProcessGroups
from lightning_ptm.comm.shm_collectives import ShmCollectives
from lightning_ptm.comm.work import StartedExchange, Work
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.backend import Backend, in_ram
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.torch_internals import (
    AllgatherOptions,
    BroadcastOptions,
    backend_of_group,
    broadcast_by_backend,
    gather_by_backend,
)

Exchange = Callable[[dist.ProcessGroup, bool], tuple[Tensor, Any]]
NearExchange = Callable[[ShmCollectives, int], Tensor]
"""Argument types of `ProcessGroupCommunicator.issue`."""


_BLOCK_NUMEL = 1 << 17
"""Elements that a reduction adds at once, of which all ranks' pieces and the sum fit into a core's cache."""


class ProcessGroupCommunicator:
    """Communicator over torch.distributed: a data group with the device's library, and a gloo group for agreements.

    Args:
        backend: the compute device of this rank; determines the library of the data group.
        timeout: after this long without an answer of the others a collective fails (`RankError`).
        events: gets an event for every collective of pages or tokens.
        within: the communicator of all ranks, of which this is a part; None: this is of all ranks.
        partition: see `subgroup`.
        exchanging, one_way: see `subgroup`.
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
        one_way: bool = False,
    ) -> None:
        self._events = events or Events()
        self._timeout = timeout
        self._backend = backend
        self._groups: ProcessGroups = ProcessGroups(
            backend.collectives,
            timeout,
            within=None if within is None else within._groups,
            partition=partition,
            one_way=one_way,
        )
        self._ranks = self._groups.ranks
        self.rank, self.world_size = self._groups.rank, len(self._ranks)
        self.deadlock_detector = self._groups.deadlock_detector
        self._rows_in = torch.zeros(3, dtype=torch.int64)
        self._rows_out = torch.zeros(3 * self.world_size, dtype=torch.int64)
        self._rows_options = AllgatherOptions()
        self._background_groups: list[BackgroundGroup] = []
        exchanges = exchanging and not backend.has_own_memory
        self._intra_node = IntraNode(self._groups, timeout, rounds=within is None, exchanges=exchanges)

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def subgroup(
        self, partition: Sequence[Sequence[int]], *, exchanging: bool = False, one_way: bool = False
    ) -> ProcessGroupCommunicator:
        """Returns the communicator of this rank's part of a partition; see `Communicator.subgroup`.

        Args:
            partition: every rank once; the same on all ranks.
            exchanging: whether its ranks exchange activations (`issue`).
            one_way: whether it is for messages from one rank to another alone, which do not wait for their receiver.
        """
        return ProcessGroupCommunicator(
            self._backend,
            self._timeout,
            self._events,
            within=self,
            partition=partition,
            exchanging=exchanging,
            one_way=one_way,
        )

    def background_group(self, partition: Sequence[Sequence[int]]) -> BackgroundGroup | None:
        made: BackgroundGroup | None = None
        for ranks in partition:  # every rank makes all groups, in the same order
            members = list(ranks)
            group = self._groups.guard(lambda: dist.new_group(members, backend=GLOO, timeout=self._timeout))  # noqa: B023
            if self._groups.own_rank in members and len(members) > 1:
                made = BackgroundGroup(group, members)
                self._background_groups.append(made)
            del group  # BackgroundGroup must have the last reference, so that its `close` closes the connections
        return made

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        if flat.shares:
            return self.gather_shares(shard, full, flat.shares)

        def start() -> list[Any]:
            return [
                dist.all_gather_single(stripe, piece, group=self._groups.data, async_op=True)
                for stripe, piece in _stripes(flat, full, shard)
            ]

        at_end = _event_at_end(self._events, "all_gather", full)
        return Work(self._groups.issue(start), [shard, full], guard=self._groups.guard, done=at_end)

    def gather_shares(self, share: Tensor | None, full: Tensor, shares: Sequence[int]) -> Work:
        places = [full[start:end] for start, end in itertools.pairwise(shares)]

        def start() -> list[Any]:
            if share is not None:
                places[self.rank].copy_(share)
            return [
                dist.broadcast(place, src=source, group=self._groups.data, async_op=True)
                for place, source in zip(places, self._ranks, strict=True)
                if place.numel()
            ]

        at_end = _event_at_end(self._events, "all_gather", full)
        buffers = [full] if share is None else [share, full]
        return Work(self._groups.issue(start), buffers, guard=self._groups.guard, done=at_end)

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        if flat.shares and self._backend.collectives != GLOO:
            return self._reduce_to_owners(full, shard, flat, divisor)
        if self._backend.collectives != GLOO:

            def start() -> list[Any]:
                return [
                    dist.reduce_scatter_single(
                        piece, stripe, op=dist.ReduceOp.AVG, group=self._groups.data, async_op=True
                    )
                    for stripe, piece in _stripes(flat, full, shard)
                ]

            return self._average(start, full, shard, divisor)
        return self._exchange_and_add(full, shard, flat, divisor)

    def _reduce_to_owners(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        places = [full[start:end] for start, end in itertools.pairwise(flat.shares)]

        def start() -> list[Any]:
            return [
                dist.reduce(place, dst=owner, op=dist.ReduceOp.AVG, group=self._groups.data, async_op=True)
                for place, owner in zip(places, self._ranks, strict=True)
            ]

        return self._average(start, full, shard, divisor, places[self.rank])

    def _average(
        self, start: Callable[[], list[Any]], full: Tensor, shard: Tensor, divisor: float, mean: Tensor | None = None
    ) -> Work:
        """Returns the work of a reduction that writes the mean over ranks to `mean`, then its result to `shard`.

        Args:
            mean: this rank's part of the mean; None: `shard` itself.
        """

        def finish() -> None:
            if mean is not None:
                shard.copy_(mean)
            if divisor != self.world_size:
                shard.mul_(self.world_size / divisor)

        at_end = _event_at_end(self._events, "reduce_scatter", full)
        return Work(self._groups.issue(start), [full, shard], finish, self._groups.guard, at_end)

    def _exchange_and_add(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        # gloo's reduce-scatter sends all data to all ranks and adds in 16 bit. An all-to-all sends each piece once,
        # and the sum is computed here in fp32, in rank order (I2).
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
                dist.all_to_all_single(into, stripe, theirs, sent, group=self._groups.data, async_op=True)
                for stripe, (into, _) in zip(stripes, pairs, strict=True)
            ]

        def add() -> None:
            for into, piece in pairs:
                _add_in_fp32(into.view(self.world_size, piece.numel()), piece, divisor)

        at_end = _event_at_end(self._events, "reduce_scatter", full)
        return Work(self._groups.issue(start), [full, received, shard], add, self._groups.guard, at_end)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out, work = self.start_all_to_all(rows, sent, received)
        work.wait()
        return out

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Work]:
        group = self._groups.data if self._backend.holds(rows) else self._groups.control
        out = rows.new_empty(sum(received), *rows.shape[1:])
        rows = rows.contiguous()

        def start() -> Any:
            return dist.all_to_all_single(out, rows, list(received), list(sent), group=group, async_op=True)

        at_end = _event_at_end(self._events, "all_to_all", rows)
        return out, Work([self._groups.issue(start)], [rows, out], guard=self._groups.guard, done=at_end)

    def issue(self, collective: Exchange, value: Tensor, near: NearExchange | None = None, word: int = 0) -> Tensor:
        """Runs an exchange of activations, ordered between past and future work of the current stream.

        The ranks must have agreed that it is the next exchange.

        Args:
            collective: issues it on the given process group and returns its result, which the current stream may use
                next. If its second argument is True it is asynchronous, and returns its handle as well.
            value: the tensor that it sends; selects the path.
            near: the same exchange over shared memory, between ranks of one machine.
            word: identifies the exchange; if ranks of one machine pass different words, all raise before they read
                data.

        Raises:
            RankError: one of the ranks will not come, or has come to another exchange.
        """
        return self._start(collective, value, near, word, later=False).wait()

    def start(
        self, collective: Exchange, value: Tensor, near: NearExchange | None = None, word: int = 0
    ) -> StartedExchange:
        """Starts an exchange of activations after past work of the current stream; the arguments are those of `issue`.

        Over shared memory it is done when this returns. Otherwise this rank, or the current stream of a device, may
        compute until it waits.
        """
        return self._start(collective, value, near, word, later=True)

    @property
    def exchanges_at_once(self) -> bool:
        """Whether exchanges of values in RAM are done when `start` returns: between ranks of one machine."""
        return self._intra_node.exchanges is not None

    def _start(
        self, collective: Exchange, value: Tensor, near: NearExchange | None, word: int, *, later: bool
    ) -> StartedExchange:
        shm_collectives = self._intra_node.exchanges
        if shm_collectives is not None and near is not None and in_ram(value):
            self._groups.check_open()
            return StartedExchange(self._groups.issue(lambda: near(shm_collectives, word)))
        group = self._groups.data if self._backend.holds(value) else self._groups.control
        waits = self._backend.collectives == GLOO or group is self._groups.control  # the host waits
        out, handle = self._groups.issue(lambda: collective(group, waits or later))
        if not waits:
            return StartedExchange(out, None if handle is None else partial(self._groups.issue, handle.wait))
        number = self.deadlock_detector.begin_exchange()

        def finish() -> None:
            # `issue` counts it: where this is interrupted, the ranks cannot know that they all have the result.
            self._groups.issue(lambda: self.deadlock_detector.in_exchange(handle, self._ranks, number))

        return StartedExchange(out, finish)

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        # On the control group: the values are small and the host reads them.
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        on_host = values.cpu()
        self._groups.issue(lambda: dist.all_reduce(on_host, op=operation, group=self._groups.control))
        values.copy_(on_host)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        group = self._groups.control if in_ram(tensor) else self._groups.data
        self._groups.issue(lambda: dist.broadcast(tensor, src=self._ranks[source], group=group))

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        box = [value]
        self._groups.issue(lambda: dist.broadcast_object_list(box, src=self._ranks[source], group=self._groups.control))
        return box[0]

    def exchange(self, row: Row) -> Sequence[Row]:
        connections = self._intra_node.rounds
        if connections is not None:
            self._groups.check_open()
            rows: list[Row] = self._groups.issue(
                lambda: connections.all_gather_row(row, partial(self.deadlock_detector.in_round, ranks=self._ranks))
            )
            return rows
        self._rows_in.copy_(torch.tensor(row, dtype=torch.int64))

        # Calls the gloo backend itself: torch's Python wrappers take as long as the exchange.
        def exchange() -> None:
            gloo = backend_of_group(self._groups.control, self._rows_in.device)
            work = gather_by_backend(gloo, self._rows_out, self._rows_in, self._rows_options)
            self.deadlock_detector.in_round(work, self._ranks)

        self._groups.issue(exchange)
        values = self._rows_out.tolist()
        return [(values[3 * rank], values[3 * rank + 1], values[3 * rank + 2]) for rank in range(self.world_size)]

    def exchanged(self) -> Exchanged:
        return self.deadlock_detector.exchanged()

    def send(self, page: Tensor, rank: int) -> Work:
        handle = self._groups.issue(lambda: dist.isend(page, self._ranks[rank], group=self._groups.data))
        return Work([handle], [page], guard=self._groups.guard)

    def receive(self, page: Tensor, rank: int) -> Work:
        handle = self._groups.issue(lambda: dist.irecv(page, self._ranks[rank], group=self._groups.data))
        return Work([handle], [page], guard=self._groups.guard)

    def announce(self, header: Tensor) -> Work:
        """Starts to send a small tensor in RAM to the ranks that `hear` it."""

        self.deadlock_detector.sends(self._ranks)
        started = self._groups.issue(lambda: self._broadcast_header(header, self.rank))
        return Work([started], [header], guard=self._groups.guard)

    def hear(self, header: Tensor, rank: int) -> None:
        """Waits for a small tensor that another rank announces, and writes it to `header`.

        Raises:
            RankError: that rank has failed, or can not come to it.
        """
        source = self._ranks[rank]

        # A collective: a receive of gloo cannot be waited for with a timeout that leaves it as it is.
        def wait() -> None:
            self.deadlock_detector.in_receive(self._broadcast_header(header, rank), source)

        self._groups.issue(wait)

    def _broadcast_header(self, header: Tensor, rank: int) -> Any:
        # Calls the gloo backend itself: torch's Python wrappers take as long as the message.
        options = BroadcastOptions()
        options.rootRank = rank
        return broadcast_by_backend(backend_of_group(self._groups.control, header.device), [header], options)

    def meet(self, word: str | None, within_s: float) -> bool:
        return self._groups.meet(word, within_s)

    def fail(self, reason: str) -> None:
        self._groups.fail(reason)

    @property
    def group_names(self) -> list[str]:
        """Names of all groups that this communicator issues collectives on."""
        return [*self._groups.group_names, *(each.group_name for each in self._background_groups)]

    def close(self) -> None:
        """Destroys its groups, those of its parts, and the background groups. Idempotent.

        Not collective: a rank that failed closes alone. Blocks until collectives in flight have ended, so that
        afterwards nothing writes into their buffers.
        """
        self._groups.close()
        for each in self._background_groups:
            each.close()


def _stripes(flat: FlatLayout, full: Tensor, shard: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs (stripe of `full`: world_size pieces; this rank's piece in `shard`)."""
    pairs = []
    for piece in flat.pieces(0):  # stripes have the same positions for every rank
        start = piece.full_start
        pairs.append(
            (
                full[start : start + flat.world_size * piece.numel],
                shard[piece.shard_start : piece.shard_start + piece.numel],
            )
        )
    return pairs


def _add_in_fp32(parts: Tensor, mean: Tensor, divisor: float) -> None:
    """Writes the sum of rows, over `divisor`, to `mean`: added in order, in fp32 or wider, and rounded once (I2)."""
    # In blocks that are in the cache for all passes.
    total = mean.new_empty(min(_BLOCK_NUMEL, mean.numel()), dtype=torch.promote_types(mean.dtype, torch.float32))
    for start in range(0, mean.numel(), _BLOCK_NUMEL):
        into = mean[start : start + _BLOCK_NUMEL]
        block = total[: into.numel()]
        block.copy_(parts[0, start : start + _BLOCK_NUMEL])
        for part in parts[1:]:
            block.add_(part[start : start + _BLOCK_NUMEL])
        into.copy_(block.div_(divisor))


def _event_at_end(events: Events, name: str, full: Tensor) -> Callable[[], None] | None:
    """Returns a callback that sends the event of a collective that begins now; None without listeners."""
    if not events.active:
        return None
    began_s, size_bytes = perf_counter(), full.nbytes

    def done() -> None:
        event = Event(EventKind.COLLECTIVE, "ranks", name, began_s, perf_counter(), bytes=size_bytes)
        events.emit(event)

    return done
