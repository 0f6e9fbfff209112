"""The Allocator: allocates, releases, copies, moves and merges paged tensors (the paper's sections 4.1 and 5).

Owns the page pools, page tables, regions and I/O threads of one rank, all created once at the start. Does not know what
a tensor means nor which tier it should be in: callers decide, the Allocator acts. The file is long because every change
of a tensor's pages is made here (I1).

I1: the Allocator, with its Copier, is the only writer of the page tables and of a PagedTensor's tier and pages, under
    one lock. The lock is not held while bytes move.
I2: a copy holds its bytes (ARRIVING, LEAVING) from the call until its Transfer is finished. A conflicting copy or
    release raises InternalError and changes nothing. Callers order copies of the same bytes by waiting on their
    Transfers.
I3: in every tier, a paged tensor's bytes are whole blocks that no other tensor shares, so transfers of whole blocks
    never touch a neighbour.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.device_work import DeviceEvent
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.disk_probe import threads_per_path
from lightning_ptm.memory.io import IoQueue
from lightning_ptm.memory.paged_tensor import PagedTensor, PageTable, page_pieces, round_up
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.memory.reused_extents import ReusedExtents, gaps
from lightning_ptm.memory.streams import copy_streams
from lightning_ptm.memory.tiers import check_settings, disk_region, regions
from lightning_ptm.memory.transfer import Copier, Copy, CopyMachine, Link, LinkStats, Transfer
from lightning_ptm.progress import Progress
from lightning_ptm.terms import TIERS, Tier

POISON = 0xFF
"""Byte that fills released memory in tests: NaN in fp16, bf16, fp32 and fp64."""


class Allocator:
    """Paged tensors over the tiers of one rank. Safe for threads.

    Args:
        page_size: bytes of a page: a multiple of 4096, at least 64 KiB.
        backend: the compute device; on a CPU the device tier is RAM.
        sizes: bytes of each tier, rounded down to whole pages. A tier that is missing or 0 has no pages.
        disk_paths: existing folders, best on different disks, for the tier that is not addressable.
        pin_host: page-lock the tiers in RAM, where the device copies from and to RAM by DMA.
        pin_later: leave that to `pin_host_memory` where the device's driver can lock memory later: locking commits all
            of the memory, so the pages of a retired allocator have to be freed first.
        poison: fill released memory, and new RAM before its first use, with NaN. For tests.
        io_threads_per_path: concurrent transfers of one disk path; None: measured at the start (disk_probe.py).
        file_ops: the file calls, for tests of failing disks.
        events: gets an event for every copy.
        progress: progress bar of the reservation of the disk tier.
        uses: returns what the pages of a tier are for, quoted in the error when there are too few.
        name_of: returns a tier's name in events; default: its own.
        reused_extents: pages that the previous allocator leaves on disk; of the same paths and page size.
    Raises:
        ConfigError: a setting that cannot work, or a disk path that cannot be used.
        CapacityError: the device has no room.
        PageIOError: a disk path has no room.
    """

    def __init__(
        self,
        *,
        page_size: int,
        backend: Backend,
        sizes: Mapping[Tier, int],
        disk_paths: Sequence[Path] = (),
        pin_host: bool = False,
        pin_later: bool = False,
        poison: bool = False,
        io_threads_per_path: int | None = None,
        file_ops: FileOps | None = None,
        events: Events | None = None,
        progress: Progress | None = None,
        uses: Callable[[Tier], str] | None = None,
        name_of: Callable[[Tier], str] | None = None,
        reused_extents: ReusedExtents | None = None,
    ) -> None:
        if backend.has_bytes:
            check_settings(page_size, sizes, disk_paths)
        frames = {tier: sizes.get(tier, 0) // page_size for tier in dict.fromkeys((*TIERS, *sizes))}
        on_disk = sum(count for tier, count in frames.items() if not tier.addressable and backend.has_bytes)
        self.page_size = page_size
        self._poison = poison
        self.backend = backend

        # State, under the lock.
        self._lock = threading.RLock()
        self._closed = False
        self._ids = itertools.count()
        self._tensors: dict[int, PagedTensor] = {}
        self._reused: dict[PagedTensor, PagedTensor] = {}
        """Tensors in reused extents, by the previous allocator's tensor, until `reused_tensor` returns them."""
        self._reused_ids: set[int] = set()
        self._io_threads = 0
        self._marks: dict[int, DeviceEvent] = {}
        """By frame of a device with its own memory: the stream's position when the frame was last given back."""
        self._leaving: dict[int, DeviceEvent] = {}
        """By such a frame, given back before a copy from it had ended: the end of that copy, until a user of the frame has
        waited for it."""
        self._uses = uses
        self._tables = {tier: PageTable(tier, count, page_size, uses) for tier, count in frames.items()}
        with contextlib.ExitStack() as undo:
            pin_now = pin_host and not (pin_later and backend.page_locks is not None)
            made = regions(backend, {tier: count * page_size for tier, count in frames.items()}, undo, pin=pin_now)
            for region in made.values() if poison else ():
                region.tensor.fill_(POISON)
            disk = io = poison_page = None
            if on_disk:
                disk = disk_region(disk_paths, page_size, on_disk, reused_extents, file_ops, progress)
                undo.callback(disk.close)
                threads = (
                    self._adopt_extents(reused_extents, disk.frames)
                    if reused_extents is not None
                    else io_threads_per_path
                )
                self._io_threads = threads = threads_per_path(disk) if threads is None else threads
                io = IoQueue(
                    len(disk_paths),
                    disk.lane,
                    threads_per_lane=threads,
                    page_size=page_size,
                    backend=backend,
                    pin=pin_host,
                )
                undo.callback(io.close)
                if poison:
                    poison_page = HostRegion(page_size)
                    poison_page.tensor.fill_(POISON)
            self._machine = CopyMachine(page_size, made, disk, copy_streams(backend), backend.has_own_memory)
            self._copier = Copier(self._machine, io, self._lock, events, name_of)
            self._poison_page = poison_page
            storages = [region.tensor.untyped_storage() for region in made.values()]
            self._addresses = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages)
            """First and stop address of each region in memory."""
            self._made = backend.mark()
            self._resources = undo.pop_all()

    def capacity_bytes(self, tier: Tier) -> int:
        """Returns the bytes of all pages of a tier."""
        return self._tables[tier].capacity_bytes

    def free_bytes(self, tier: Tier) -> int:
        """Returns the bytes of the pages in which no tensor has a part."""
        return self._tables[tier].free_bytes

    def peak_bytes(self, tier: Tier) -> int:
        """Returns the peak of the bytes of pages in use, since the start or since `begin_peak`."""
        return self._tables[tier].peak_bytes

    def begin_peak(self, tier: Tier) -> None:
        """Begins a new peak: that of the pages in use from now on."""
        self._tables[tier].begin_peak()

    def uncommitted_bytes(self) -> int:
        """Returns the bytes of the tiers in RAM that the system has not committed yet."""
        regions = self._machine.regions.values()
        return sum(region.uncommitted_bytes() for region in regions if isinstance(region, HostRegion))

    def stats(self) -> dict[Link, LinkStats]:
        """Returns the totals of every link used: (source tier, target tier) to bytes, copies and busy seconds."""
        with self._lock:
            return self._copier.stats()

    def busy_s(self) -> float:
        """Returns the seconds in which at least one copy was in flight on any link. Copies on CUDA streams add up."""
        with self._lock:
            return self._copier.all_stats().busy_s

    def disk_stats(self) -> LinkStats:
        """Returns the totals of disk reads and writes together. `busy_s` counts the time in which both run once."""
        with self._lock:
            return self._copier.disk_stats()

    def disk_written_bytes(self) -> tuple[int, ...]:
        """Returns the bytes written to each disk path so far, in whole blocks; empty without a disk tier."""
        disk = self._machine.disk
        return () if disk is None else disk.written_bytes()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage begins in the memory of a tier."""
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # no memory behind the tensor: a zero tensor, or a subclass implemented in Python
            return False
        place = bisect.bisect_right(self._addresses, (address, math.inf)) - 1
        return place >= 0 and address < self._addresses[place][1]

    # Tensors.

    def allocate(
        self, name: str, numel: int, dtype: torch.dtype, tier: Tier, *, shared_tail: bool = False
    ) -> PagedTensor:
        """Allocates a tensor with undefined contents, on adjacent pages if the tier has such a run, else scattered.

        Args:
            name: for errors and logs.
            numel: elements, 0 allowed.
            dtype: dtype of the elements.
            tier: the tier to allocate in.
            shared_tail: begin in the unused end of the page in which the tier's last `shared_tail` tensor ended, if
                that tensor is still there and the following pages are free. For homes, which are allocated once, in a
                row.
        Raises:
            CapacityError: the tier has too few free pages; names the setting to raise. Nothing is allocated.
        """
        if numel < 0:
            raise UsageError(f"{name} cannot have {numel} elements")
        with self._lock:
            self._check_usable()
            tensor = PagedTensor(next(self._ids), name, numel, dtype, tier)
            self._place(tensor, shared_tail=shared_tail)
            self._tensors[tensor.id] = tensor
            return tensor

    def allocate_adjacent(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        tier: Tier,
        frame: int | None = None,
        *,
        elsewhere: Sequence[range] | None = None,
        filled: bool = False,
    ) -> PagedTensor:
        """Allocates a tensor, with undefined contents, on adjacent pages that no other tensor shares.

        Args:
            frame: the first page, if those from it on are free.
            elsewhere: otherwise the best fit in the first of these ranges that has room (`best_run`); empty: no other place;
                None: anywhere, the last pages first.
            filled: its first use is a `fill`. Otherwise the current stream waits for copies that still leave the pages.
        Raises:
            CapacityError: there are no such pages. Nothing is allocated.
        """
        with self._lock:
            self._check_usable()
            pool = self._tables[tier].pool
            count = -(-round_up(numel * dtype.itemsize) // self.page_size)
            at = frame if frame is not None and pool.has_run_at(frame, count) else None
            anywhere = (range(pool.stop - 1, -1, -1),)
            for within in (anywhere if elsewhere is None else elsewhere) if at is None else ():
                at = pool.best_run(count, within)
                if at is not None:
                    break
            if at is None and count:
                raise pool.capacity_error(count, name, adjacent=True)
            tensor = PagedTensor(next(self._ids), name, numel, dtype, tier)
            pages = self._tables[tier].place_at(tensor.id, tensor.nbytes, at or 0)
            tensor.place(tier, pages, self._machine.regions.get(tier))
            if not filled:
                self._await_leaving(tensor)
            self._tensors[tensor.id] = tensor
            return tensor

    def has_run_at(self, tier: Tier, frame: int, size_bytes: int) -> bool:
        """Whether the pages of `size_bytes` from page `frame` on are free."""
        with self._lock:
            return self._tables[tier].pool.has_run_at(frame, -(-round_up(size_bytes) // self.page_size))

    def release(self, tensor: PagedTensor, after: DeviceEvent | None = None) -> None:
        """Gives a tensor's pages back. No effect after `close`, which releases every tensor.

        Args:
            after: the end of a copy from its device pages (`Transfer.hand_over`), which their next user waits for.
        Raises:
            UsageError: the tensor is released already, or being moved.
            InternalError: a copy from or to it is not finished; nothing changes.
        """
        with self._lock:
            if self._closed:
                return
            self._check_usable(tensor)
            if after is not None:
                if self._poison:
                    after.order()  # the current stream writes to the pages now
                else:
                    self._leaving.update(dict.fromkeys(tensor.pages.frames, after))
            self._unless_busy(partial(self._vacate, tensor))
            tensor.forget()
            del self._tensors[tensor.id]

    def copy(
        self,
        source: PagedTensor,
        target: PagedTensor,
        *,
        source_start: int = 0,
        target_start: int = 0,
        numel: int | None = None,
        whole_blocks: bool = False,
    ) -> Transfer:
        """Starts to copy elements between tensors of any tiers. Wait on the transfer before using the bytes of either.

        A copy from RAM to RAM is finished on return on a CPU, and runs on a copy stream with CUDA (`wait(host=False)`
        makes the current stream wait for it). If one side is on disk, I/O threads carry it out; if the other side is on
        a CUDA device, the bytes go through page-locked staging buffers.

        Args:
            source: read.
            target: written; same dtype.
            source_start: first element read; on disk at a multiple of 4096 bytes, like target_start.
            target_start: first element written.
            numel: elements; by default as many as both have from their starts.
            whole_blocks: the target's elements after the range may be overwritten, up to the end of their disk block.
        Raises:
            UsageError: dtypes differ, a range is outside its tensor, begins inside a disk block or overlaps itself; a
                tensor is released or being moved; the allocator is closed.
            InternalError: another transfer writes the source's bytes or uses the target's; nothing is started.
        """
        return self.copy_all((Copy(source, target, source_start, target_start, numel, whole_blocks=whole_blocks),))[0]

    def copy_all(self, copies: Sequence[Copy]) -> list[Transfer]:
        """Starts copies as `copy` does, in order. Those with a side on disk are one transfer, which ends with the last of
        them. Raises as `copy`."""
        with self._lock:
            self._check_usable(*[tensor for copy in copies for tensor in (copy.source, copy.target)])
            self._copier.begin(copies)
        return self._copier.launch(copies)

    def fill(self, source: PagedTensor, target: PagedTensor, target_start: int = 0) -> Transfer:
        """Copies a complete source to a device tensor that nothing uses yet; waits only for the last uses of its pages.

        Unlike `copy`, it does not wait for what the current stream has queued since. Raises as `copy`.
        """
        with self._lock:
            self._check_usable(source, target)
            after = (*self._last_uses(target), *self._leaving_of(target))
            copy = Copy(source, target, target_start=target_start, after=after)
            self._copier.begin((copy,))
            self._forget_leaving(target)
        return self._copier.launch((copy,))[0]

    def move(self, tensor: PagedTensor, tier: Tier) -> Transfer:
        """Starts to move a tensor to another tier (the paper's Tensor.move).

        The same object is in `tier` once the transfer is finished; until then it can be neither used nor released. Its
        old pages are free afterwards. If the move fails, the tensor stays in its old tier.

        Raises:
            CapacityError: `tier` has too few free pages; nothing changes.
            UsageError, InternalError: as for `copy`.
        """
        with self._lock:
            self._check_usable(tensor)
            if tier is tensor.tier:
                return Transfer()
            copy = self._begin_move(tensor, tier, contiguous=False)
        return self._copier.launch((copy,))[0]

    def merge(self, tensor: PagedTensor) -> None:
        """Makes a tensor contiguous (the paper's Tensor.merge). Blocks until it is.

        Raises:
            CapacityError: the tier has no free run of enough pages; nothing changes.
            UsageError, InternalError, PageIOError: as for `copy`.
        """
        with self._lock:
            self._check_usable(tensor)
            if tensor.is_contiguous:
                return
            copy = self._begin_move(tensor, tensor.tier, contiguous=True)
        self._copier.launch((copy,))[0].wait()

    def discard(self, tensor: PagedTensor, start: int = 0, numel: int | None = None) -> None:
        """Discards the contents of a tensor, or of `numel` elements from `start` on; the system gets the RAM back.

        The tensor keeps its pages. Raises as `release`.
        """
        start_bytes = start * tensor.dtype.itemsize
        stop_bytes = tensor.nbytes if numel is None else start_bytes + numel * tensor.dtype.itemsize
        with self._lock:
            self._check_usable(tensor)
            if start_bytes < stop_bytes:
                self._unless_busy(partial(tensor.pages.check_free, start_bytes, stop_bytes))
            self._machine.discard(tensor, start_bytes, stop_bytes)

    def retire(self, kept: Sequence[PagedTensor]) -> None:
        """Gives memory back to the next allocator: keeps the bytes of the tensors `kept` only, and in RAM.

        Their pages on a device with its own memory move to RAM, page locks end so that `discard` returns RAM, and all
        other pages in memory, used or free, are discarded. The caller makes sure that no transfer is in flight.
        """
        if self.backend.has_own_memory:
            self.backend.synchronize()
        self._copier.finish_streamed()  # a copy that has not been asked for its end keeps views of the device's region
        with self._lock:
            for tier in (tier for tier in self._machine.regions if tier.computes and self.backend.has_own_memory):
                here = [tensor for tensor in self._tensors.values() if tensor.tier is tier]
                held = [tensor for tensor in kept if tensor.tier is tier]
                self._resources.callback(self._machine.move_to_ram(tier, held).close)
                for tensor in here:  # a view of the device's region would keep all of it
                    tensor.place(tier, tensor.pages, self._machine.regions[tier])
            for region in self._machine.regions.values():
                if isinstance(region, HostRegion):
                    region.unlock()
            self._machine.discard_all_but(kept)

    def discards(self, tier: Tier) -> bool:
        """Returns whether `discard` gives the RAM of a tier's pages back to the system."""
        region = self._machine.regions.get(tier)
        return isinstance(region, HostRegion) and not region.pinned

    def pin_host_memory(self) -> None:
        """Page-locks the tiers in RAM that were created with `pin_later`."""
        locks = self.backend.page_locks
        for region in self._machine.regions.values():
            if isinstance(region, HostRegion) and locks is not None and not region.pinned:
                region.lock(locks)

    # Reuse of disk extents by the next allocator.

    def reusable_extents(self, kept: Sequence[PagedTensor], read: Sequence[PagedTensor]) -> ReusedExtents | None:
        """Returns the extents that the next allocator can reuse (its `reused_extents`); None without a disk tier.

        Args:
            kept: tensors on disk that keep their pages.
            read: other tensors on disk that are read before this allocator is closed.
        """
        disk = self._machine.disk
        return None if disk is None else ReusedExtents(disk, self._io_threads, tuple(kept), tuple(read))

    def reused_tensor(self, before: PagedTensor) -> PagedTensor:
        """Returns this allocator's tensor on the reused pages of `before`, with its bytes. Once for each."""
        found = self._reused.pop(before)
        self._reused_ids.add(found.id)
        return found

    def is_reused(self, tensor: PagedTensor) -> bool:
        """Whether a tensor is on reused pages and has been returned by `reused_tensor`."""
        return tensor.id in self._reused_ids

    def _adopt_extents(self, reused_extents: ReusedExtents, owned: Sequence[range]) -> int:
        """Takes the reused pages, and removes from the pool the frames that the disk region does not have.

        Returns the previous allocator's I/O threads per path: with data on the pages they cannot be measured again.
        """
        tier = next(tier for tier, table in self._tables.items() if table.capacity_bytes and not tier.addressable)
        table = PageTable(tier, owned[-1].stop, self.page_size, self._uses)
        self._tables[tier] = table
        for gap in gaps(owned):
            table.pool.leave_out(gap.start, len(gap))
        for before in reused_extents.kept:
            tensor = PagedTensor(next(self._ids), before.name, before.numel, before.dtype, tier)
            tensor.place(tier, table.keep(tensor.id, before.pages.extents), None)
            self._tensors[tensor.id] = self._reused[before] = tensor
        return reused_extents.io_threads

    def live_tensors(self) -> tuple[PagedTensor, ...]:
        """Returns every tensor that is not released, in order of allocation."""
        with self._lock:
            return tuple(self._tensors.values())

    def close(self) -> None:
        """Finishes transfers (queued ones get UsageError), joins threads, closes files, frees regions. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._copier.finish_streamed()
        finally:
            try:
                self._resources.close()
            finally:
                with self._lock:
                    for tensor in self._tensors.values():
                        tensor.forget()
                    self._tensors.clear()

    def __enter__(self) -> Allocator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Methods below are called with the lock held.

    def _place(self, tensor: PagedTensor, *, shared_tail: bool = False, contiguous: bool = False) -> None:
        """Gives a tensor pages of its tier."""
        pages = self._tables[tensor.tier].place(
            tensor.id, tensor.name, tensor.nbytes, shared_tail=shared_tail, contiguous=contiguous
        )
        tensor.place(tensor.tier, pages, self._machine.regions.get(tensor.tier))
        self._await_leaving(tensor)

    def _await_leaving(self, tensor: PagedTensor) -> None:
        """Makes the current stream wait for the copies that still leave a tensor's pages."""
        for end in self._leaving_of(tensor):
            end.order()
        self._forget_leaving(tensor)

    def _leaving_of(self, tensor: PagedTensor) -> Sequence[DeviceEvent]:
        """Returns the ends of the copies that still leave a tensor's pages."""
        if not self._leaving or not tensor.tier.computes:
            return ()
        ends = [self._leaving[frame] for frame in tensor.pages.frames if frame in self._leaving]
        return [*{id(end): end for end in ends}.values()]

    def _forget_leaving(self, tensor: PagedTensor) -> None:
        """Forgets these copies: the stream of the pages' next use waits for them."""
        if self._leaving and tensor.tier.computes:
            for frame in tensor.pages.frames:
                self._leaving.pop(frame, None)

    def _unless_busy(self, action: Callable[[], None]) -> None:
        """Runs `action`. If it meets busy pages, waits for the copies already ordered on a stream, and retries."""
        try:
            action()
        except InternalError:
            if not self._copier.finish_ordered():
                raise
            action()

    def _vacate(self, tensor: PagedTensor) -> None:
        """Takes a tensor's pages away from it."""
        if self._poison and tensor.pages.extents:
            self._poison_pages(tensor)
        if tensor.tier.computes and self.backend.has_own_memory:
            frames = tensor.pages.frames
            self._tables[tensor.tier].vacate(tensor.id, tensor.pages)
            # This stream has queued the last use of the pages already.
            self._marks.update(dict.fromkeys(frames, self.backend.mark()))
        else:
            self._tables[tensor.tier].vacate(tensor.id, tensor.pages)

    def _poison_pages(self, tensor: PagedTensor) -> None:
        tensor.pages.check_free(0, round_up(tensor.nbytes))
        for piece in page_pieces(tensor.pages.extents, self.page_size, joined=False):
            if not tensor.tier.addressable:
                assert self._machine.disk is not None and self._poison_page is not None
                poison = self._poison_page.memory[: piece.stop_bytes - piece.start_bytes]
                self._machine.disk.write(piece.start_bytes, [poison])
            else:
                self._machine.regions[tensor.tier].tensor[piece.start_bytes : piece.stop_bytes].fill_(POISON)

    def _last_uses(self, tensor: PagedTensor) -> list[DeviceEvent]:
        """Returns the marks of the last uses of a device tensor's pages by the tensors before it."""
        if not self._marks:
            return [self._made]
        marks = (self._marks.get(frame, self._made) for frame in tensor.pages.frames)
        return [*{id(mark): mark for mark in marks}.values()]

    def _begin_move(self, tensor: PagedTensor, tier: Tier, *, contiguous: bool) -> Copy:
        """Takes new pages for a tensor and begins the copy to them."""
        arriving = PagedTensor(tensor.id, tensor.name, tensor.numel, tensor.dtype, tier)
        self._place(arriving, contiguous=contiguous)

        def settle(error: BaseException | None) -> None:
            tensor.move(under_way=False)
            if error is not None:
                self._vacate(arriving)
                return
            self._vacate(tensor)
            tensor.place(tier, arriving.pages, self._machine.regions.get(tier))

        try:
            copy = Copy(tensor, arriving, settle=settle)
            self._copier.begin((copy,))
        except InternalError:
            self._vacate(arriving)
            raise
        tensor.move(under_way=True)
        return copy

    def _check_usable(self, *tensors: PagedTensor) -> None:
        """Raises UsageError if the allocator is closed, or a tensor is released or being moved."""
        if self._closed:
            raise UsageError("this run is closed: its pages are freed; start a new fit, validate, test or predict")
        for tensor in tensors:
            if tensor.is_released:
                raise UsageError(f"{tensor.name} is released; allocate it again")
            if tensor.moving:
                raise UsageError(f"{tensor.name} is being moved; wait for the transfer that move() returned")
