"""Moves elements between paged tensors of any tier and ordinary tensors on the CPU, a page at a time.

Knows pages and stretches of parameters (`Segment`); nothing of names, units or steps. Of a tensor on disk no more than
`BUFFERS` pages are in memory. The caller sees to it that nothing else writes the pages meanwhile.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.progress import Seen, unseen
from lightning_ptm.runtime.parts import elements
from lightning_ptm.terms import ALIGN_NUMEL, Tier
from lightning_ptm.update import Segment

if TYPE_CHECKING:
    from lightning_ptm.memory import Allocator, PagedTensor, Transfer
    from lightning_ptm.planning.boxes import Box

BUFFERS = 4
"""Pages that are read, or written, at once."""


def read(allocator: Allocator, paged: PagedTensor) -> Tensor:
    """All elements, in memory of their own or as a view of the pages."""
    if paged.tier.addressable:
        return paged.tensor().cpu()
    values = torch.empty(paged.numel, dtype=paged.dtype)
    step = _step(allocator, paged)
    with contextlib.closing(Buffers.for_now(allocator, [(paged.dtype, paged.numel)])) as buffers:
        stretches = ((start, min(step, paged.numel - start)) for start in range(0, paged.numel, step))
        for start, part in chosen(allocator, paged, stretches, buffers):
            values[start : start + part.numel()].copy_(part)
    return values


def write(allocator: Allocator, paged: PagedTensor, values: Tensor, *, seen: Seen = unseen) -> None:
    """Replace all elements. `seen` is told how many more bytes were."""
    whole = Segment(0, 0, 0, paged.numel, ragged=False)
    fill(allocator, paged, [whole], [values], seen=seen)


def chosen(
    allocator: Allocator, paged: PagedTensor, stretches: Iterable[tuple[int, int]], buffers: Buffers
) -> Iterator[tuple[int, Tensor]]:
    """(first element, elements) of stretches, which are asked for one when that one is about to be read; each is good until
    the next is asked for.

    Args:
        stretches: (first element, number of elements), each a multiple of 4096, but for the end of the last; of no more
            elements than the buffers hold.
        buffers: where stretches on disk are read to.
    """
    if paged.tier.addressable:
        values = paged.tensor()
        for start, numel in stretches:
            yield start, values[start : start + numel].cpu()
        return
    to_read = iter(stretches)
    coming: deque[tuple[tuple[int, int], PagedTensor, Transfer]] = deque()
    more = True
    try:
        while more or coming:
            while more and (buffer := buffers.take(paged.dtype)) is not None:
                found = next(to_read, None)
                if found is None:
                    more = False
                    buffers.give_back(buffer)
                    break
                transfer = allocator.copy(paged, buffer, source_start=found[0], numel=found[1])
                coming.append((found, buffer, transfer))
            if coming:
                (start, numel), buffer, transfer = coming.popleft()
                transfer.wait()
                yield start, buffer.tensor()[:numel]
                buffers.give_back(buffer)
    finally:
        _end(transfer for _, _, transfer in coming)


def fill(
    allocator: Allocator,
    paged: PagedTensor,
    segments: Sequence[Segment],
    given: Sequence[Tensor | None],
    boxes: Sequence[Box | None] | None = None,
    *,
    through: torch.dtype | None = None,
    keep: bool = True,
    seen: Seen = unseen,
) -> None:
    """Write stretches of whole parameters into a shard, reading of each no more than lies in it.

    Args:
        segments: which parameters lie where in the shard.
        given: for each parameter its values, on the CPU.
        boxes: for each that is a part of a larger one, which; its values may be those of the larger one.
        through: values are rounded to this dtype on their way.
        keep: parameters that are not given keep their elements; otherwise they become 0.
        seen: is told how many more bytes of the shard were given.
    """
    keep = keep and any(given[segment.parameter] is None for segment in segments)

    def put(target: Tensor, start: int) -> None:
        if not keep:
            target.zero_()
        for segment in within(segments, start, start + target.numel()):
            value = given[segment.parameter]
            if value is not None:
                box = None if boxes is None else boxes[segment.parameter]
                source = elements(value, box, segment.parameter_start, segment.numel)
                place = target.narrow(0, segment.start - start, segment.numel)
                place.copy_(source if through is None else source.to(through))
                seen(place.nbytes)

    if paged.tier.addressable:
        put(paged.tensor(), 0)
        return
    step = _step(allocator, paged)
    buffers = Buffers.for_now(allocator, [(paged.dtype, paged.numel)])
    leaving: deque[tuple[PagedTensor, Transfer]] = deque()
    try:
        for start in range(0, paged.numel, step):
            buffer = buffers.take(paged.dtype)
            if buffer is None:
                buffer, transfer = leaving.popleft()
                transfer.wait()
            numel = min(step, paged.numel - start)
            if keep:
                allocator.copy(paged, buffer, source_start=start, numel=numel).wait()
            put(buffer.tensor()[:numel], start)
            leaving.append((buffer, allocator.copy(buffer, paged, target_start=start, numel=numel)))
        while leaving:
            leaving.popleft()[1].wait()
    finally:
        _end(transfer for _, transfer in leaving)
        buffers.close()


def within(segments: Sequence[Segment], start: int, stop: int) -> Iterator[Segment]:
    """The parts of segments, which are in order, that lie in [start, stop) of the shard."""
    for index in range(bisect.bisect_right(segments, start, key=lambda segment: segment.stop), len(segments)):
        if segments[index].start >= stop:
            return
        yield segments[index].cut(start, stop)


class Buffers:
    """A few tensors in RAM of each dtype. Owns them until `close`."""

    def __init__(self, allocator: Allocator, tensors: Iterable[PagedTensor]) -> None:
        self._allocator = allocator
        self._all = list(tensors)
        self._free: dict[torch.dtype, list[PagedTensor]] = {}
        for tensor in self._all:
            self._free.setdefault(tensor.dtype, []).append(tensor)

    @classmethod
    def for_now(cls, allocator: Allocator, tensors: Iterable[tuple[torch.dtype, int]]) -> Buffers:
        """As many as there is room for, one at least of each dtype.

        Args:
            tensors: (dtype, elements) of what is to be read or written through them.
        """
        taken: list[PagedTensor] = []
        tier = Tier.HOST if allocator.capacity_bytes(Tier.HOST) else Tier.DEVICE
        longest: dict[torch.dtype, int] = {}
        for dtype, numel in tensors:
            longest[dtype] = max(longest.get(dtype, 0), -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL)
        for dtype, numel in longest.items():
            numel, count = min(allocator.page_size // dtype.itemsize, numel), 0
            while not count or (count < BUFFERS and allocator.free_bytes(tier) > 2 * allocator.page_size):
                taken.append(allocator.allocate("values in transit", numel, dtype, tier))
                allocator.merge(taken[-1])
                count += 1
        return cls(allocator, taken)

    def take(self, dtype: torch.dtype) -> PagedTensor | None:
        """One, or None while all are in use."""
        return self._free[dtype].pop() if self._free[dtype] else None

    def give_back(self, buffer: PagedTensor) -> None:
        self._free[buffer.dtype].append(buffer)

    def close(self) -> None:
        for buffer in self._all:
            self._allocator.release(buffer)


def _end(transfers: Iterable[Transfer]) -> None:
    """Nobody wants these any more: wait for them, whatever their outcome."""
    for transfer in transfers:
        with contextlib.suppress(Exception):
            transfer.wait()


def _step(allocator: Allocator, paged: PagedTensor) -> int:
    return allocator.page_size // paged.dtype.itemsize
