"""Copies between paged tensors: what a copy moves, its pages while it runs, the handle on which callers wait, and traffic.

Ranges on disk begin on a block; their end need not be on one. If the range ends where the target's elements end, the last
block is transferred whole, since only padding follows it in the page; likewise if the caller allows it. Otherwise the last
block goes through a staging buffer, so that the target's next elements keep their values.

I1: `Copier.begin` holds all bytes of its copies before the first of them moves; if it cannot, it holds none and raises
    InternalError.
I2: the lock is the Allocator's. `begin` and the code that runs at a copy's end hold it; under it no byte moves and no
    thread is awaited. Only a CUDA event may be waited for (`finish_ordered`), since its completion needs no lock.
I3: I/O threads finish a disk copy, the caller finishes a copy within RAM. CUDA does not report that an event has
    completed, so a copy on a stream is finished at the next query: by a waiter, or by `begin`.
I4: a handle is finished exactly once; the bytes that it held are free for other transfers before a waiter wakes. The
    error is raised in the thread that waits.
I5: the Allocator keeps source and target allocated and in place until the handle is finished.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import torch

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.device_work import Completion, DeviceEvent, Timer
from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.io import DiskToDisk, IoJob, IoQueue, ReadBounced, Straight, WriteBounced
from lightning_ptm.memory.paged_tensor import Extent, Hold, PagedTensor, PageEvent, page_pieces
from lightning_ptm.memory.region import HostRegion, Region
from lightning_ptm.memory.streams import CopyStream, CopyStreams, Pair
from lightning_ptm.terms import BLOCK_BYTES, Tier

Settle = Callable[[BaseException | None], None]
"""Callback when a copy has ended and its bytes are no longer held, called under the lock with the copy's error or
None."""


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Totals of one link since the run began.

    `busy_s` is the time in which at least one transfer was in flight, so overlapping transfers count once. Copies on a
    CUDA stream run one after another; each is counted when it has ended, with its own duration.
    """

    bytes: int
    transfers: int
    busy_s: float

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth while busy; 0.0 before the first transfer."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0


class LinkMeter:
    """Counter of one link, or of several links together. Its owner holds a lock and passes the time, in seconds."""

    __slots__ = ("_busy_s", "_bytes", "_in_flight", "_since_s", "_transfers")

    def __init__(self) -> None:
        self._bytes = 0
        self._transfers = 0
        self._busy_s = 0.0
        self._in_flight = 0
        self._since_s = 0.0

    @staticmethod
    def begin(transfers: Sequence[tuple[Sequence[LinkMeter], int]], now_s: float) -> None:
        """Counts transfers that begin: of each, the meters that count it and its bytes."""
        for meters, size_bytes in transfers:
            for meter in meters:
                meter._bytes += size_bytes
                meter._transfers += 1
                if meter._in_flight == 0:
                    meter._since_s = now_s
                meter._in_flight += 1

    @staticmethod
    def end(transfers: Sequence[Sequence[LinkMeter]], now_s: float) -> None:
        """Counts the ends of transfers: of each, the meters that have counted its begin."""
        for meters in transfers:
            for meter in meters:
                meter._in_flight -= 1
                if meter._in_flight == 0:
                    meter._busy_s += now_s - meter._since_s

    def add(self, size_bytes: int, seconds_s: float) -> None:
        """Counts a transfer that has ended and measured its own duration, without `begin`: a copy on a CUDA stream.

        The time from its launch to its end includes the wait for earlier copies, so it is no measure of its duration.
        """
        self._bytes += size_bytes
        self._transfers += 1
        self._busy_s += seconds_s

    def stats(self, now_s: float) -> LinkStats:
        running_s = now_s - self._since_s if self._in_flight else 0.0
        return LinkStats(self._bytes, self._transfers, self._busy_s + running_s)


Link = tuple[Tier, Tier]
"""(source tier, target tier)."""


@dataclass(frozen=True, slots=True)
class _Launched:
    timer: Timer
    name: str
    bytes: int
    began_s: float


