"""Jobs of the I/O threads: one blocking transfer of at most a page, direct or through the thread's staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ptm.memory.device_work import Mark
from lightning_ptm.memory.disk import DiskRegion
from lightning_ptm.memory.page_ranges import PagePiece, round_up
from lightning_ptm.memory.region import Staging
from lightning_ptm.memory.streams import CopyStream, Pair
from lightning_ptm.terms import BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Straight:
    """Direct transfer from disk to RAM (`reading`) or from RAM to disk, of whole blocks."""

    disk: DiskRegion
    piece: PagePiece
    views: tuple[memoryview, ...]
    reading: bool

    def run(self, staging: Staging) -> None:
        transfer = self.disk.read if self.reading else self.disk.write
        transfer(self.piece.frame, self.piece.start_bytes, self.views)


@dataclass(frozen=True, slots=True)
class ReadBounced:
    """Read through staging: from disk to RAM at any address and of any length, or to a CUDA device."""

    disk: DiskRegion
    piece: PagePiece
    targets: tuple[torch.Tensor, ...]
    copies: CopyStream
    after: Sequence[Mark]

    def run(self, staging: Staging) -> None:
        region = staging.region
        self.disk.read(self.piece.frame, self.piece.start_bytes, [region.memory[: round_up(self.piece.bytes)]])
        # The I/O thread waits, because its next job overwrites the staging buffer.
        self.copies.launch(_pair_up(self.targets, region.tensor, to_staging=False), self.after).synchronize()


@dataclass(frozen=True, slots=True)
class WriteBounced:
    """Write through staging: from RAM at any address and of any length, or from a CUDA device, to disk.

    With `keep_tail`, the bytes after the piece in its last block belong to elements that keep their values.
    """

    disk: DiskRegion
    piece: PagePiece
    sources: tuple[torch.Tensor, ...]
    copies: CopyStream
    after: Sequence[Mark]
    keep_tail: bool

    def run(self, staging: Staging) -> None:
        region = staging.region
        if self.keep_tail:
            _read_last_block(self.disk, self.piece, region.memory[: round_up(self.piece.bytes)])
        self.copies.launch(_pair_up(self.sources, region.tensor, to_staging=True), self.after).synchronize()
        self.disk.write(self.piece.frame, self.piece.start_bytes, [region.memory[: round_up(self.piece.bytes)]])


@dataclass(frozen=True, slots=True)
class DiskToDisk:
    """Copy from one position on disk to another, through staging; `keep_tail` as in WriteBounced."""

    disk: DiskRegion
    source: PagePiece
    target: PagePiece
    keep_tail: bool

    def run(self, staging: Staging) -> None:
        region = staging.region
        size = self.target.bytes
        blocks = region.memory[: round_up(size)]
        self.disk.read(self.source.frame, self.source.start_bytes, [blocks])
        if self.keep_tail and size % BLOCK_BYTES:
            # The staging's extra block holds the target's old last block, whose tail is kept.
            spare = region.memory[len(region.memory) - BLOCK_BYTES :]
            _read_last_block(self.disk, self.target, spare)
            kept_from = size % BLOCK_BYTES
            blocks[size:] = spare[kept_from:]
        self.disk.write(self.target.frame, self.target.start_bytes, [blocks])


def _read_last_block(disk: DiskRegion, piece: PagePiece, blocks: memoryview) -> None:
    """Reads the block in which `piece` ends, if it ends inside one, into the last block of `blocks`."""
    if piece.bytes % BLOCK_BYTES:
        last_block = piece.start_bytes + round_up(piece.bytes) - BLOCK_BYTES
        disk.read(piece.frame, last_block, [blocks[len(blocks) - BLOCK_BYTES :]])


def _pair_up(parts: Sequence[torch.Tensor], staged: torch.Tensor, *, to_staging: bool) -> list[Pair]:
    pairs, start = [], 0
    for part in parts:
        place = staged[start : start + part.numel()]
        pairs.append(Pair(place, part) if to_staging else Pair(part, place))
        start += part.numel()
    return pairs
