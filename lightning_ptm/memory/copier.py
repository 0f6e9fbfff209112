"""The Copier: starts copies between tiers, holds their pages while they run, and frees the pages at their end.

I1: `begin` holds all pages of a copy before its first byte moves; if it cannot, it holds none and raises InternalError.
I2: the lock is the Allocator's. `begin` and the code that runs at a copy's end hold it; under it no byte moves and no
    thread is awaited. Only a CUDA event may be waited for (`unless_busy`), since its completion needs no lock.
I3: I/O threads finish a disk copy, the caller finishes a copy within RAM. CUDA does not report that an event has
    completed, so a copy on a stream is finished at the next query: by a waiter, or by `begin`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from lightning_ptm.errors import InternalError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.copy_plan import CopyMachine, CopyRange, disk_jobs, ram_pairs, source_pieces, target_pieces
from lightning_ptm.memory.device_work import Completion, Mark
from lightning_ptm.memory.io import IoQueue
from lightning_ptm.memory.ledger import TierLedger
from lightning_ptm.memory.link_meters import Link, LinkMeter, LinkStats
from lightning_ptm.memory.page_ranges import PagePiece
from lightning_ptm.memory.page_table import Flight, PageEvent
from lightning_ptm.memory.transfer import StreamTransfer, Transfer
from lightning_ptm.terms import Tier

Result = TypeVar("Result")

Settle = Callable[[BaseException | None], None]
"""Called under the lock when a copy has ended and its pages are no longer held, with its error or None."""


@dataclass(frozen=True, slots=True, eq=False)
class _Hold:
    """A transfer's hold on bytes of a page, and the tier of the page."""

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
    after: Sequence[Mark] | None
    """Marks that the stream part of the copy waits for; None: it waits for the launching thread's current stream."""


