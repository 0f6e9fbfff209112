"""Exchanges columns of parameters between tensor-parallel ranks, so that each rank writes whole rows to a sharded
checkpoint.

A parameter that is cut by columns has rows whose parts are on different ranks. One rank's part of a row is a short
range of the file; a page has hundreds or thousands of them, and each would be a write of its own. The ranks of a
tensor-parallel group own the same elements of their slices, so their pages together are whole rows of the file, of
which each rank writes an equal share. Elements of a row that is only partly in a page are written without an exchange.
Where states are in RAM, a "page" of this file is several pages (`saving._AT_ONCE_BYTES`): an exchange of one page costs
as much in hand-offs between threads and ranks as in bytes. A page is sent while the rows of the previous one are
written, since the disk would be idle while ranks wait for each other.

I1: ranks of a group have the same exchanges in the same order; they compare their numbers before the first.
I2: every message says whether its sender has failed. A rank that fails still sends its next message, so all ranks of a
    group stop after the same exchange and none waits for ever. So no exchange begins before the previous one is
    received.
I3: each rank holds at most two pages at once. One thread exchanges.

Of a checkpoint that is saved in the background of training, `BackgroundRowExchange` exchanges in a thread of its own.
Updates make each rank copy pages in an order of its own (snapshot.py), while all ranks must exchange pages in the same
order. So the part of a page that is to be exchanged is copied and queued. A page's place in the common order is its turn.

I4: only this thread exchanges, through a channel of its own, so training never waits in an exchange.
I5: the page whose turn it is is always admitted, however much is queued, and waiting for room never blocks the thread
    that copies that page. So a rank's next page depends on no other rank, and all turns come.
I6: pages that are queued, being exchanged or received take at most `room_bytes`, or the size of two turns if that is
    more.
I7: the thread ends in `finish` or `give_up`, or when it fails; afterwards `wait_for_room` returns at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from lightning_ptm.comm import Communicator
from lightning_ptm.comm.background_group import AsyncExchange, Channel
from lightning_ptm.errors import CheckpointError, FailedElsewhere, InternalError
from lightning_ptm.memory.core_limits import use_cores
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.full_params.sharded_states import ShardedFlat
from lightning_ptm.runtime.tensors.page_io import within
from lightning_ptm.update.flat_states import Segment

_MANY_ROWS = 16
"""Parameters with fewer rows are written faster than they are exchanged."""
_SHORT_NUMEL = 64 << 10
"""So are parameters whose rows have parts of this length or more."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a slice that are whole in a page; `start` is the offset of their first element in the page."""

    parameter: str
    box: TensorSlice
    start: int
    rows: range
    itemsize: int

    def of(self, part: int) -> range:
        """Returns the rows that the rank with this slice writes."""
        first, last = (self.rows.start + len(self.rows) * each // self.box.parts for each in (part, part + 1))
        return range(first, last)

    def numel(self, part: int) -> int:
        """Returns the number of elements that each rank sends to the one with this slice."""
        return len(self.of(part)) * self.box.run_numel

    def nbytes(self, part: int) -> int:
        """Returns `numel` in bytes."""
        return self.numel(part) * self.itemsize

    def sent_to(self, part: int, page: Tensor) -> Tensor:
        """Returns what this rank sends of its page to the one with this slice, as bytes."""
        start = self.start + (self.of(part).start - self.rows.start) * self.box.run_numel
        return page.narrow(0, start, self.numel(part)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Table:
    """Whole rows of a parameter, in columns as the ranks have them.

    Args:
        columns: (rows, bytes of a row's part) of each slice, in the order of the slices.
    """

    columns: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.numel() for column in self.columns)

    def fill(self, into: Tensor, first: int) -> None:
        """Copies bytes [first, first + into.numel()) of the rows, laid end to end, into a uint8 tensor."""
        run_bytes = self.columns[0].shape[1]
        row_bytes = run_bytes * len(self.columns)
        row, offset = divmod(first, row_bytes)
        if offset:
            rest = self._row(row)[offset : offset + into.numel()]
            into[: rest.numel()].copy_(rest)
            into, row = into[rest.numel() :], row + 1
        rows = into.numel() // row_bytes
        table = into[: rows * row_bytes].view(rows, len(self.columns), run_bytes)
        for part, column in enumerate(self.columns):
            table[:, part].copy_(column[row : row + rows])
        last = into[rows * row_bytes :]
        if last.numel():
            last.copy_(self._row(row + rows)[: last.numel()])

    def _row(self, row: int) -> Tensor:
        return torch.cat([column[row] for column in self.columns])


Write = Callable[[str, int, Table], None]
"""Writes rows to the whole parameter: (name of the parameter, first element, rows)."""


@dataclass(frozen=True, slots=True)
class Message:
    """The whole rows of a page, ready to be sent.

    Args:
        own: the part of each of `rows` that this rank keeps of its own page.
        sent: bytes for each other rank: its share of the rows, and a byte for I2.
        write: writes this rank's share of the rows when the other columns have been received.
    """

    rows: Sequence[_Rows]
    own: Sequence[Tensor]
    sent: Tensor
    write: Write


@dataclass(frozen=True, slots=True)
class _InFlight:
    """An exchange that has begun.

    Args:
        coming: number of bytes from each rank; 0 from this rank itself.
    """

    message: Message
    coming: Sequence[int]
    received: Tensor
    work: AsyncExchange


def exchanged(box: TensorSlice | None) -> TypeGuard[TensorSlice]:
    """Returns whether whole rows of a parameter are exchanged."""
    return box is not None and box.rows >= _MANY_ROWS and 0 < box.run_numel < _SHORT_NUMEL


def not_exchanged(segment: Segment, box: TensorSlice | None) -> Iterator[tuple[int, int]]:
    """Yields the ranges [first, end) of a segment within a page that are not exchanged, from the segment's start."""
    if not exchanged(box) or not (rows := box.full_rows(segment.parameter_start, segment.numel)):
        yield 0, segment.numel
        return
    for begin, end in (
        (0, rows.start * box.run_numel - segment.parameter_start),
        (rows.stop * box.run_numel - segment.parameter_start, segment.numel),
    ):
        if begin < end:
            yield begin, end


@dataclass(frozen=True, slots=True)
class PagedFlat:
    """A flat, and the ranges (first element, number of elements) in which it is passed, in this order."""

    flat: ShardedFlat
    pages: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A future exchange, of the page of a flat that begins with element `start`.

    Args:
        held_bytes: bytes of its message until it is sent, and of what is received for it.
    """

    flat: ShardedFlat
    start: int
    held_bytes: int


class RowExchange:
    """All row exchanges of one checkpoint. Collective among the ranks of a tensor-parallel group.

    Args:
        group: the ranks with the other slices, in the order of the slices.
        flats: all flats that this rank writes, in the order of the exchanges.
        channel: what the exchanges use; None: the group.

    Raises:
        InternalError: on all ranks of the group, if their exchanges differ (I1).
    """

    def __init__(self, group: Communicator, flats: Iterable[PagedFlat], channel: Channel | None = None) -> None:
        self._channel: Channel = group if channel is None else channel
        found = [
            (each.flat, start, rows)
            for each in flats
            if not group.alone
            for start, numel in each.pages
            if (rows := _rows_in(each.flat, start, start + numel))
        ]
        counts = group.exchange((len(found), sum(each.numel(0) for *_, rows in found for each in rows), 0))
        if len(set(counts)) > 1:
            raise InternalError(
                f"the ranks of a tensor group would exchange different rows of a checkpoint: {counts}; until it is "
                "mended, save with checkpoints=Checkpoints(state_dict_type='full')"
            )
        self.turns = [Turn(flat, start, self._held_bytes(rows)) for flat, start, rows in found]
        """Pages with whole rows, in the order of the exchanges."""

        # State: future exchanges, the next one last, empty after a failure of any rank; and the one that has begun.
        self._remaining = [rows for *_, rows in reversed(found)]
        self._in_flight: _InFlight | None = None

    def begin(self, flat: ShardedFlat, start: int, page: Tensor, write: Write, *, stays: bool) -> None:
        """Starts the exchange of a page's whole rows, and writes the rows of the previous exchange. This rank's share
        of the rows is written when they are received: in the next call, or in `finish`.

        Args:
            stays: the page is neither changed nor freed until then.

        Raises:
            FailedElsewhere: another rank of the group has failed.
        """
        message = self.message(flat, start, page, write, stays=stays)
        if message is not None:
            self.send(message)

    def message(self, flat: ShardedFlat, start: int, page: Tensor, write: Write, *, stays: bool) -> Message | None:
        """Returns the message that `begin` would send; sends nothing. For any thread."""
        rows, mine = _rows_in(flat, start, start + page.numel()), self._channel.rank
        if not rows:
            return None
        well = torch.zeros(1, dtype=torch.uint8)
        others = [part for part in range(self._channel.world_size) if part != mine]
        sent = torch.cat([piece for part in others for piece in (*(each.sent_to(part, page) for each in rows), well)])
        own = [each.sent_to(mine, page) for each in rows]
        return Message(rows, own if stays else [piece.clone() for piece in own], sent, write)

    def send(self, message: Message) -> None:
        """Starts the next exchange, and writes the rows of the previous one. Raises as `begin`."""
        before = self._wait()
        self._in_flight = self._start(message)
        self._write(before)

    def finish(self) -> None:
        """Writes the rows of the last exchange. Raises as `begin`."""
        self._write(self._wait())

    def give_up(self) -> None:
        """Reports to the group that this rank has failed, in the next exchange if there is one."""
        with contextlib.suppress(CheckpointError):
            self._wait()
            if self._remaining:
                self._in_flight = self._start(self._failure())
                self._remaining = []
                self._wait()

    def _held_bytes(self, rows: Sequence[_Rows]) -> int:
        size, mine = self._channel.world_size, self._channel.rank
        of_page = sum(each.nbytes(part) for each in rows for part in range(size))
        return of_page + (size - 1) * (2 + sum(each.nbytes(mine) for each in rows))

    def _failure(self) -> Message:
        """Returns the message that reports a failure in place of the next page."""
        rows, mine = self._remaining[-1], self._channel.rank
        parts = [part for part in range(self._channel.world_size) if part != mine]
        size = sum(1 + sum(each.nbytes(part) for each in rows) for part in parts)
        return Message(rows, (), torch.ones(size, dtype=torch.uint8), lambda name, first, rows: None)

    def _start(self, message: Message) -> _InFlight:
        """Starts the next exchange."""
        left, self._remaining = self._remaining, []
        left.pop()
        mine, parts = self._channel.rank, range(self._channel.world_size)
        sizes = [1 + sum(each.nbytes(part) for each in message.rows) for part in parts]
        outgoing = [0 if part == mine else sizes[part] for part in parts]
        coming = [0 if part == mine else sizes[mine] for part in parts]
        received, work = self._channel.start_all_to_all(message.sent, outgoing, coming)
        self._remaining = left
        return _InFlight(message, coming, received, work)

    def _wait(self) -> _InFlight | None:
        """Waits for the exchange that has begun, if any, and returns it. Raises FailedElsewhere if a rank reports a
        failure."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return None
        left, self._remaining = self._remaining, []
        in_flight.work.wait()
        messages = in_flight.received.split(in_flight.coming)
        failed = [part for part, message in enumerate(messages) if message.numel() and message[-1]]
        if failed:
            raise FailedElsewhere(
                f"the tensor-parallel rank {failed[0]} of this rank's group could not write its checkpoint part, so "
                "the checkpoint was not completed; its own error says why"
            )
        self._remaining = left
        return in_flight

    def _write(self, exchanged: _InFlight | None) -> None:
        if exchanged is None:
            return
        messages = exchanged.received.split(exchanged.coming)
        mine, place = self._channel.rank, 0
        for each, own in zip(exchanged.message.rows, exchanged.message.own, strict=True):
            size_bytes = each.nbytes(mine)
            came = (
                own if part == mine else message[place : place + size_bytes] for part, message in enumerate(messages)
            )
            share, box = each.of(mine), each.box
            if share:
                table = Table([column.view(len(share), -1) for column in came])
                exchanged.message.write(each.parameter, share.start * box.parts * box.run_numel, table)
            place += size_bytes


def _rows_in(flat: ShardedFlat, start: int, stop: int) -> list[_Rows]:
    """Returns the rows among elements [start, stop) of a flat that are exchanged."""
    found = []
    for segment in within(flat.segments, start, stop):
        spec = flat.parameters[segment.parameter]
        if exchanged(spec.box):
            rows = spec.box.full_rows(segment.parameter_start, segment.numel)
            first = rows.start * spec.box.run_numel - segment.parameter_start
            if rows:
                found.append(_Rows(spec.name, spec.box, segment.start - start + first, rows, flat.paged.dtype.itemsize))
    return found


class BackgroundRowExchange:
    """The exchanges of one save.

    Args:
        exchange: the exchanges, in order; only this object uses it from now on.
        room_bytes: see I6.
        failed: called with the error if the exchanges end before the last one.
    """

    def __init__(self, exchange: RowExchange, room_bytes: int, failed: Callable[[BaseException], None]) -> None:
        self._exchange = exchange
        self._room_bytes = room_bytes
        self._failed = failed
        self._turns = {(id(each.flat), each.start): number for number, each in enumerate(exchange.turns)}

        # State, under the condition's lock.
        self._changed = threading.Condition()
        self._turn = 0
        """The turn that is exchanged next."""
        self._waiting: dict[int, Message] = {}
        self._held: dict[int, int] = {}
        """Bytes of pages, by turn, from their admission until they are written."""
        self._ends = False
        """Whether no more pages are admitted."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        thread = threading.Thread(target=self._exchange_all, name="lightning_ptm rows", daemon=True)
        thread.start()
        self._thread = thread  # only once it has started: `give_up` joins it

    def wait_for_room(self, flat: ShardedFlat, start: int) -> None:
        """Waits until a page may be passed to `begin`; returns at once if the page has no whole rows. For any thread
        that holds no lock."""
        turn = self._turns.get((id(flat), start))
        if turn is None:
            return
        needed = self._exchange.turns[turn].held_bytes
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends or turn <= self._turn or sum(self._held.values()) + needed <= self._room_bytes
            )
            self._held[turn] = needed

    def begin(self, flat: ShardedFlat, start: int, page: Tensor, write: Write, *, stays: bool) -> None:
        """Queues a page to be exchanged in its turn; see `RowExchange.begin`. Errors of the exchange are not raised
        here."""
        turn = self._turns.get((id(flat), start))
        if turn is not None and not self._ends:
            message = self._exchange.message(flat, start, page, write, stays=stays)
            assert message is not None  # every page with a turn has rows to exchange
            with self._changed:
                self._waiting[turn] = message
                self._changed.notify_all()

    def finish(self) -> None:
        """Waits until everything is exchanged and written.

        Raises:
            CheckpointError: the error with which the exchanges ended early.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Ends the exchanges; see `RowExchange.give_up`. Waits for the exchange that reports the failure to the
        others."""
        self.abandon()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Ends the exchanges without waiting: `wait_for_room` returns, and the thread reports the failure to the
        others."""
        with self._changed:
            self._ends = True
            self._waiting.clear()
            self._changed.notify_all()

    def _exchange_all(self) -> None:
        use_cores(1)
        try:
            for turn in range(len(self._turns)):
                message = self._next(turn)
                if message is None:
                    self._error = CheckpointError(
                        "the exchange of parts of parameters for a checkpoint was stopped before its last page, since "
                        "saving failed, so the checkpoint was not completed; earlier ones are untouched"
                    )
                    self._exchange.give_up()
                    return
                self._exchange.send(message)
                self._written(turn - 1)
            self._exchange.finish()
        except BaseException as error:
            self._error = error
            self.abandon()
            self._failed(error)
            self._exchange.give_up()

    def _next(self, turn: int) -> Message | None:
        """Returns the message of a turn when it is queued; None if saving has failed on this rank."""
        with self._changed:
            self._turn = turn
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ends or turn in self._waiting)
            return None if self._ends else self._waiting.pop(turn)

    def _written(self, turn: int) -> None:
        with self._changed:
            self._held.pop(turn, None)
            self._changed.notify_all()
