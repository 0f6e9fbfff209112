"""The collectives of pages: one stripe of a flat at a time (section 3 of the design; the paper's Communicator).

Owns the process groups and the stream that collectives run on. Knows flats and tensors, never units' meaning.
World size 1 takes the same path with `SoloCommunicator`. What some ranks only share has a communicator of theirs
(`ProcessGroupCommunicator.part`): its ranks are counted among themselves, and it ends with the one of all.

I1: an all-gather of stripe i writes piece r of rank r straight into its place in the full flat; nothing is merged. Shares of
    different lengths (whole parameters of each rank) go from their owner to all others, and come to it.
I2: `Work` keeps every buffer of a collective alive and is waited on once.
I3: a reduction adds the ranks' pieces in rank order, in fp32 on CPU, and rounds once.
I4: no rank waits for one that has failed: it hangs up (`fail`), or its process's end does, and every collective that it
    is missing from raises `RankError` on the others, with its reason if it could leave one.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lightning_ptm.comm.agreement import Row
from lightning_ptm.comm.behind import GroupBehind
from lightning_ptm.comm.patience import NOTHING, Exchanged, Patience
from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.backend import Backend, in_ram
from lightning_ptm.planning.layout import FlatLayout

Guard = Callable[[Callable[[], Any]], Any]
"""Calls its argument; turns what a failed collective raises into RankError."""


def _unguarded(call: Callable[[], Any]) -> Any:
    return call()


_GLOO = "gloo"
_LOOK_S = 0.05
"""How often a rank that was cut short looks who else has come."""


class Work:
    """A started collective. `wait` returns when its result may be read on the current stream."""

    def __init__(
        self,
        handles: Sequence[Any] = (),
        buffers: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
        guard: Guard = _unguarded,
        done: Callable[[], None] | None = None,
    ) -> None:
        self._handles = list(handles)
        self._buffers = list(buffers)
        self._finish = finish
        self._guard = guard
        self._done = done

    def wait(self) -> None:
        """Waits once; later calls return at once.

        Raises:
            RankError: another rank is gone or the collective timed out.
        """
        handles, self._handles = self._handles, []
        for handle in handles:
            self._guard(handle.wait)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._buffers = []
        done, self._done = self._done, None
        if done is not None:
            done()

    def done(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


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

    def behind(self, partition: Sequence[Sequence[int]]) -> GroupBehind | None:
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

    def behind(self, partition: Sequence[Sequence[int]]) -> GroupBehind | None:
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


class ProcessGroupCommunicator:
    """Collectives over torch.distributed, by the library of the device, and a gloo group for agreements.

    Args:
        backend: the compute device of this rank; decides the library of the data group.
        timeout: after this long without an answer of the others a collective fails (`RankError`).
        events: told of every collective of pages or tokens.
        within: see `part`.
        partition: see `part`.
    """

    def __init__(
        self,
        backend: Backend,
        timeout: datetime.timedelta,
        events: Events | None = None,
        *,
        within: ProcessGroupCommunicator | None = None,
        partition: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._events = events or Events()
        self._timeout = timeout
        partition = partition or [range(dist.get_world_size())]
        self._ranks = next(tuple(ranks) for ranks in partition if dist.get_rank() in ranks)
        self.rank = self._ranks.index(dist.get_rank())
        self.world_size = len(self._ranks)
        self._backend = backend
        # torch 2.13 renamed the flat collectives and warns for the old names.
        self._all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._stream = backend.stream()
        self._rows_in = torch.zeros(3, dtype=torch.int64)
        self._rows_out = torch.zeros(3 * self.world_size, dtype=torch.int64)
        self._rows_options = AllgatherOptions()
        # The ranks' bulletin board: it works while collectives hang.
        self._board = dist.distributed_c10d._get_default_store()
        self._failure_key: str = "" if within is None else within._failure_key
        self._parts: list[ProcessGroupCommunicator] = []
        self._behind: list[GroupBehind] = []

        # State: no group any more once closed.
        self._begun = self._issued = 0
        """Collectives that this rank has begun to issue, and that it has issued."""
        self._data_group: dist.ProcessGroup | None = None
        self._control_group: dist.ProcessGroup | None = None
        for ranks in partition:  # every rank makes all groups, in the same order
            members = None if within is None else list(ranks)
            data = self._guard(lambda: dist.new_group(members, backend=backend.collectives, timeout=timeout))  # noqa: B023
            control = self._guard(lambda: dist.new_group(members, backend=_GLOO, timeout=timeout))  # noqa: B023
            if dist.get_rank() in ranks:
                self._data_group, self._control_group = data, control
            del data, control  # the last reference must be `close`'s
        if within is None:
            # Of this communicator alone: groups are numbered alike on all ranks.
            self._failure_key = f"lightning_ptm/failure/{self._control.group_name}"
        self.patience: Patience = (
            Patience(self._board, self._failure_key, self._own_rank) if within is None else within.patience
        )

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def part(self, partition: Sequence[Sequence[int]]) -> ProcessGroupCommunicator:
        made = ProcessGroupCommunicator(self._backend, self._timeout, self._events, within=self, partition=partition)
        self._parts.append(made)
        return made

    def behind(self, partition: Sequence[Sequence[int]]) -> GroupBehind | None:
        for ranks in partition:  # every rank makes all groups, in the same order
            members = list(ranks)
            group = self._guard(lambda: dist.new_group(members, backend=_GLOO, timeout=self._timeout))  # noqa: B023
            if self._own_rank in members and len(members) > 1:
                self._behind.append(GroupBehind(group, members))
            del group  # the last reference must be `close`'s
        return self._behind[-1] if self._behind else None

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        if flat.shares:
            return self.gather_shares(shard, full, flat.shares)

        def start() -> list[Any]:
            return [
                self._all_gather_flat(stripe, piece, group=self._data, async_op=True)
                for stripe, piece in _stripes(flat, full, shard)
            ]

        told = self._told("all_gather", full)
        with self._on_stream():
            handles = self._issue(start)
        return Work(handles, [shard, full], self._join, self._guard, told)

    def gather_shares(self, share: Tensor | None, full: Tensor, shares: Sequence[int]) -> Work:
        places = [full[start:end] for start, end in itertools.pairwise(shares)]

        def start() -> list[Any]:
            if share is not None:
                places[self.rank].copy_(share)
            return [
                dist.broadcast(place, src=source, group=self._data, async_op=True)
                for place, source in zip(places, self._ranks, strict=True)
                if place.numel()
            ]

        told = self._told("all_gather", full)
        with self._on_stream():
            handles = self._issue(start)
        return Work(handles, [full] if share is None else [share, full], self._join, self._guard, told)

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        if flat.shares and self._backend.collectives != _GLOO:
            return self._reduce_to_owners(full, shard, flat, divisor)
        if self._backend.collectives != _GLOO:

            def start() -> list[Any]:
                return [
                    self._reduce_scatter_flat(piece, stripe, op=dist.ReduceOp.AVG, group=self._data, async_op=True)
                    for stripe, piece in _stripes(flat, full, shard)
                ]

            return self._average(start, self._join, full, shard, divisor)
        return self._exchange_and_add(full, shard, flat, divisor)

    def _reduce_to_owners(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        places = [full[start:end] for start, end in itertools.pairwise(flat.shares)]

        def start() -> list[Any]:
            return [
                dist.reduce(place, dst=owner, op=dist.ReduceOp.AVG, group=self._data, async_op=True)
                for place, owner in zip(places, self._ranks, strict=True)
            ]

        def land() -> None:
            self._join()
            shard.copy_(places[self.rank])

        return self._average(start, land, full, shard, divisor)

    def _average(
        self, start: Callable[[], list[Any]], land: Callable[[], None], full: Tensor, shard: Tensor, divisor: float
    ) -> Work:
        """A reduction whose mean over the ranks is in `shard` behind `land`."""

        def finish() -> None:
            land()
            if divisor != self.world_size:
                shard.mul_(self.world_size / divisor)

        told = self._told("reduce_scatter", full)
        with self._on_stream():
            handles = self._issue(start)
        return Work(handles, [full, shard], finish, self._guard, told)

    def _exchange_and_add(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        # gloo's reduce-scatter moves all ranks' data to all ranks and adds in 16 bit; an all-to-all moves each piece
        # once, and we add in fp32, in rank order (I3).
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
                dist.all_to_all_single(into, stripe, theirs, sent, group=self._data, async_op=True)
                for stripe, (into, _) in zip(stripes, pairs, strict=True)
            ]

        def add() -> None:
            for into, piece in pairs:
                parts = into.view(self.world_size, piece.numel())
                total = parts[0].to(torch.promote_types(piece.dtype, torch.float32), copy=True)
                for rank in range(1, self.world_size):
                    total.add_(parts[rank])
                piece.copy_(total.div_(divisor))

        told = self._told("reduce_scatter", full)
        return Work(self._issue(start), [full, received, shard], add, self._guard, told)

    def _told(self, name: str, full: Tensor) -> Callable[[], None] | None:
        """What the end of a collective that begins now has to tell; None while nobody listens."""
        if not self._events.heard:
            return None
        began_s, size_bytes = perf_counter(), full.nbytes

        def done() -> None:
            event = Event(EventKind.COLLECTIVE, "ranks", name, began_s, perf_counter(), bytes=size_bytes)
            self._events.tell(event)

        return done

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out, work = self.start_all_to_all(rows, sent, received)
        work.wait()
        return out

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Work]:
        group = self._data if self._backend.holds(rows) else self._control
        out = rows.new_empty(sum(received), *rows.shape[1:])
        rows = rows.contiguous()

        def start() -> Any:
            return dist.all_to_all_single(out, rows, list(received), list(sent), group=group, async_op=True)

        told = self._told("all_to_all", rows)
        with self._on_stream():
            handle = self._issue(start)
        return out, Work([handle], [rows, out], self._join, self._guard, told)

    def issue(self, collective: Callable[[dist.ProcessGroup, bool], Any], value: Tensor) -> None:
        """A collective of these ranks, behind what the current stream has queued, and before what it queues next. They have
        agreed that it is the next one.

        Args:
            collective: issues it on a process group and returns when the current stream is behind it; or, where told that it
                is asynchronous, its handle.
            value: what it sends; decides on which group.

        Raises:
            RankError: one of the ranks will not come.
        """
        group = self._data if self._backend.holds(value) else self._control
        if self._backend.collectives == _GLOO or group is self._control:  # the host waits
            self._issue(lambda: self.patience.in_exchange(collective(group, True), self._ranks))
        else:
            self._issue(lambda: collective(group, False))

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        # On the control group: values are small and the host needs them.
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        on_host = values.cpu()
        self._issue(lambda: dist.all_reduce(on_host, op=operation, group=self._control))
        values.copy_(on_host)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        group = self._control if in_ram(tensor) else self._data
        self._issue(lambda: dist.broadcast(tensor, src=self._ranks[source], group=group))

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        box = [value]
        self._issue(lambda: dist.broadcast_object_list(box, src=self._ranks[source], group=self._control))
        return box[0]

    def exchange(self, row: Row) -> Sequence[Row]:
        self._rows_in.copy_(torch.tensor(row, dtype=torch.int64))

        # Of the backend itself: on the way there torch spends as long in Python as on the exchange.
        def exchange() -> None:
            gloo: Any = self._control._get_backend(self._rows_in.device)
            self.patience.in_round(gloo._allgather_base(self._rows_out, self._rows_in, self._rows_options))

        self._issue(exchange)
        values = self._rows_out.tolist()
        return [(values[3 * rank], values[3 * rank + 1], values[3 * rank + 2]) for rank in range(self.world_size)]

    def exchanged(self) -> Exchanged:
        return self.patience.exchanged()

    def send(self, page: Tensor, rank: int) -> Work:
        handle = self._issue(lambda: dist.isend(page, self._ranks[rank], group=self._data))
        return Work([handle], [page], guard=self._guard)

    def receive(self, page: Tensor, rank: int) -> Work:
        handle = self._issue(lambda: dist.irecv(page, self._ranks[rank], group=self._data))
        return Work([handle], [page], guard=self._guard)

    def _issue(self, collective: Callable[[], Any]) -> Any:
        self._begun += 1
        result = self._guard(collective)
        self._issued += 1
        return result

    def meet(self, word: str | None, within_s: float) -> bool:
        if self._control_group is None:
            return False
        # Ranks that have not issued the same collectives would take one for another from now on.
        everything = (self, *self._parts)
        if word is not None and all(each._begun == each._issued for each in everything):
            word = f"{word}, {[each._issued for each in everything]} collectives"
        else:
            word = None
        keys = [f"{self._failure_key}/met/{rank}" for rank in range(self.world_size)]
        verdict_key = f"{self._failure_key}/verdict"
        try:
            agreed = word is not None
            if word is not None:
                self._board.set(keys[self.rank], word)
                until = monotonic() + within_s
                while not self._board.check(keys):
                    known = self._board.check([verdict_key]) or self._board.check([self._failure_key])
                    if known or monotonic() > until:
                        break
                    time.sleep(_LOOK_S)
                agreed = self._board.check(keys) and all(self._board.get(key).decode() == word for key in keys)
            # The first to know decides: another may look when the last one has just come, or not yet.
            return bool(self._board.compare_set(verdict_key, "", "yes" if agreed else "no") == b"yes")
        except RuntimeError:  # the board is gone with the rank that kept it
            return False

    def fail(self, reason: str) -> None:
        if self._control_group is None:
            return
        # The board is gone when its rank's process is. The first reason stays: it is the cause of the others.
        with contextlib.suppress(Exception):
            self._board.compare_set(self._failure_key, "", f"rank {self._own_rank} failed with {reason}")
        self._hang_up()

    @property
    def group_names(self) -> list[str]:
        """Of all groups that collectives are issued on here."""
        groups = [group for each in (self, *self._parts) for group in (each._data_group, each._control_group)]
        behind = [each.group_name for each in self._behind]
        return [*(group.group_name for group in groups if group is not None), *behind]

    def close(self) -> None:
        """Destroys the two groups, those of its parts and those behind training. Not collective: a rank that failed closes
        alone. Blocks until collectives in flight have ended, so that afterwards nothing writes into their buffers.
        Idempotent."""
        self._hang_up()
        for each in self._behind:
            each.close()

    def _hang_up(self) -> None:
        # Dropping the last reference is what closes the connections. Control first: there the others wait.
        communicators = [self, *self._parts]
        for each in communicators:
            control, each._control_group = each._control_group, None
            _destroy(control)
            del control
        for each in communicators:
            data, each._data_group = each._data_group, None
            _destroy(data)
            del data

    @property
    def _own_rank(self) -> int:
        """Among all ranks."""
        return self._ranks[self.rank]

    @property
    def _data(self) -> dist.ProcessGroup:
        return self._still_open(self._data_group)

    @property
    def _control(self) -> dist.ProcessGroup:
        return self._still_open(self._control_group)

    def _still_open(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise UsageError(
                f"rank {self._own_rank} has left the collectives of this run, which has ended; start a new one"
            )
        return group

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, (UsageError, RankError)):
                raise
            # Without its traceback, whose frames name the group and would keep the connections open in `fail`.
            raise RankError(self._explanation(error)) from error.with_traceback(None)

    def _explanation(self, error: RuntimeError) -> str:
        reason = ""
        with contextlib.suppress(Exception):  # the board may be gone with the rank that kept it
            if self._failure_key and self._board.check([self._failure_key]):
                reason = self._board.get(self._failure_key).decode()
        if reason:
            return (
                f"{reason}; a collective needs all ranks, so rank {self._own_rank} stops too; look for the traceback in that "
                f"rank's output"
            )
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return (
            f"a collective of rank {self._own_rank} failed ({first_line}); another rank has probably died or hangs, so this "
            f"one stops; look for the first error among the ranks' logs"
        )

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        self._stream.follow()
        return self._stream.entered()

    def _join(self) -> None:
        self._stream.join()


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
