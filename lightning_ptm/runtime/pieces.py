"""Moves elements between paged tensors of any tier and ordinary tensors on the CPU, a page at a time.

Knows pages and stretches of parameters (`Segment`); nothing of names, units or steps. Of a tensor on disk no more than
`_AHEAD` pages are in memory. The caller sees to it that nothing else writes the pages meanwhile.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.terms import ALIGN_NUMEL, Tier
from lightning_ptm.update import Segment

if TYPE_CHECKING:
    from lightning_ptm.memory import Allocator, PagedTensor, Transfer

_AHEAD = 4
"""Pages that are read, or written, at once."""


def read(allocator: Allocator, paged: PagedTensor) -> Tensor:
    """All elements, in memory of their own or as a view of the pages."""
    if paged.tier is not Tier.DISK:
        return paged.tensor().cpu()
    values = torch.empty(paged.numel, dtype=paged.dtype)
    for start, part in parts(allocator, paged):
        values[start : start + part.numel()].copy_(part)
    return values


def write(allocator: Allocator, paged: PagedTensor, values: Tensor) -> None:
    """Replace all elements."""
    whole = Segment(0, 0, 0, paged.numel, ragged=False)
    fill(allocator, paged, [whole], [values])


def parts(allocator: Allocator, paged: PagedTensor) -> Iterator[tuple[int, Tensor]]:
    """(first element, elements) of successive stretches; each is good until the next is asked for."""
    if paged.tier is not Tier.DISK:
        values = paged.tensor()
        step = _step(allocator, paged) if values.is_cuda else max(1, paged.numel)
        for start in range(0, paged.numel, step):
            yield start, values[start : start + step].cpu()
        return
    step = _step(allocator, paged)
    starts = deque(range(0, paged.numel, step))
    buffers = _Buffers(allocator, paged)
    coming: deque[tuple[int, PagedTensor, Transfer]] = deque()
    try:
        while starts or coming:
            while starts and (buffer := buffers.take()) is not None:
                start = starts.popleft()
                numel = min(step, paged.numel - start)
                coming.append((start, buffer, allocator.copy(paged, buffer, source_start=start, numel=numel)))
            start, buffer, transfer = coming.popleft()
            transfer.wait()
            yield start, buffer.tensor()[: min(step, paged.numel - start)]
            buffers.give_back(buffer)
    finally:
        _end(transfer for _, _, transfer in coming)
        buffers.close()


def stretches(
    allocator: Allocator, paged: PagedTensor, segments: Sequence[Segment]
) -> Iterator[tuple[Segment, Tensor]]:
    """(stretch of one parameter, its elements) in the order of the shard; the elements are good until the next."""
    for start, values in parts(allocator, paged):
        for segment in within(segments, start, start + values.numel()):
            yield segment, values[segment.start - start : segment.stop - start]


def fill(
    allocator: Allocator,
    paged: PagedTensor,
    segments: Sequence[Segment],
    given: Sequence[Tensor | None],
    *,
    through: torch.dtype | None = None,
    keep: bool = True,
) -> None:
    """Write stretches of whole parameters into a shard, reading of each no more than lies in it.

    Args:
        segments: which parameters lie where in the shard.
        given: for each parameter its whole values, on the CPU.
        through: values are rounded to this dtype on their way.
        keep: parameters that are not given keep their elements; otherwise they become 0.
    """
    keep = keep and any(given[segment.parameter] is None for segment in segments)

    def put(target: Tensor, start: int) -> None:
        if not keep:
            target.zero_()
        for segment in within(segments, start, start + target.numel()):
            value = given[segment.parameter]
            if value is not None:
                source = value.reshape(-1).narrow(0, segment.parameter_start, segment.numel)
                place = target.narrow(0, segment.start - start, segment.numel)
                place.copy_(source if through is None else source.to(through))

    if paged.tier is not Tier.DISK:
        put(paged.tensor(), 0)
        return
    step = _step(allocator, paged)
    buffers = _Buffers(allocator, paged)
    leaving: deque[tuple[PagedTensor, Transfer]] = deque()
    try:
        for start in range(0, paged.numel, step):
            buffer = buffers.take()
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


class _Buffers:
    """A few page-sized tensors in RAM; as many as there is room for, one at least."""

    def __init__(self, allocator: Allocator, paged: PagedTensor) -> None:
        self._allocator = allocator
        tier = Tier.HOST if allocator.capacity_bytes(Tier.HOST) else Tier.DEVICE
        numel = min(_step(allocator, paged), -(-paged.numel // ALIGN_NUMEL) * ALIGN_NUMEL)
        self._all = [allocator.allocate("values in transit", numel, paged.dtype, tier)]
        while len(self._all) < _AHEAD and allocator.free_bytes(tier) > 2 * allocator.page_size:
            self._all.append(allocator.allocate("values in transit", numel, paged.dtype, tier))
        self._free = list(self._all)

    def take(self) -> PagedTensor | None:
        return self._free.pop() if self._free else None

    def give_back(self, buffer: PagedTensor) -> None:
        self._free.append(buffer)

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