class StreamLink:
    """Counter of the copies in one direction on one stream that the Copier does not report; each also becomes an event.

    A copy is counted when a later `launched` or `stats` finds that it has ended. Never blocks; any thread may call.
    I1: it keeps no copied byte alive.

    Args:
        track: track of its events.
        events: gets an event for every copy.
    """

    def __init__(self, track: str, events: Events) -> None:
        self._track = track
        self._events = events
        self._lock = threading.Lock()

        # State, under the lock.
        self._meter = LinkMeter()
        self._in_flight: deque[_Launched] = deque()
        """Copies in flight, in the order of launch, which is also the order of their ends."""

    def launched(self, name: str, size_bytes: int, began_s: float, timer: Timer) -> None:
        """Registers a copy that has just been launched.

        Args:
            name: name of its event.
            size_bytes: bytes copied.
            began_s: time before its launch, on the clock of `perf_counter`.
            timer: its end and duration.
        """
        with self._lock:
            self._in_flight.append(_Launched(timer, name, size_bytes, began_s))
            self._count_ended()

    def stats(self) -> LinkStats:
        """Returns the totals of the copies that have ended."""
        with self._lock:
            self._count_ended()
            return self._meter.stats(perf_counter())

    def _count_ended(self) -> None:
        while self._in_flight and self._in_flight[0].timer.done():
            ended = self._in_flight.popleft()
            seconds_s = ended.timer.seconds()
            self._meter.add(ended.bytes, seconds_s)
            if self._events.active:
                end_s = ended.began_s + seconds_s
                event = Event(EventKind.COPY, self._track, ended.name, ended.began_s, end_s, bytes=ended.bytes)
                self._events.emit(event)


class Transfer:
    """A copy carried out in pieces by I/O threads, or one that was finished at once.

    Args:
        pieces: how many times `piece_finished` will be called; 0 makes a finished handle.
        on_finished: called once with the error or None, in the thread that finishes the last piece, before waiters
            wake (I1).
    """

    def __init__(self, pieces: int = 0, on_finished: Callable[[BaseException | None], None] | None = None) -> None:
        self._on_finished = on_finished

        # State: written by piece_finished under the lock; `_finished` is set last.
        self._pieces_left = pieces
        self._error: BaseException | None = None
        self._lock: threading.Lock | threading.RLock = threading.Lock()
        self._finished = threading.Event()
        if pieces == 0:
            self._finish()

    def done(self) -> bool:
        """Whether the copy is finished or failed; never blocks, never raises."""
        return self._finished.is_set()

    def wait(self, host: bool = True) -> None:
        """Blocks until the copy is finished; raises its error, each time, in this thread.

        Args:
            host: False makes the current stream wait for a copy between RAM and a CUDA device, instead of this thread;
                the bytes may then be used on that stream only. Other copies block in any case.
        Raises:
            PageIOError: a disk transfer failed or was short. The target's bytes are undefined then.
            UsageError: the allocator was closed before the copy began.
            InternalError: the I/O thread died; its traceback is the cause.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def hand_over(self) -> DeviceEvent | None:
        """Ends the copy's hold of its device pages before it has ended, without a wait.

        Returns the event at the end of the copy, for `Allocator.release`: the stream that uses the pages next waits for it.
        Returns None if the copy has ended, or if its caller must use `wait` (copies to disk, moves).
        """
        return None

    def piece_finished(self, error: BaseException | None = None) -> None:
        """Reports the end of one piece (called by I/O threads). The first error wins; the other pieces still run."""
        with self._lock:
            self._pieces_left -= 1
            if error is not None and self._error is None:
                self._error = error
            last = self._pieces_left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            if self._on_finished is not None:
                self._on_finished(self._error)
        except BaseException as error:  # a waiter must never hang, also not because of a bug in the callback
            self._error = error
        finally:
            self._on_finished = None
            self._finished.set()


class Pending(Protocol):
    """Anything to wait for: a Transfer, a reduction in flight."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Awaited:
    """Transfers and reductions that are waited for together. Each is polled until it has ended, and not again afterwards."""

    __slots__ = ("_left", "all")

    def __init__(self, pending: Iterable[Pending] = ()) -> None:
        self.all: list[Pending] = list(pending)
        self._left = list(self.all)
        """The transfers that had not ended at the last check."""

    def add(self, pending: Sequence[Pending]) -> None:
        self.all += pending
        self._left += pending

    def done(self) -> bool:
        """Whether all have ended, successfully or not."""
        while self._left and self._left[-1].done():
            self._left.pop()
        return not self._left

    def next(self) -> Pending:
        """One that has not ended if there is any, else any."""
        return self._left[-1] if self._left else self.all[-1]

    def wait(self) -> None:
        """Waits for each, and raises the first error."""
        for pending in self.all:
            pending.wait()


