"""Cuts byte ranges of tensors into pieces of pages. Pure: decides, touches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptm.memory.paged_tensor import PageSpan
from lightning_ptm.terms import BLOCK_BYTES


def round_up(value_bytes: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """The next multiple of `unit_bytes`."""
    return -(-value_bytes // unit_bytes) * unit_bytes


@dataclass(frozen=True, slots=True)
class PagePiece:
    """Bytes [start_bytes, stop_bytes) of page `frame`, and of the pages behind it where `stop_bytes` lies there."""

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
    """How many bytes, from the start of a range, go straight between disk and RAM; the others bounce through staging.

    Args:
        ram_start_bytes: where the range begins in the RAM tensor (whose own start is on a block).
        length_bytes: length of the range.
        tail_is_free: the range ends where the target's elements end, so its last block may be transferred whole.
    """
    if ram_start_bytes % BLOCK_BYTES:
        return 0
    return round_up(length_bytes) if tail_is_free else length_bytes // BLOCK_BYTES * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class PagePiecePair:
    """Two pieces of equal length: where bytes come from and where they go."""

    source: PagePiece
    target: PagePiece


def lay_out(frames: Sequence[int], page_size: int, first_offset_bytes: int, size_bytes: int) -> tuple[PageSpan, ...]:
    """Spans of `size_bytes`, rounded up to whole blocks, that begin at an offset of the first frame."""
    spans = []
    offset_bytes, left_bytes = first_offset_bytes, round_up(size_bytes)
    for frame in frames:
        span_bytes = min(page_size - offset_bytes, left_bytes)
        spans.append(PageSpan(frame, offset_bytes, span_bytes))
        offset_bytes, left_bytes = 0, left_bytes - span_bytes
    return tuple(spans)


def pieces(spans: Sequence[PageSpan], page_size: int, start_bytes: int, stop_bytes: int) -> list[PagePiece]:
    """The pages under the bytes [start_bytes, stop_bytes) of a tensor, in order."""
    if start_bytes >= stop_bytes:
        return []
    # Every span but the first begins at its page's start, so the position of a byte is arithmetic, not a search.
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
    """Those of a tensor's spans in which the bytes [start_bytes, stop_bytes) lie."""
    if start_bytes >= stop_bytes:
        return ()
    shift_bytes = spans[0].offset_bytes
    return spans[(start_bytes + shift_bytes) // page_size : -(-(stop_bytes + shift_bytes) // page_size)]


def join(found: Sequence[PagePiece], page_size: int) -> list[PagePiece]:
    """The same bytes in fewer pieces, none longer than a page, where each page lies right behind the one before."""
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
    """The same bytes as addresses in a region; neighbouring pages are one extent."""
    found: list[Extent] = []
    for piece in pieces(spans, page_size, start_bytes, stop_bytes):
        start = piece.frame * page_size + piece.start_bytes
        if found and found[-1].stop_bytes == start:
            found[-1] = Extent(found[-1].start_bytes, start + piece.bytes)
        else:
            found.append(Extent(start, start + piece.bytes))
    return found


def pair_up(sources: Sequence[PagePiece], targets: Sequence[PagePiece]) -> list[PagePiecePair]:
    """Cut two lists of pieces of the same total length at each other's borders."""
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
