"""Copies in flight: takes hold of their pages, sets their bytes on their way, lets go at their end.

I1: all pages of a copy are held before its first byte moves, or none is and the caller gets InternalError.
I2: the lock is the Allocator's. `begin` and what runs at a copy's end hold it; no byte moves and no thread is awaited
    under it. Only a CUDA event, which needs nobody's lock, may be waited for (`unless_busy`).
I3: a disk copy is finished by its I/O threads and a copy between RAM tiers by its caller. Nobody is told when a CUDA
    event completes, so a copy on a stream is finished by whoever asks next: a waiter, or `begin`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from lightning_ptm.errors import InternalError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.backend import Mark
from lightning_ptm.memory.copy_plan import CopyMachine, CopyRange, disk_jobs, ram_pairs, source_pieces, target_pieces
from lightning_ptm.memory.io import IoQueue
from lightning_ptm.memory.ledger import TierLedger
from lightning_ptm.memory.link_meters import Link, LinkMeter, LinkStats
from lightning_ptm.memory.page_ranges import PagePiece
from lightning_ptm.memory.page_table import Flight, PageEvent
from lightning_ptm.memory.transfer import Completion, StreamTransfer, Transfer
from lightning_ptm.terms import Tier

Result = TypeVar("Result")

Settle = Callable[[BaseException | None], None]
"""What happens, under the lock, when a copy has ended and its pages are let go: gets its error, or None."""


@dataclass(frozen=True, slots=True, eq=False)
class _Hold:
    """A flight, and the tier whose table it is in."""

    tier: Tier
    flight: Flight


@dataclass(slots=True, eq=False)
class StartedCopy:
    """A copy that holds its pages, from `begin` to its end."""

    copy: CopyRange
    holds: list[_Hold]
    meter: LinkMeter
    settle: Settle | None
    began_s: float
    behind: Sequence[Mark] | None
    """What a stream's part in it waits for; None: for what the launching thread's stream has queued."""


class Copier:
    """Starts and finishes copies for the Allocator.

    Args:
        machine: the bytes and the streams.
        io: I/O threads, None without a disk tier.
        ledgers: of every tier; their tables are written here and in the Allocator, under the lock.
        lock: the Allocator's.
        events: told of every copy that ends.
    """

    def __init__(
        self,
        machine: CopyMachine,
        io: IoQueue | None,
        ledgers: Mapping[Tier, TierLedger],
        lock: threading.RLock,
        events: Events | None = None,
    ) -> None:
        self._events = events or Events()
        self._machine = machine
        self._io = io
        self._ledgers = ledgers
        self._lock = lock

        # State, under the lock.
        self._links: dict[Link, LinkMeter] = {}
        self._disk = LinkMeter()
        """Reads and writes of the disk together."""
        self._any = LinkMeter()
        """All links together."""
        self._streamed: list[StreamTransfer] = []

    def begin(self, copy: CopyRange, settle: Settle | None = None, behind: Sequence[Mark] | None = None) -> StartedCopy:
        """Hold a copy's pages (lock held); `launch` it afterwards, without the lock. See StartedCopy.

        Raises:
            InternalError: bytes of it are in another transfer's way; nothing is held.
        """
        self._reap()
        holds = self.unless_busy(lambda: self._hold(copy))
        meter = self._links.setdefault((copy.source.tier, copy.target.tier), LinkMeter())
        now_s = perf_counter()
        if not self._machine.on_stream(copy.source.tier, copy.target.tier):
            meter.begin(copy.length_bytes, now_s)
            self._any.begin(copy.length_bytes, now_s)
        if copy.by_io:
            self._disk.begin(copy.length_bytes, now_s)
        return StartedCopy(copy, holds, meter, settle, now_s, behind)

    def launch(self, started: StartedCopy) -> Transfer:
        """Set a copy's bytes on their way (lock not held)."""
        copy, machine = started.copy, self._machine

        def finish(error: BaseException | None) -> None:
            with self._lock:
                now_s = perf_counter()
                if not machine.on_stream(copy.source.tier, copy.target.tier):
                    started.meter.end(now_s)
                    self._any.end(now_s)
                if copy.by_io:
                    self._disk.end(now_s)
                self._tell(started, now_s)  # before its end: a tensor that is moved still has its old tier
                self._finish(started, error)

        try:
            if copy.by_io:
                jobs = disk_jobs(copy, machine, started.behind)
            else:
                pairs = ram_pairs(copy, machine)
                completion = machine.stream(copy.source.tier, copy.target.tier).launch(pairs, started.behind)
        except BaseException as error:
            finish(error)
            raise
        if copy.by_io:
            transfer = Transfer(len(jobs), finish)
            for job in jobs:
                assert self._io is not None  # there are jobs, so there is a disk
                self._io.submit(job.lane, job.job, transfer)
            return transfer
        if machine.on_stream(copy.source.tier, copy.target.tier):
            return self._track(started, completion)
        return Transfer(0, finish)

    def unless_busy(self, action: Callable[[], Result]) -> Result:
        """Do `action` (lock held); when it meets pages that are busy, wait for copies that a stream was ordered behind.

        Such a copy's caller has waited on it already, with `wait(host=False)`: only its event is late.
        """
        try:
            return action()
        except InternalError:
            ordered = [transfer for transfer in self._streamed if transfer.ordered]
            if not ordered:
                raise
            for transfer in ordered:
                transfer.wait()
            return action()

    def stats(self) -> dict[Link, LinkStats]:
        """Totals of every link used so far (lock held)."""
        self._reap()
        now_s = perf_counter()
        return {link: meter.stats(now_s) for link, meter in self._links.items()}

    def disk_stats(self) -> LinkStats:
        """Totals of the disk, reads and writes together (lock held)."""
        return self._disk.stats(perf_counter())

    def all_stats(self) -> LinkStats:
        """Totals of all links together (lock held)."""
        self._reap()
        return self._any.stats(perf_counter())

    def finish_streamed(self) -> None:
        """Wait for every copy on a stream."""
        with self._lock:
            streamed, self._streamed = self._streamed, []
        for transfer in streamed:
            transfer.wait()

    def _hold(self, copy: CopyRange) -> list[_Hold]:
        source, target = copy.source.tier, copy.target.tier
        page_size = self._machine.page_size
        holds: list[_Hold] = []
        try:
            for piece in source_pieces(copy, page_size):
                holds.append(self._hold_piece(source, piece, PageEvent.LEAVE))
            for piece in target_pieces(copy, page_size):
                holds.append(self._hold_piece(target, piece, PageEvent.ARRIVE))
        except InternalError as error:
            self._let_go(holds)
            raise InternalError(
                f"copying {copy.source.name} to {copy.target.name}: {error}; wait for the transfer that holds them"
            ) from None
        return holds

    def _hold_piece(self, tier: Tier, piece: PagePiece, event: PageEvent) -> _Hold:
        return _Hold(tier, self._ledgers[tier].table.begin(piece.frame, piece.start_bytes, piece.stop_bytes, event))

    def _track(self, started: StartedCopy, completion: Completion) -> Transfer:
        """The handle of a copy on a CUDA stream (I3)."""

        def finish(error: BaseException | None) -> None:
            seconds_s = completion.seconds()
            if error is None:
                started.meter.add(started.copy.length_bytes, seconds_s)
                self._any.add(started.copy.length_bytes, seconds_s)
            self._tell(started, started.began_s + seconds_s)
            self._finish(started, error)

        def let_go_of_device() -> None:
            self._let_go([hold for hold in started.holds if hold.tier.computes])
            started.holds = [hold for hold in started.holds if not hold.tier.computes]

        # A move changes its tensor's place at its end, and that cannot be undone for a stream that is late: it blocks.
        on_ordered = None if started.settle is not None else let_go_of_device
        transfer = StreamTransfer(completion, self._lock, on_finished=finish, on_ordered=on_ordered)
        with self._lock:
            self._streamed.append(transfer)
        if started.copy.source.tier is started.copy.target.tier:
            transfer.wait(host=False)  # it runs on the current stream, so what follows there is behind it
        return transfer

    def _tell(self, started: StartedCopy, end_s: float) -> None:
        if self._events.active:
            copy = started.copy
            track = f"{copy.source.tier.name}_to_{copy.target.tier.name}".lower()
            # Of the two names, one is often that of a buffer; the home's tells more.
            home = max(copy.source, copy.target, key=lambda tensor: tensor.tier.distance)
            self._events.emit(Event(EventKind.COPY, track, home.name, started.began_s, end_s, bytes=copy.length_bytes))

    def _finish(self, started: StartedCopy, error: BaseException | None) -> None:
        self._let_go(started.holds)
        started.holds = []
        if started.settle is not None:
            started.settle(error)

    def _let_go(self, holds: Sequence[_Hold]) -> None:
        for hold in holds:
            self._ledgers[hold.tier].table.end(hold.flight)

    def _reap(self) -> None:
        """Finish the copies whose CUDA events have completed."""
        if self._streamed:
            self._streamed = [transfer for transfer in self._streamed if not transfer.done()]