class StreamTransfer(Transfer):
    """A copy between RAM and a CUDA device, or within one, on a stream: finished when its event is.

    CUDA does not report that an event has completed, so the Allocator queries it (`done`) before it treats a page as in
    use.

    Args:
        completion: the end of all copies of this transfer.
        lock: the Allocator's, re-entrant. The first thread that sees the event complete finishes the handle under it,
            so no thread that holds the lock ever waits for another thread to do so.
        on_finished: as for Transfer; runs in any thread that calls `done` or `wait`, under the lock.
        on_ordered: called once when a stream has been made to wait for the copies, or will be (`hand_over`): the device's
            pages may then be used on that stream, and by later copies, which wait for it. None: `wait` always blocks.
    """

    def __init__(
        self,
        completion: Completion,
        lock: threading.RLock,
        *,
        on_finished: Callable[[BaseException | None], None],
        on_ordered: Callable[[], None] | None,
    ) -> None:
        super().__init__(1, on_finished)
        self._lock = lock
        self._completion = completion
        self._on_ordered = on_ordered
        self.ordered = False

    def done(self) -> bool:
        if not self._finished.is_set() and self._completion.done():
            self._end()
        return self._finished.is_set()

    def wait(self, host: bool = True) -> None:
        if not host and self._on_ordered is not None:
            self._completion.order()
            self._give_device_pages(self._on_ordered)
            return
        if not self._finished.is_set():
            self._completion.synchronize()
            self._end()
        super().wait()

    def hand_over(self) -> DeviceEvent | None:
        if self._on_ordered is None or self.done():
            return None
        self._give_device_pages(self._on_ordered)
        return self._completion.end()

    def _give_device_pages(self, on_ordered: Callable[[], None]) -> None:
        with self._lock:
            if not self.ordered and not self._finished.is_set():
                self.ordered = True
                on_ordered()

    def _end(self) -> None:
        with self._lock:
            if not self._finished.is_set():
                self.piece_finished()


@dataclass(slots=True, eq=False)
class Copy:
    """A copy of `numel` elements, from `Copier.begin` to its end; None: as many as both tensors have from their starts."""

    source: PagedTensor
    target: PagedTensor
    source_start: int = 0
    target_start: int = 0
    numel: int | None = None
    settle: Settle | None = None
    """Callback at the end of the copy."""
    whole_blocks: bool = False
    """Whether the target's bytes after the range may be overwritten, up to the end of their block."""
    after: Sequence[DeviceEvent] | None = None
    """Marks that the stream part of the copy waits for; None: it waits for the launching thread's current stream."""

    # Written by the Copier. Starts are counted from each tensor's first byte.
    source_start_bytes: int = 0
    target_start_bytes: int = 0
    length_bytes: int = 0
    on_disk: bool = False
    """Whether one of its sides is on disk, so that I/O threads carry it out."""
    meters: Sequence[LinkMeter] = ()
    """The meters that have counted the begin of the copy."""
    began_s: float = 0.0
    holds: Sequence[Hold] = ()
    """The holds on the source and on the target that have not ended."""
    block_bytes: int = 0
    """The length in whole blocks."""
    tail_is_free: bool = False
    """Whether its last block may be written whole, also because the range ends where the target's elements end."""


