"""Plans a copy between two paged tensors: the pages to hold and the jobs to run. Moves no bytes and changes no table.

Ranges on disk begin on a block; their end need not be on one. If the range ends where the target's elements end, the
last block is transferred whole, since only padding follows it in the page. Otherwise the last block goes through a
staging buffer, so that the target's next elements keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.device_work import Mark
from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.io import DiskToDisk, IoJob, ReadBounced, Straight, WriteBounced
from lightning_ptm.memory.page_ranges import PagePiece, direct_bytes, extents, join, pair_up, pieces, round_up
from lightning_ptm.memory.paged_tensor import PagedTensor, PageSpan
from lightning_ptm.memory.region import HostRegion, Region
from lightning_ptm.memory.streams import CopyStream, CopyStreams, Pair
from lightning_ptm.terms import BLOCK_BYTES, Tier


@dataclass(frozen=True, slots=True)
class CopyRange:
    """A copy of `length_bytes` bytes. Start offsets are relative to each tensor's first byte."""

    source: PagedTensor
    target: PagedTensor
    source_start_bytes: int
    target_start_bytes: int
    length_bytes: int

    @property
    def by_io(self) -> bool:
        """Whether one side is not addressable, so that I/O threads carry the copy out."""
        return not (self.source.tier.addressable and self.target.tier.addressable)

    @property
    def ends_with_target(self) -> bool:
        return self.target_start_bytes + self.length_bytes == self.target.nbytes


@dataclass(frozen=True, slots=True)
class DiskJob:
    """A job, and the disk path (lane) whose threads run it."""

    lane: int
    job: IoJob


