"""Copies elements from the pages of an engine that has ended to those of the next one, through a few buffers.

Owns nothing but its counters; the old pages are their allocator's. RAM of old pages is freed after its last read.

I1: each element is read once, in the order in which it is needed, ahead of the writes. I2: ranks exchange elements in
rounds of at most a page to and from each rank (planning/reshard_moves.py); all ranks that share a flat take part in
each round.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.reshard_moves import Move, ShardRange, moves, rounds
from lightning_ptm.runtime.tensors import page_io

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.runtime.relayout.shard_map import ShardMap


class Resharder:
    """Reads elements of old pages in the order of a new layout, and exchanges them between ranks.

    Args:
        allocator: the old pages' allocator.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.irreversible = False
        """Whether some old pages were freed, so that the previous layout cannot be restored."""
        self.moved_bytes = 0
        """Bytes that this rank has read from old pages."""
        self.sent_bytes = 0
        """Bytes that this rank has sent to other ranks."""

    def reshard(
        self,
        wanted: Iterable[ShardRange],
        sources: Mapping[int, ShardMap],
        communicator: Communicator,
        *,
        last_read: bool = False,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields (offset in this rank's new shard, elements), ascending. Each tensor is valid until the next is
        requested. Collective if any of the elements come from another rank.

        Args:
            wanted: ranges of all ranks that share the flat, in the order of each new shard; ranges without a source are
                left out.
            sources: by id of parameter.
            communicator: of the ranks that share the flat.
            last_read: this is the last read: free RAM after it.
        """
        kinds = {id(held): held for held in sources.values()}
        there = {kind: held.of_parameters() for kind, held in kinds.items()}
        planned = list(moves(wanted, {key: there[id(held)].get(key, []) for key, held in sources.items()}))
        if all(move.local for move in planned):
            own = [move for move in planned if move.target == communicator.rank]
            for move, done, part in self._read(own, sources, last_read=last_read):
                yield move.to + done, part
            return
        for held in kinds.values():
            if len(held.ranks) != communicator.world_size:
                raise InternalError(
                    f"flat {held.flat.unit}/{held.flat.index} was shared by {len(held.ranks)} ranks, and the new flat is "
                    f"shared by {communicator.world_size}"
                )
        yield from self._exchanged(planned, sources, communicator, last_read=last_read)

    def whole(self, source: ShardMap, key: int, communicator: Communicator) -> Tensor:
        """Returns all elements of one tensor of a parameter, in its shape and strides, in new memory; of a slice, the
        slice. Collective if other ranks have some of them."""
        numel = sum(each.numel for each in source.of_parameters().get(key, ()))  # an empty parameter has no ranges
        found = torch.empty(numel, dtype=source.dtype)
        wanted = [ShardRange(key, 0, numel, rank, 0) for rank in range(communicator.world_size)]
        for start, part in self.reshard(wanted, {key: source}, communicator):
            found[start : start + part.numel()].copy_(part)
        shape, stride = source.shape(key), source.stride(key)
        return found.view(shape) if stride is None else found.as_strided(shape, stride)

    def _read(
        self, own: Sequence[Move], sources: Mapping[int, ShardMap], *, last_read: bool
    ) -> Iterator[tuple[Move, int, Tensor]]:
        """Yields (move, elements of it that were yielded before, elements) for moves from this rank, in their order."""
        on_disk = {id(held): page_io.in_pages(held.here()) for move in own for held in (sources[move.parameter],)}
        through = [(paged.dtype, paged.numel) for paged in on_disk.values() if not paged.tier.addressable]
        with contextlib.closing(page_io.PageIOBuffers.for_now(self._allocator, through)) as buffers:
            for _, group in itertools.groupby(own, key=lambda move: id(sources[move.parameter])):
                found = list(group)
                yield from self._read_one(found, sources[found[0].parameter], buffers, last_read=last_read)

    def _read_one(
        self, own: Sequence[Move], held: ShardMap, buffers: page_io.PageIOBuffers, *, last_read: bool
    ) -> Iterator[tuple[Move, int, Tensor]]:
        tensor = held.here()
        step = page_io.step_of(self._allocator, tensor)
        cells = [
            start
            for start, _ in itertools.groupby(
                cell for move in own for cell in range(move.place // step * step, move.place + move.numel, step)
            )
        ]
        stretches = ((start, min(step, tensor.numel - start)) for start in cells)
        reading = page_io.chosen(self._allocator, tensor, stretches, buffers)
        with contextlib.closing(reading):  # type: ignore[type-var]
            start, cell = next(reading, (-1, torch.empty(0)))
            for move in own:
                done = 0
                while done < move.numel:
                    place = move.place + done
                    if not start <= place < start + step:
                        start, cell = next(reading)
                    part = cell[place - start : move.place + move.numel - start]
                    self.moved_bytes += part.nbytes
                    yield move, done, part
                    done += part.numel()
                    if last_read:
                        self._free(tensor, place, part.numel())

    def make_irreversible(self) -> None:
        """Records that the previous layout cannot be restored."""
        self.irreversible = True

    def _free(self, tensor: page_io.Elements, start: int, numel: int) -> None:
        """Frees RAM of elements that were read for the last time. A quantized chunk that is read in parts keeps its
        RAM."""
        if not tensor.tier.addressable:
            return
        if isinstance(tensor, PagedTensor):
            self.irreversible = True
            self._allocator.discard(tensor, start, numel)
        elif numel == page_io.step_of(self._allocator, tensor):
            self.irreversible = True
            self._allocator.discard(page_io.in_pages(tensor), *tensor.stretch(start, numel))

    def _exchanged(
        self, planned: Sequence[Move], sources: Mapping[int, ShardMap], communicator: Communicator, *, last_read: bool
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields as `moved`, for moves between ranks."""
        here = communicator.rank
        dtype = reduce(torch.promote_types, {held.dtype for held in sources.values()})
        found = list(rounds(planned, self._allocator.page_size // dtype.itemsize))
        own = [move for each in found for move in each if move.source == here]
        reading = self._read(own, sources, last_read=last_read)
        with contextlib.closing(reading):  # type: ignore[type-var]
            for each in found:
                sent, received = [0] * communicator.world_size, [0] * communicator.world_size
                for move in each:
                    sent[move.target] += move.numel * dtype.itemsize if move.source == here else 0
                    received[move.source] += move.numel * dtype.itemsize if move.target == here else 0
                rows = torch.empty(sum(sent) // dtype.itemsize, dtype=dtype)
                filled = 0
                while filled < rows.numel():
                    _, _, part = next(reading)
                    rows[filled : filled + part.numel()].copy_(part)
                    filled += part.numel()
                self.sent_bytes += sum(sent) - sent[here]
                # As bytes: not every backend can send every dtype.
                out = communicator.all_to_all(rows.view(torch.uint8), sent, received).view(dtype)
                arrived = sorted(
                    (move for move in each if move.target == here), key=lambda move: (move.source, move.to)
                )
                ends = itertools.accumulate(move.numel for move in arrived)
                places = [(move.to, out[end - move.numel : end]) for move, end in zip(arrived, ends, strict=True)]
                yield from sorted(places, key=lambda place: place[0])