@dataclass(frozen=True, slots=True)
class CopyMachine:
    """Machine that copies run on: the bytes of each tier and the streams between tiers."""

    page_size: int
    regions: dict[Tier, Region]
    disk: DiskRegion | None
    streams: CopyStreams
    has_own_memory: bool
    """`Backend.has_own_memory`: the device copies concurrently with the host."""

    def stream(self, source: Tier, target: Tier) -> CopyStream:
        """Returns the stream of a copy between two RAM or device tiers."""
        if source.computes == target.computes:
            return self.streams.within_device if source.computes else self.streams.within_host
        return self.streams.to_device if target.computes else self.streams.to_host

    def discard(self, tensor: PagedTensor, start_bytes: int, stop_bytes: int) -> None:
        """Discards bytes [start_bytes, stop_bytes) of a tensor and returns their RAM to the system."""
        if tensor.tier in self.regions:
            for each in tensor.pages.between(start_bytes, stop_bytes):
                self.regions[tensor.tier].discard(each.start_bytes, each.stop_bytes - each.start_bytes)

    def discard_all_but(self, kept: Sequence[PagedTensor]) -> None:
        """Discards all bytes in memory that are on no page of the tensors `kept`."""
        for tier, region in self.regions.items():
            used = sorted({frame for tensor in kept if tensor.tier is tier for frame in tensor.pages.frames})
            done = 0
            for frame in (*used, region.tensor.numel() // self.page_size):
                if done < frame:
                    region.discard(done * self.page_size, (frame - done) * self.page_size)
                done = frame + 1

    def move_to_ram(self, tier: Tier, kept: Sequence[PagedTensor]) -> HostRegion:
        """Frees a device's region, and puts RAM with the pages of the tensors `kept` in its place, which it returns."""
        before = self.regions[tier]
        with torch.inference_mode(False):
            region = HostRegion(before.tensor.numel())
            for tensor in kept:
                for each in tensor.pages.extents:
                    place = slice(each.start_bytes, each.stop_bytes)
                    region.tensor[place].copy_(before.tensor[place])
        self.regions[tier] = region
        before.close()
        return region


class Copier:
    """Starts and finishes copies for the Allocator.

    Args:
        machine: the regions and the copy streams.
        io: the I/O threads; None without a disk tier.
        lock: the Allocator's.
        events: gets an event for every copy that ends.
        name_of: returns a tier's name in events; default: its own.
    """

    def __init__(
        self,
        machine: CopyMachine,
        io: IoQueue | None,
        lock: threading.RLock,
        events: Events | None = None,
        name_of: Callable[[Tier], str] | None = None,
    ) -> None:
        self._events = events or Events()
        self._name_of = name_of or (lambda tier: tier.name.lower())
        self._machine = machine
        self._io = io
        self._lock = lock

        # State, under the lock.
        self._links: dict[Link, LinkMeter] = {}
        self._disk = LinkMeter()
        """Reads and writes of the disk together."""
        self._all_links = LinkMeter()
        """All links together."""
        self._streamed: list[StreamTransfer] = []

    def begin(self, copies: Sequence[Copy]) -> None:
        """Holds the bytes of copies (lock held). Call `launch` afterwards, without the lock.

        Raises:
            UsageError: dtypes differ, a range is outside its tensor or overlaps itself, or a disk range does not begin
                on a block; nothing is held.
            InternalError: another transfer holds some of the bytes, or two of the copies conflict; nothing is held.
        """
        if self._streamed:
            self._reap()
        for copy in copies:
            _measure(copy)
        try:
            self._hold(copies)
        except InternalError:
            if not self.finish_ordered():
                raise
            self._hold(copies)
        began_s, counted = perf_counter(), []
        for copy in copies:
            source, target = copy.source.tier, copy.target.tier
            link = self._links.get((source, target))
            if link is None:
                link = self._links[source, target] = LinkMeter()
            if copy.on_disk:
                copy.meters = (link, self._all_links, self._disk)
            elif not self._on_stream(copy):  # a copy on a stream measures its own time
                copy.meters = (link, self._all_links)
            copy.began_s = began_s
            counted.append((copy.meters, copy.length_bytes))
        LinkMeter.begin(counted, began_s)

    def launch(self, copies: Sequence[Copy]) -> list[Transfer]:
        """Starts the transfers of the copies' bytes. The caller must not hold the lock.

        Returns:
            The handles to wait on: one for each copy between addressable tiers, and one for all others together.
        """
        transfers, left = [], list(copies)
        try:
            for copy in copies:
                if not copy.on_disk:
                    stream = self._machine.stream(copy.source.tier, copy.target.tier)
                    completion = stream.launch(ram_pairs(copy, self._machine), copy.after)
                    left.remove(copy)
                    if self._on_stream(copy):
                        transfers.append(self._track(copy, completion))
                    else:
                        transfers.append(Transfer(0, partial(self._end, (copy,), None)))
            jobs = disk_jobs(left, self._machine) if left else []
        except BaseException as error:
            self._end(left, None, error)
            raise
        if left:
            transfers.append(Transfer(len(jobs), partial(self._end, left, None)))
            if jobs:
                assert self._io is not None  # jobs exist only with a disk tier
                self._io.submit(jobs, transfers[-1].piece_finished)
        return transfers

    def finish_ordered(self) -> bool:
        """Waits for the copies already ordered on a stream (lock held); returns whether there are any.

        The callers of those copies have waited on them with `wait(host=False)`; only their events have not completed
        yet.
        """
        ordered = [transfer for transfer in self._streamed if transfer.ordered]
        for transfer in ordered:
            transfer.wait()
        return bool(ordered)

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

    def _on_stream(self, copy: Copy) -> bool:
        """Whether a copy between two addressable tiers still runs when its launch has returned."""
        return self._machine.has_own_memory and (copy.source.tier.computes or copy.target.tier.computes)

    def _hold(self, copies: Sequence[Copy]) -> None:
        held: list[Hold] = []
        for copy in copies:
            if not copy.length_bytes:
                continue
            source, target = copy.source, copy.target
            source_stop = copy.source_start_bytes + copy.length_bytes
            target_stop = copy.target_start_bytes + copy.length_bytes
            copy.block_bytes = copy.length_bytes + -copy.length_bytes % BLOCK_BYTES
            copy.tail_is_free = copy.whole_blocks or target_stop == target.nbytes
            # The rest of a last block is held, too. Ranges on disk begin on a block.
            if not source.tier.addressable:
                source_stop = copy.source_start_bytes + copy.block_bytes
                if copy.tail_is_free:
                    target_stop += -target_stop % BLOCK_BYTES
            if not target.tier.addressable:
                target_stop = copy.target_start_bytes + copy.block_bytes
            try:
                held.append(source.pages.begin(copy.source_start_bytes, source_stop, PageEvent.LEAVE))
                held.append(target.pages.begin(copy.target_start_bytes, target_stop, PageEvent.ARRIVE))
            except InternalError as error:
                Hold.end(held)
                raise InternalError(
                    f"copying {source.name} to {target.name}: {error}; wait for the transfer that holds them"
                ) from None
            copy.holds = held[-2:]

    def _track(self, copy: Copy, completion: Completion) -> Transfer:
        """Returns the handle of a copy on a CUDA stream (I3)."""

        def finish(error: BaseException | None) -> None:
            seconds_s = completion.seconds()
            if error is None:
                for meter in (self._links[copy.source.tier, copy.target.tier], self._all_links):
                    meter.add(copy.length_bytes, seconds_s)
            self._end((copy,), copy.began_s + seconds_s, error)

        def free_device_bytes() -> None:
            on_device = [side.pages for side in (copy.source, copy.target) if side.tier.computes]
            Hold.end([hold for hold in copy.holds if hold.pages in on_device])
            copy.holds = [hold for hold in copy.holds if hold.pages not in on_device]

        # A move changes its tensor's tier at its end, which must not happen while the stream still copies. So
        # `wait` always blocks for a move.
        on_ordered = None if copy.settle is not None else free_device_bytes
        transfer = StreamTransfer(completion, self._lock, on_finished=finish, on_ordered=on_ordered)
        with self._lock:
            self._streamed.append(transfer)
        if copy.source.tier is copy.target.tier:
            transfer.wait(host=False)  # the copy runs on the current stream, so later work there is ordered after it
        return transfer

    def _end(self, copies: Sequence[Copy], end_s: float | None, error: BaseException | None) -> None:
        """Ends copies. `end_s`: when they ended; None: now."""
        with self._lock:
            end_s = perf_counter() if end_s is None else end_s
            ended: list[Hold] = []
            counted = []
            for copy in copies:
                ended += copy.holds
                copy.holds = []
                counted.append(copy.meters)
                if self._events.active:  # before the end of a move: the tensor still has its old tier
                    track = f"{self._name_of(copy.source.tier)}_to_{self._name_of(copy.target.tier)}"
                    # One of the two tensors is often a buffer. The name of the one farther from compute, the home, says more.
                    home = max(copy.source, copy.target, key=lambda tensor: tensor.tier.distance)
                    event = Event(EventKind.COPY, track, home.name, copy.began_s, end_s, bytes=copy.length_bytes)
                    self._events.emit(event)
            LinkMeter.end(counted, end_s)
            Hold.end(ended)
            for copy in copies:
                if copy.settle is not None:
                    copy.settle(error)

    def _reap(self) -> None:
        """Finishes the copies whose CUDA events have completed."""
        if self._streamed:
            self._streamed = [transfer for transfer in self._streamed if not transfer.done()]


def _measure(copy: Copy) -> None:
    """Checks a copy and computes its bytes. Raises UsageError as `Copier.begin`."""
    source, target, numel = copy.source, copy.target, copy.numel
    if source.dtype != target.dtype:
        raise UsageError(f"cannot copy {source.name} ({source.dtype}) to {target.name} ({target.dtype}): cast first")
    if numel is None:
        numel = min(source.numel - copy.source_start, target.numel - copy.target_start)
    item_bytes = source.dtype.itemsize
    for tensor, start in ((source, copy.source_start), (target, copy.target_start)):
        if start < 0 or numel < 0 or start + numel > tensor.numel:
            raise UsageError(f"elements {start} to {start + numel} are not in {tensor.name}, which has {tensor.numel}")
        if not tensor.tier.addressable and start * item_bytes % BLOCK_BYTES:
            raise UsageError(
                f"a copy of {tensor.name} begins at its element {start}: on disk ranges begin at multiples of "
                f"{BLOCK_BYTES // item_bytes} elements ({BLOCK_BYTES} bytes)"
            )
    if source is target and abs(copy.source_start - copy.target_start) < numel:
        raise UsageError(
            f"a copy of {numel} elements within {source.name} overlaps itself; copy through another tensor"
        )
    copy.source_start_bytes, copy.target_start_bytes = copy.source_start * item_bytes, copy.target_start * item_bytes
    copy.length_bytes = numel * item_bytes
    copy.on_disk = not (source.tier.addressable and target.tier.addressable)


def ram_pairs(copy: Copy, machine: CopyMachine) -> list[Pair]:
    """Returns the pairs of views to copy between, for a copy between addressable tiers."""
    sources, targets = machine.regions[copy.source.tier].tensor, machine.regions[copy.target.tier].tensor
    pairs = pair_up(
        copy.source.pages.between(copy.source_start_bytes, copy.source_start_bytes + copy.length_bytes),
        copy.target.pages.between(copy.target_start_bytes, copy.target_start_bytes + copy.length_bytes),
    )
    return [
        Pair(
            target=targets[target.start_bytes : target.stop_bytes],
            source=sources[source.start_bytes : source.stop_bytes],
        )
        for source, target in pairs
    ]


def disk_jobs(copies: Sequence[Copy], machine: CopyMachine) -> list[tuple[int, IoJob]]:
    """Returns the jobs of copies with a side on disk, each at most a page, with the page on disk in which it begins."""
    disk = machine.disk
    if disk is None:
        return []  # a tier without bytes has only tensors without elements
    jobs: list[tuple[int, IoJob]] = []
    for copy in copies:
        reading = not copy.source.tier.addressable
        if reading and not copy.target.tier.addressable:
            jobs += _disk_to_disk(copy, disk)
            continue
        on_disk, in_ram = (copy.source, copy.target) if reading else (copy.target, copy.source)
        disk_start, ram_start = copy.source_start_bytes, copy.target_start_bytes
        if not reading:
            disk_start, ram_start = ram_start, disk_start
        region = machine.regions[in_ram.tier]

        # At the start of the range, the bytes that go directly between disk and RAM; the others go through staging. A
        # tensor's own start is on a block.
        direct_bytes = 0
        if isinstance(region, HostRegion) and ram_start % BLOCK_BYTES == 0:
            direct_bytes = copy.length_bytes // BLOCK_BYTES * BLOCK_BYTES
            if copy.tail_is_free:
                direct_bytes = copy.block_bytes
            # A chunk rarely begins at a page border, and a disk is slower with two transfers of half the length.
            direct = on_disk.pages.between(disk_start, disk_start + direct_bytes)
            ram_at = ram_start
            for piece in page_pieces(direct, machine.page_size, joined=disk.is_one_file):
                size = piece.stop_bytes - piece.start_bytes
                views = []
                for part in in_ram.pages.between(ram_at, ram_at + size):
                    views.append(region.memory[part.start_bytes : part.stop_bytes])
                job = Straight(disk, piece.start_bytes, views, reading)
                jobs.append((piece.start_bytes // machine.page_size, job))
                ram_at += size
        if direct_bytes < copy.length_bytes:
            jobs += _bounced(copy, disk_start + direct_bytes, ram_start + direct_bytes, machine, disk)
    return jobs


def _bounced(
    copy: Copy, disk_start: int, ram_start: int, machine: CopyMachine, disk: DiskRegion
) -> list[tuple[int, IoJob]]:
    """Returns the jobs of a copy's last bytes, from these starts on, which go through staging between disk and RAM."""
    reading = not copy.source.tier.addressable
    on_disk, in_ram = (copy.source, copy.target) if reading else (copy.target, copy.source)
    region = machine.regions[in_ram.tier]
    stream = machine.stream(Tier.HOST, in_ram.tier) if reading else machine.stream(in_ram.tier, Tier.HOST)
    after = (stream.mark(),) if copy.after is None else copy.after
    first = copy.source_start_bytes if reading else copy.target_start_bytes
    bounced = on_disk.pages.between(disk_start, first + copy.length_bytes)
    jobs: list[tuple[int, IoJob]] = []
    for piece in page_pieces(bounced, machine.page_size, joined=False):
        size = piece.stop_bytes - piece.start_bytes
        parts = [region.tensor[e.start_bytes : e.stop_bytes] for e in in_ram.pages.between(ram_start, ram_start + size)]
        job: IoJob = (
            ReadBounced(disk, piece, parts, stream, after)
            if reading
            else WriteBounced(disk, piece, parts, stream, after, keep_tail=not copy.tail_is_free)
        )
        jobs.append((piece.start_bytes // machine.page_size, job))
        ram_start += size
    return jobs


def _disk_to_disk(copy: Copy, disk: DiskRegion) -> list[tuple[int, IoJob]]:
    source = copy.source.pages.between(copy.source_start_bytes, copy.source_start_bytes + copy.length_bytes)
    target = copy.target.pages.between(copy.target_start_bytes, copy.target_start_bytes + copy.length_bytes)
    pairs = pair_up(
        page_pieces(source, disk.page_size, joined=False), page_pieces(target, disk.page_size, joined=False)
    )
    keep_tail = not copy.tail_is_free
    return [
        (source.start_bytes // disk.page_size, DiskToDisk(disk, source, target, keep_tail)) for source, target in pairs
    ]


def pair_up(sources: Sequence[Extent], targets: Sequence[Extent]) -> list[tuple[Extent, Extent]]:
    """Cuts two lists of extents with the same total length at each other's borders, into pairs of equal length."""
    pairs = []
    source_index = target_index = source_done = target_done = 0
    while source_index < len(sources) and target_index < len(targets):
        source, target = sources[source_index], targets[target_index]
        source_start, target_start = source.start_bytes + source_done, target.start_bytes + target_done
        size = min(source.stop_bytes - source_start, target.stop_bytes - target_start)
        pairs.append((Extent(source_start, source_start + size), Extent(target_start, target_start + size)))
        source_done, target_done = source_done + size, target_done + size
        if source_start + size == source.stop_bytes:
            source_index, source_done = source_index + 1, 0
        if target_start + size == target.stop_bytes:
            target_index, target_done = target_index + 1, 0
    return pairs
