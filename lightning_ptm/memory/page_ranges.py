"""Cuts byte ranges of paged tensors into pieces of pages. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptm.memory.paged_tensor import PageSpan
from lightning_ptm.terms import BLOCK_BYTES


def round_up(value_bytes: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """Returns the next multiple of `unit_bytes`."""
    return -(-value_bytes // unit_bytes) * unit_bytes


@dataclass(frozen=True, slots=True)
class PagePiece:
    """Bytes [start_bytes, stop_bytes) of page `frame`; a larger stop extends into the following pages."""

    frame: int
    start_bytes: int
    stop_bytes: int

    @property
    def bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start_bytes, stop_bytes) of a RAM region."""

    start_bytes: int
    stop_bytes: int


def direct_bytes(ram_start_bytes: int, length_bytes: int, *, tail_is_free: bool) -> int:
    """Returns how many bytes at the start of a range go directly between disk and RAM; the rest goes through staging.

    Args:
        ram_start_bytes: start of the range in the RAM tensor (whose own start is on a block).
        length_bytes: length of the range.
        tail_is_free: whether the range ends where the target's elements end, so that its last block may be
            transferred whole.
    """
    if ram_start_bytes % BLOCK_BYTES:
        return 0
    return round_up(length_bytes) if tail_is_free else length_bytes // BLOCK_BYTES * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class PagePiecePair:
    """Two pieces of equal length: source and target of a copy."""

    source: PagePiece
    target: PagePiece


def lay_out(frames: Sequence[int], page_size: int, first_offset_bytes: int, size_bytes: int) -> tuple[PageSpan, ...]:
    """Returns spans of `size_bytes`, rounded up to whole blocks, that begin at an offset in the first frame."""
    spans = []
    offset_bytes, left_bytes = first_offset_bytes, round_up(size_bytes)
    for frame in frames:
        span_bytes = min(page_size - offset_bytes, left_bytes)
        spans.append(PageSpan(frame, offset_bytes, span_bytes))
        offset_bytes, left_bytes = 0, left_bytes - span_bytes
    return tuple(spans)


def pieces(spans: Sequence[PageSpan], page_size: int, start_bytes: int, stop_bytes: int) -> list[PagePiece]:
    """Returns the pieces of pages that hold the bytes [start_bytes, stop_bytes) of a tensor, in order."""
    if start_bytes >= stop_bytes:
        return []
    # Every span but the first begins at its page's start, so a byte's position needs no search.
    shift_bytes = spans[0].offset_bytes
    position, end = start_bytes + shift_bytes, stop_bytes + shift_bytes
    found = []
    while position < end:
        index = position // page_size
        stop = min(end, (index + 1) * page_size)
        found.append(PagePiece(spans[index].frame, position - index * page_size, stop - index * page_size))
        position = stop
    return found


def spans_of(spans: Sequence[PageSpan], page_size: int, start_bytes: int, stop_bytes: int) -> Sequence[PageSpan]:
    """Returns those of a tensor's spans that hold the bytes [start_bytes, stop_bytes)."""
    if start_bytes >= stop_bytes:
        return ()
    shift_bytes = spans[0].offset_bytes
    return spans[(start_bytes + shift_bytes) // page_size : -(-(stop_bytes + shift_bytes) // page_size)]


def join(found: Sequence[PagePiece], page_size: int) -> list[PagePiece]:
    """Returns the same bytes in fewer pieces, none longer than a page, for pages that are adjacent on disk."""
    joined: list[PagePiece] = []
    for piece in found:
        last = joined[-1] if joined else None
        if last is not None and last.bytes + piece.bytes <= page_size:
            shift_bytes = (piece.frame - last.frame) * page_size
            if last.stop_bytes == piece.start_bytes + shift_bytes:
                joined[-1] = PagePiece(last.frame, last.start_bytes, piece.stop_bytes + shift_bytes)
                continue
        joined.append(piece)
    return joined


def extents(spans: Sequence[PageSpan], page_size: int, start_bytes: int, stop_bytes: int) -> list[Extent]:
    """Returns the same bytes as addresses in a region; adjacent pages are one extent."""
    found: list[Extent] = []
    for piece in pieces(spans, page_size, start_bytes, stop_bytes):
        start = piece.frame * page_size + piece.start_bytes
        if found and found[-1].stop_bytes == start:
            found[-1] = Extent(found[-1].start_bytes, start + piece.bytes)
        else:
            found.append(Extent(start, start + piece.bytes))
    return found


def pair_up(sources: Sequence[PagePiece], targets: Sequence[PagePiece]) -> list[PagePiecePair]:
    """Cuts two lists of pieces with the same total length at each other's borders, into pairs of equal length."""
    pairs = []
    source_index = target_index = source_done = target_done = 0
    while source_index < len(sources) and target_index < len(targets):
        source, target = sources[source_index], targets[target_index]
        size = min(source.bytes - source_done, target.bytes - target_done)
        source_start, target_start = source.start_bytes + source_done, target.start_bytes + target_done
        pairs.append(
            PagePiecePair(
                PagePiece(source.frame, source_start, source_start + size),
                PagePiece(target.frame, target_start, target_start + size),
            )
        )
        source_done, target_done = source_done + size, target_done + size
        if source_done == source.bytes:
            source_index, source_done = source_index + 1, 0
        if target_done == target.bytes:
            target_index, target_done = target_index + 1, 0
    return pairs
