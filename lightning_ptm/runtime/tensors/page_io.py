"""Page-wise copies between paged tensors of any tier and ordinary CPU tensors.

Knows pages and segments of parameters (`Segment`), but no names, units or steps. Of a tensor on disk, at most `BUFFERS` pages
are in memory at a time, except for a quantized tensor that is written, which is in memory as a whole. The caller must ensure
that nothing else writes the pages during a copy.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.core_limits import one_core
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.quantization import QuantizedTensor
from lightning_ptm.planning.layout import round_up
from lightning_ptm.progress import Seen, unseen
from lightning_ptm.runtime.tensors.parts import elements
from lightning_ptm.terms import ALIGN_NUMEL, BLOCK_BYTES, Tier
from lightning_ptm.update.flat_states import Segment
from lightning_ptm.update.state_encoding import EncodedTensor

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.transfer import Transfer
    from lightning_ptm.planning.tensor_slices import TensorSlice

BUFFERS = 4
"""Number of pages that are read or written at once."""


Elements = PagedTensor | EncodedTensor | QuantizedTensor
"""Paged tensor whose elements are read and written; for encoded ones, the decoded elements."""


def in_pages(tensor: Elements) -> PagedTensor:
    """Returns the paged tensor in which the elements, or their codes, are stored."""
    return tensor if isinstance(tensor, PagedTensor) else tensor.paged


def elements_of(tensor: Elements, stored: Tensor, numel: int) -> Tensor:
    """Returns the `numel` elements of which `stored` is the content of pages: decoded, or `stored` itself if not encoded."""
    return stored if isinstance(tensor, PagedTensor) else tensor.decoded(stored, numel)


def _stretch(tensor: Elements, start: int, numel: int) -> tuple[int, int]:
    """Returns (first stored element, number of stored elements) of at most `numel` elements from `start` on."""
    numel = min(numel, tensor.numel - start)
    return (start, numel) if isinstance(tensor, PagedTensor) else tensor.stretch(start, numel)


class PageIO:
    """Reads and writes the elements of one allocator's pages, through temporary buffers for pages that are on disk.

    A stream is an iterator of (first element, elements on the CPU), in ascending order. `stream` and `of_tensors` make
    streams, of pages and of tensors; `write` and `read` take them into pages and into a tensor.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self._operations = 0
        self._kept: PageIOBuffers | None = None
        """Buffers of the operation, when no stream uses them."""

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Context in which buffers are kept from one tensor to the next of the same dtype."""
        self._operations += 1
        try:
            yield
        finally:
            self._operations -= 1
            if not self._operations and self._kept is not None:
                self._kept.close()
                self._kept = None

    def keep_buffers(self) -> None:
        """Keeps buffers until the allocator is closed."""
        self._operations += 1

    @contextlib.contextmanager
    def buffers(self, tensors: Sequence[PagedTensor]) -> Iterator[PageIOBuffers]:
        """Context with the buffers in RAM through which the tensors on disk are read and written; others need none."""
        sizes = [(tensor.dtype, tensor.numel) for tensor in tensors if not tensor.tier.addressable]
        pages = max([-(-numel * dtype.itemsize // self.allocator.page_size) for dtype, numel in sizes], default=0)
        most, kept = min(BUFFERS, pages), None
        if sizes:
            kept, self._kept = self._kept, None
        if kept is not None and not kept.suffice(sizes, most):
            kept.close()
            kept = None
        buffers = kept or PageIOBuffers.for_now(self.allocator, sizes, most)
        try:
            yield buffers
        except BaseException:
            buffers.close()
            raise
        if sizes and self._operations and self._kept is None:
            self._kept = buffers
        else:
            buffers.close()

    def step_of(self, paged: Elements) -> int:
        """Returns the number of elements that are read or written at once: one page, or one chunk of an encoded
        tensor."""
        if isinstance(paged, EncodedTensor):
            return paged.encoding.chunk_numel
        return self.allocator.page_size // paged.dtype.itemsize

    # -- pages as a source --------------------------------------------------------------------------------------------

    def read(self, paged: Elements) -> Tensor:
        """Returns all elements, as a view of the pages if possible, else as a copy."""
        if isinstance(paged, PagedTensor) and paged.tier.addressable:
            return paged.tensor().cpu()
        values = torch.empty(paged.numel, dtype=paged.dtype)
        step = self.step_of(paged)
        with self.buffers([in_pages(paged)]) as buffers:
            ranges = ((start, min(step, paged.numel - start)) for start in range(0, paged.numel, step))
            for start, part in self.stream(paged, ranges, buffers):
                values[start : start + part.numel()].copy_(part)
        return values

    def stream(
        self, paged: Elements, ranges: Iterable[tuple[int, int]], buffers: PageIOBuffers
    ) -> Generator[tuple[int, Tensor], None, None]:
        """Yields (first element, elements) of ranges of elements; each result is valid until the next is requested.
        Ranges are consumed lazily, when their read starts.

        Args:
            ranges: (first element, number of elements) of each range, multiples of 4096 except at the end of the last;
                not longer than the buffers, and whole chunks of encoded tensors.
            buffers: buffers into which ranges on disk are read.
        """
        stored = in_pages(paged)
        if stored.tier.addressable:
            whole = stored.tensor()
            for start, numel in ranges:
                yield start, elements_of(paged, whole.narrow(0, *_stretch(paged, start, numel)), numel).cpu()
            return
        to_read = iter(ranges)
        coming: deque[tuple[tuple[int, int], int, PagedTensor, Transfer]] = deque()
        more = True
        try:
            while more or coming:
                while more and (buffer := buffers.take(stored.dtype)) is not None:
                    try:
                        found = next(to_read, None)
                        if found is not None:
                            first, length = _stretch(paged, *found)
                            # Disks are read in blocks; only ranges of codes begin within a block.
                            block = BLOCK_BYTES // stored.dtype.itemsize
                            begin = first // block * block
                            end = min(round_up(first + length, block), stored.numel)
                            transfer = self.allocator.copy(stored, buffer, source_start=begin, numel=end - begin)
                    except BaseException:
                        buffers.give_back(buffer)
                        raise
                    if found is None:
                        more = False
                        buffers.give_back(buffer)
                        break
                    coming.append((found, first - begin, buffer, transfer))
                if coming:
                    (start, numel), lead, buffer, transfer = coming.popleft()
                    try:
                        transfer.wait()
                        part = buffer.tensor().narrow(0, lead, _stretch(paged, start, numel)[1])
                        yield start, elements_of(paged, part, numel)
                    finally:
                        buffers.give_back(buffer)  # also if the caller stops early
                elif more:
                    raise InternalError(
                        f"nothing of {stored.name} can be read: all buffers of {stored.dtype} are in use"
                    )
        finally:
            _end(transfer for _, _, _, transfer in coming)
            for _, _, buffer, _ in coming:
                buffers.give_back(buffer)

    # -- pages as a target --------------------------------------------------------------------------------------------

    def write(
        self, paged: Elements, stream: Iterable[tuple[int, Tensor]], *, keep: bool = False, seen: Seen = unseen
    ) -> None:
        """Writes a stream into pages. Each item is requested after the one before is written.

        Args:
            keep: whether elements that are not in the stream keep their values; else they become 0.
            seen: called with the number of bytes written since the last call.

        Raises:
            InternalError: the stream reaches beyond the tensor's end.
        """
        coming = (each for each in stream if each[1].numel())
        left: tuple[int, Tensor] | None = None

        def put(target: Tensor, start: int) -> None:
            nonlocal left
            done, stop = start, start + target.numel()
            while (left := left or next(coming, None)) is not None and left[0] < stop:
                first, part = left
                here = part[: stop - first]
                if not keep:
                    target[done - start : first - start].zero_()
                place = target.narrow(0, first - start, here.numel())
                place.copy_(here)
                seen(place.nbytes)
                done = first + here.numel()
                left = (done, part[here.numel() :]) if here.numel() < part.numel() else None
            if not keep:
                target[done - start :].zero_()

        if isinstance(paged, PagedTensor) and paged.tier.addressable:
            put(paged.tensor(), 0)
        elif isinstance(paged, QuantizedTensor) and not paged.tier.addressable:
            self._change_codes(paged, put, keep=keep)
        else:
            self._change(paged, put, keep=keep)
        if (left := left or next(coming, None)) is not None:
            raise InternalError(
                f"elements from {left[0]} on were given for {in_pages(paged).name}, which has {paged.numel}"
            )

    def fill(
        self,
        paged: Elements,
        segments: Sequence[Segment],
        given: Sequence[Tensor | None],
        boxes: Sequence[TensorSlice | None] | None = None,
        *,
        through: torch.dtype | None = None,
        keep: bool = True,
        seen: Seen = unseen,
    ) -> None:
        """Writes values of whole parameters into a shard. Args: as for `of_tensors` and `write`; parameters without
        values count as not in the stream."""
        stream = of_tensors(segments, given, boxes, through=through, step=self.step_of(paged))
        keep = keep and any(given[segment.parameter] is None for segment in segments)
        self.write(paged, stream, keep=keep, seen=seen)

    def _change(self, tensor: Elements, put: Callable[[Tensor, int], None], *, keep: bool) -> None:
        """Changes all elements, one page (or one chunk of an encoded tensor) at a time.

        Args:
            put: changes elements in place; called with the elements and the index of the first.
            keep: whether `put` needs the present elements.
        """
        step, stored = self.step_of(tensor), in_pages(tensor)

        def change(part: Tensor, start: int) -> None:
            values = elements_of(tensor, part, min(step, tensor.numel - start))
            put(values, start)
            if not isinstance(tensor, PagedTensor):
                tensor.encode(values, part)

        if stored.tier.addressable:
            for start in range(0, tensor.numel, step):
                change(stored.tensor().narrow(0, *_stretch(tensor, start, step)), start)
            return
        leaving: deque[tuple[PagedTensor, Transfer]] = deque()
        with self.buffers([stored]) as buffers:
            try:
                with one_core():  # idle OpenMP threads would spin on the cores that the disk's threads need
                    for start in range(0, tensor.numel, step):
                        buffer = buffers.take(stored.dtype)
                        if buffer is None:
                            buffer, transfer = leaving.popleft()
                            transfer.wait()
                        first, numel = _stretch(tensor, start, step)
                        if keep:
                            self.allocator.copy(stored, buffer, source_start=first, numel=numel).wait()
                        change(buffer.tensor()[:numel], start)
                        leaving.append((buffer, self.allocator.copy(buffer, stored, target_start=first, numel=numel)))
                while leaving:
                    buffer, transfer = leaving.popleft()
                    transfer.wait()
                    buffers.give_back(buffer)
            finally:
                _end(transfer for _, transfer in leaving)

    def _change_codes(self, coded: QuantizedTensor, put: Callable[[Tensor, int], None], *, keep: bool) -> None:
        """Does what `_change` does, for a quantized tensor on disk. The codes of a page of values seldom begin at a
        disk block, so all codes are written at once."""
        step = self.step_of(coded)
        codes = self.read(coded.paged) if keep else torch.empty(coded.paged.numel, dtype=torch.uint8)
        for start in range(0, coded.numel, step):
            part, numel = codes.narrow(0, *_stretch(coded, start, step)), min(step, coded.numel - start)
            values = coded.decoded(part, numel) if keep else torch.empty(numel, dtype=coded.dtype)
            put(values, start)
            coded.encode(values, part)
        self.write(coded.paged, [(0, codes)])


def of_tensors(
    segments: Sequence[Segment],
    given: Sequence[Tensor | None],
    boxes: Sequence[TensorSlice | None] | None = None,
    *,
    through: torch.dtype | None = None,
    step: int,
) -> Iterator[tuple[int, Tensor]]:
    """Yields the stream of a shard whose elements are in tensors of whole parameters, reading only the elements that are
    in the shard.

    Args:
        segments: segments of parameters in the shard.
        given: values of each parameter, on the CPU; None for parameters that are left out.
        boxes: slice of each parameter; None for whole ones. Values of a slice may be those of the whole parameter.
        through: dtype to which values are rounded.
        step: number of elements that are yielded at once, at most.
    """
    for segment in segments:
        value = given[segment.parameter]
        if value is None:
            continue
        box = None if boxes is None else boxes[segment.parameter]
        for start in range(0, segment.numel, step):
            part = elements(value, box, segment.parameter_start + start, min(step, segment.numel - start))
            yield segment.start + start, part if through is None else part.to(through)


def within(segments: Sequence[Segment], start: int, stop: int) -> Iterator[Segment]:
    """Yields the parts of sorted segments that are in [start, stop) of the shard."""
    for index in range(bisect.bisect_right(segments, start, key=lambda segment: segment.stop), len(segments)):
        if segments[index].start >= stop:
            return
        yield segments[index].cut(start, stop)


class PageIOBuffers:
    """Buffers in RAM for reads from and writes to disk, a few of each dtype. Owns their tensors until `close`."""

    def __init__(self, allocator: Allocator, tensors: Iterable[PagedTensor]) -> None:
        self._allocator = allocator
        self._all = list(tensors)
        self._free: dict[torch.dtype, list[PagedTensor]] = {}
        for tensor in self._all:
            self._free.setdefault(tensor.dtype, []).append(tensor)

    @classmethod
    def for_now(
        cls, allocator: Allocator, tensors: Iterable[tuple[torch.dtype, int]], most: int = BUFFERS
    ) -> PageIOBuffers:
        """Allocates temporary buffers: up to `most` of each dtype if there is room, at least one.

        Args:
            tensors: (dtype, elements) of the tensors that are read or written through them.
        """
        taken: list[PagedTensor] = []
        tier = Tier.HOST if allocator.capacity_bytes(Tier.HOST) else Tier.DEVICE
        longest: dict[torch.dtype, int] = {}
        for dtype, numel in tensors:
            longest[dtype] = max(longest.get(dtype, 0), -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL)
        try:
            for dtype, numel in longest.items():
                numel, count = min(allocator.page_size // dtype.itemsize, numel), 0
                while not count or (count < most and allocator.free_bytes(tier) > 2 * allocator.page_size):
                    taken.append(allocator.allocate("values in transit", numel, dtype, tier))
                    allocator.merge(taken[-1])
                    count += 1
        except BaseException:
            for tensor in taken:
                allocator.release(tensor)
            raise
        return cls(allocator, taken)

    def suffice(self, tensors: Iterable[tuple[torch.dtype, int]], most: int) -> bool:
        """Returns whether `for_now` would make no more buffers for these tensors, nor longer ones."""
        page_size = self._allocator.page_size
        return all(
            len(free := self._free.get(dtype, [])) >= most and free[0].numel >= min(page_size // dtype.itemsize, numel)
            for dtype, numel in tensors
        )

    def take(self, dtype: torch.dtype) -> PagedTensor | None:
        """Returns a free buffer of a dtype, or None if all are in use."""
        return self._free[dtype].pop() if self._free[dtype] else None

    def give_back(self, buffer: PagedTensor) -> None:
        self._free[buffer.dtype].append(buffer)

    def close(self) -> None:
        for buffer in self._all:
            self._allocator.release(buffer)


def _end(transfers: Iterable[Transfer]) -> None:
    """Waits for transfers whose results are not needed, and ignores their errors."""
    for transfer in transfers:
        with contextlib.suppress(Exception):
            transfer.wait()