@dataclass(frozen=True, slots=True)
class CopyMachine:
    """What copies run on: the bytes of each tier and the streams between tiers."""

    page_size: int
    regions: Mapping[Tier, Region]
    disk: DiskRegion | None
    streams: CopyStreams
    apart: bool
    """`Backend.apart`: the device copies concurrently with the host."""

    def stream(self, source: Tier, target: Tier) -> CopyStream:
        """Returns the stream of a copy between two RAM or device tiers."""
        if source.computes == target.computes:
            return self.streams.within_device if source.computes else self.streams.within_host
        return self.streams.to_device if target.computes else self.streams.to_host

    def on_stream(self, source: Tier, target: Tier) -> bool:
        """Whether a copy between two addressable tiers still runs when its launch has returned."""
        return self.apart and (source.computes or target.computes)

    def discard(self, tensor: PagedTensor, start_bytes: int, stop_bytes: int) -> None:
        """Discards bytes [start_bytes, stop_bytes) of a tensor and returns their RAM to the system."""
        if tensor.tier in self.regions:
            for each in extents(tensor.pages, self.page_size, start_bytes, stop_bytes):
                self.regions[tensor.tier].discard(each.start_bytes, each.stop_bytes - each.start_bytes)

    def discard_all_but(self, kept: Sequence[PagedTensor]) -> None:
        """Discards all bytes in memory that are on no page of the tensors `kept`."""
        for tier, region in self.regions.items():
            used = sorted({span.frame for tensor in kept if tensor.tier is tier for span in tensor.pages})
            done = 0
            for frame in (*used, region.tensor.numel() // self.page_size):
                if done < frame:
                    region.discard(done * self.page_size, (frame - done) * self.page_size)
                done = frame + 1

    def view(self, tier: Tier, spans: Sequence[PageSpan], numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns a view of the elements on `spans`, shape (numel,); None if they are on disk or scattered."""
        size_bytes = numel * dtype.itemsize
        found = extents(spans, self.page_size, 0, size_bytes)
        if not tier.addressable or len(found) > 1:
            return None
        start_bytes = found[0].start_bytes if found else 0
        # In inference mode a view in another dtype would be an inference tensor, which autograd refuses for good.
        with torch.inference_mode(False):
            return self.regions[tier].tensor[start_bytes : start_bytes + size_bytes].view(dtype)

    def byte_views(self, tensor: PagedTensor, start_bytes: int, stop_bytes: int) -> tuple[torch.Tensor, ...]:
        """Returns uint8 views of a RAM tensor's bytes, one for each run of adjacent pages."""
        whole = self.regions[tensor.tier].tensor
        found = extents(tensor.pages, self.page_size, start_bytes, stop_bytes)
        return tuple(whole[extent.start_bytes : extent.stop_bytes] for extent in found)


def copy_range(
    source: PagedTensor, target: PagedTensor, source_start: int, target_start: int, numel: int | None
) -> CopyRange:
    """Returns the byte range of a copy, checked.

    Raises:
        UsageError: dtypes differ, a range is outside its tensor or overlaps itself, or a disk range does not begin on a
            block.
    """
    if source.dtype != target.dtype:
        raise UsageError(f"cannot copy {source.name} ({source.dtype}) to {target.name} ({target.dtype}): cast first")
    if numel is None:
        numel = min(source.numel - source_start, target.numel - target_start)
    item_bytes = source.dtype.itemsize
    for tensor, start in ((source, source_start), (target, target_start)):
        if start < 0 or numel < 0 or start + numel > tensor.numel:
            raise UsageError(f"elements {start} to {start + numel} are not in {tensor.name}, which has {tensor.numel}")
        if not tensor.tier.addressable and start * item_bytes % BLOCK_BYTES:
            raise UsageError(
                f"a copy of {tensor.name} begins at its element {start}: on disk ranges begin at multiples of "
                f"{BLOCK_BYTES // item_bytes} elements ({BLOCK_BYTES} bytes)"
            )
    if source is target and abs(source_start - target_start) < numel:
        raise UsageError(
            f"a copy of {numel} elements within {source.name} overlaps itself; copy through another tensor"
        )
    return CopyRange(source, target, source_start * item_bytes, target_start * item_bytes, numel * item_bytes)


def source_pieces(copy: CopyRange, page_size: int) -> list[PagePiece]:
    """Returns the pages that a copy reads."""
    stop = copy.source_start_bytes + copy.length_bytes
    if not copy.source.tier.addressable:
        stop = round_up(stop)
    return pieces(copy.source.pages, page_size, copy.source_start_bytes, stop)


def target_pieces(copy: CopyRange, page_size: int) -> list[PagePiece]:
    """Returns the pages that a copy writes, including the padding that a whole last block overwrites."""
    stop = copy.target_start_bytes + copy.length_bytes
    if not copy.target.tier.addressable or (not copy.source.tier.addressable and copy.ends_with_target):
        stop = round_up(stop)
    return pieces(copy.target.pages, page_size, copy.target_start_bytes, stop)


def ram_pairs(copy: CopyRange, machine: CopyMachine) -> list[Pair]:
    """Returns the pairs of views to copy between, for a copy between addressable tiers."""
    page_size = machine.page_size
    sources, targets = machine.regions[copy.source.tier].tensor, machine.regions[copy.target.tier].tensor
    source_extents = extents(
        copy.source.pages, page_size, copy.source_start_bytes, copy.source_start_bytes + copy.length_bytes
    )
    target_extents = extents(
        copy.target.pages, page_size, copy.target_start_bytes, copy.target_start_bytes + copy.length_bytes
    )
    # Extents are treated as pieces of one unbounded page, so that `pair_up` serves both.
    pairs = pair_up(
        [PagePiece(0, extent.start_bytes, extent.stop_bytes) for extent in source_extents],
        [PagePiece(0, extent.start_bytes, extent.stop_bytes) for extent in target_extents],
    )
    return [
        Pair(
            target=targets[pair.target.start_bytes : pair.target.stop_bytes],
            source=sources[pair.source.start_bytes : pair.source.stop_bytes],
        )
        for pair in pairs
    ]


def disk_jobs(copy: CopyRange, machine: CopyMachine, after: Sequence[Mark] | None = None) -> list[DiskJob]:
    """Returns the jobs of a copy with a side on disk, each at most a page.

    Args:
        after: marks that the stream part of a job waits for; None: waits for the caller's current stream.
    """
    if machine.disk is None:
        return []  # a tier without bytes has only tensors without elements
    if not copy.source.tier.addressable and not copy.target.tier.addressable:
        return _disk_to_disk(copy, machine, machine.disk)
    return _disk_and_ram(copy, machine, machine.disk, after)


def _disk_to_disk(copy: CopyRange, machine: CopyMachine, disk: DiskRegion) -> list[DiskJob]:
    page_size = machine.page_size
    source_stop = copy.source_start_bytes + copy.length_bytes
    target_stop = copy.target_start_bytes + copy.length_bytes
    pairs = pair_up(
        pieces(copy.source.pages, page_size, copy.source_start_bytes, source_stop),
        pieces(copy.target.pages, page_size, copy.target_start_bytes, target_stop),
    )
    keep_tail = not copy.ends_with_target
    return [
        DiskJob(disk.lane(pair.source.frame), DiskToDisk(disk, pair.source, pair.target, keep_tail)) for pair in pairs
    ]


def _disk_and_ram(
    copy: CopyRange, machine: CopyMachine, disk: DiskRegion, after: Sequence[Mark] | None
) -> list[DiskJob]:
    reading = not copy.source.tier.addressable
    if reading:
        on_disk, in_ram = copy.source, copy.target
        disk_start, ram_start = copy.source_start_bytes, copy.target_start_bytes
    else:
        on_disk, in_ram = copy.target, copy.source
        disk_start, ram_start = copy.target_start_bytes, copy.source_start_bytes
    page_size, region = machine.page_size, machine.regions[in_ram.tier]
    jobs: list[DiskJob] = []

    straight_bytes = 0
    if isinstance(region, HostRegion):
        straight_bytes = direct_bytes(ram_start, copy.length_bytes, tail_is_free=copy.ends_with_target)
        ram_at = ram_start
        found_on_disk = pieces(on_disk.pages, page_size, disk_start, disk_start + straight_bytes)
        # A chunk rarely begins at a page border, and a disk is slower with two transfers of half the length.
        for piece in join(found_on_disk, page_size) if disk.is_one_file else found_on_disk:
            found = extents(in_ram.pages, page_size, ram_at, ram_at + piece.bytes)
            views = tuple(region.memory[extent.start_bytes : extent.stop_bytes] for extent in found)
            job: IoJob = Straight(disk, piece, views, reading)
            jobs.append(DiskJob(disk.lane(piece.frame), job))
            ram_at += piece.bytes

    if straight_bytes < copy.length_bytes:
        stream = machine.stream(Tier.HOST, in_ram.tier) if reading else machine.stream(in_ram.tier, Tier.HOST)
        after = (stream.mark(),) if after is None else after
        ram_at = ram_start + straight_bytes
        for piece in pieces(on_disk.pages, page_size, disk_start + straight_bytes, disk_start + copy.length_bytes):
            views_bounced = machine.byte_views(in_ram, ram_at, ram_at + piece.bytes)
            if reading:
                job = ReadBounced(disk, piece, views_bounced, stream, after)
            else:
                job = WriteBounced(disk, piece, views_bounced, stream, after, keep_tail=not copy.ends_with_target)
            jobs.append(DiskJob(disk.lane(piece.frame), job))
            ram_at += piece.bytes
    return jobs