class Copier:
    """Starts and finishes copies for the Allocator.

    Args:
        machine: the regions and the copy streams.
        io: the I/O threads; None without a disk tier.
        ledgers: of every tier. The Copier and the Allocator write their tables, under the lock.
        lock: the Allocator's.
        events: gets an event for every copy that ends.
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
        self._all_links = LinkMeter()
        """All links together."""
        self._streamed: list[StreamTransfer] = []

    def begin(self, copy: CopyRange, settle: Settle | None = None, after: Sequence[Mark] | None = None) -> StartedCopy:
        """Holds the pages of a copy (lock held). Call `launch` afterwards, without the lock.

        Args:
            copy: what to copy.
            settle: called at the end of the copy.
            after: see StartedCopy.
        Raises:
            InternalError: another transfer holds some of the bytes; nothing is held.
        """
        self._reap()
        holds = self.unless_busy(lambda: self._hold(copy))
        meter = self._links.setdefault((copy.source.tier, copy.target.tier), LinkMeter())
        now_s = perf_counter()
        if not self._machine.on_stream(copy.source.tier, copy.target.tier):
            meter.begin(copy.length_bytes, now_s)
            self._all_links.begin(copy.length_bytes, now_s)
        if copy.by_io:
            self._disk.begin(copy.length_bytes, now_s)
        return StartedCopy(copy, holds, meter, settle, now_s, after)

    def launch(self, started: StartedCopy) -> Transfer:
        """Starts the bytes of a copy (lock not held) and returns the handle to wait on."""
        copy, machine = started.copy, self._machine

        def finish(error: BaseException | None) -> None:
            with self._lock:
                now_s = perf_counter()
                if not machine.on_stream(copy.source.tier, copy.target.tier):
                    started.meter.end(now_s)
                    self._all_links.end(now_s)
                if copy.by_io:
                    self._disk.end(now_s)
                self._report(started, now_s)  # before `_finish`: a moved tensor still has its old tier
                self._finish(started, error)

        try:
            if copy.by_io:
                jobs = disk_jobs(copy, machine, started.after)
            else:
                pairs = ram_pairs(copy, machine)
                completion = machine.stream(copy.source.tier, copy.target.tier).launch(pairs, started.after)
        except BaseException as error:
            finish(error)
            raise
        if copy.by_io:
            transfer = Transfer(len(jobs), finish)
            for job in jobs:
                assert self._io is not None  # jobs exist only with a disk tier
                self._io.submit(job.lane, job.job, transfer)
            return transfer
        if machine.on_stream(copy.source.tier, copy.target.tier):
            return self._track(started, completion)
        return Transfer(0, finish)

    def unless_busy(self, action: Callable[[], Result]) -> Result:
        """Runs `action` (lock held). If it meets busy pages, waits for copies already ordered on a stream, and retries.

        The callers of those copies have waited on them with `wait(host=False)`; only their events have not completed
        yet.
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
        """Returns the totals of every link used so far (lock held)."""
        self._reap()
        now_s = perf_counter()
        return {link: meter.stats(now_s) for link, meter in self._links.items()}

    def disk_stats(self) -> LinkStats:
        """Returns the totals of disk reads and writes together (lock held)."""
        return self._disk.stats(perf_counter())

    def all_stats(self) -> LinkStats:
        """Returns the totals of all links together (lock held)."""
        self._reap()
        return self._all_links.stats(perf_counter())

    def finish_streamed(self) -> None:
        """Waits for every copy on a stream."""
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
            self._free_holds(holds)
            raise InternalError(
                f"copying {copy.source.name} to {copy.target.name}: {error}; wait for the transfer that holds them"
            ) from None
        return holds

    def _hold_piece(self, tier: Tier, piece: PagePiece, event: PageEvent) -> _Hold:
        return _Hold(tier, self._ledgers[tier].table.begin(piece.frame, piece.start_bytes, piece.stop_bytes, event))

    def _track(self, started: StartedCopy, completion: Completion) -> Transfer:
        """Returns the handle of a copy on a CUDA stream (I3)."""

        def finish(error: BaseException | None) -> None:
            seconds_s = completion.seconds()
            if error is None:
                started.meter.add(started.copy.length_bytes, seconds_s)
                self._all_links.add(started.copy.length_bytes, seconds_s)
            self._report(started, started.began_s + seconds_s)
            self._finish(started, error)

        def free_device_holds() -> None:
            self._free_holds([hold for hold in started.holds if hold.tier.computes])
            started.holds = [hold for hold in started.holds if not hold.tier.computes]

        # A move changes its tensor's tier at its end, which must not happen while the stream still copies. So
        # `wait` always blocks for a move.
        on_ordered = None if started.settle is not None else free_device_holds
        transfer = StreamTransfer(completion, self._lock, on_finished=finish, on_ordered=on_ordered)
        with self._lock:
            self._streamed.append(transfer)
        if started.copy.source.tier is started.copy.target.tier:
            transfer.wait(host=False)  # the copy runs on the current stream, so later work there is ordered after it
        return transfer

    def _report(self, started: StartedCopy, end_s: float) -> None:
        if self._events.active:
            copy = started.copy
            track = f"{copy.source.tier.name}_to_{copy.target.tier.name}".lower()
            # One of the two tensors is often a buffer. The name of the one farther from compute, the home, says more.
            home = max(copy.source, copy.target, key=lambda tensor: tensor.tier.distance)
            self._events.emit(Event(EventKind.COPY, track, home.name, started.began_s, end_s, bytes=copy.length_bytes))

    def _finish(self, started: StartedCopy, error: BaseException | None) -> None:
        self._free_holds(started.holds)
        started.holds = []
        if started.settle is not None:
            started.settle(error)

    def _free_holds(self, holds: Sequence[_Hold]) -> None:
        for hold in holds:
            self._ledgers[hold.tier].table.end(hold.flight)

    def _reap(self) -> None:
        """Finishes the copies whose CUDA events have completed."""
        if self._streamed:
            self._streamed = [transfer for transfer in self._streamed if not transfer.done()]
