"""Bytes that an optimizer step writes to each folder of the disk tier, from the pages of a run or of a virtual run.

Reads page tables and layouts; moves nothing. Every part of a step writes whole disk blocks, and two writes of a step never
share a block, so the bytes of a step are those of the written ranges, rounded up to blocks.

I1: a chunk of an update is written if the optimizer updates any of its elements (update/update_job.py: JobUnderWay). Chunks
    begin at blocks in every column.
I2: a gradient on disk is written once in each micro-batch, or once in a step where ranks reduce it at the step.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from lightning_ptm.memory.disk import bytes_by_path
from lightning_ptm.memory.paged_tensor import PagedTensor, round_up
from lightning_ptm.planning.chunks import ChunkBounds, chunk_bounds_of
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.terms import chunk_numel
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.update_job import JobColumn, state_columns


@dataclasses.dataclass(frozen=True, slots=True)
class DiskWrites:
    """Bytes that one rank writes to each folder, if every trained parameter has a gradient.

    Attributes:
        updates: by folder, bytes of one update of every flat: master weights, optimizer states, compute parameters.
        gradients: by folder, bytes of the gradients of one micro-batch.
        once: whether gradients are written once in a step, and not once in each micro-batch.
    """

    updates: tuple[int, ...]
    gradients: tuple[int, ...]
    once: bool = False

    def of_step(self, micro_batches: int) -> tuple[int, ...]:
        """Returns the bytes of an optimizer step by folder; empty if it writes nothing."""
        times = 1 if self.once else micro_batches
        found = tuple(update + times * more for update, more in zip(self.updates, self.gradients, strict=True))
        return found if any(found) else ()


def disk_writes(
    flats: Iterable[FlatUpdate], folders: int, page_size: int, *, late_versions: bool, once: bool
) -> DiskWrites:
    """Returns the bytes that a step writes.

    Args:
        flats: the trained flats of a rank, with their pages; one entry per flat and optimizer. Gradients without pages yet
            count as spread evenly over folders.
        folders: number of folders of the disk tier.
        late_versions: whether updates write compute parameters to versions in RAM (lock-free), and not to their home.
        once: see `DiskWrites`.
    """
    updates, gradients = [0] * folders, [0] * folders
    seen = set[int]()

    def add(total: list[int], tensor: PagedTensor, start: int, numel: int) -> None:
        size = tensor.dtype.itemsize
        extents = tensor.pages.between(start * size, (start + numel) * size)
        for folder, more in enumerate(bytes_by_path(extents, page_size, folders)):
            total[folder] += more

    for flat in flats:
        columns = state_columns(flat.states)
        if not late_versions:
            columns.append(JobColumn("parameters", flat.store.home, reads=False, writes=True))
        on_disk = [column for column in columns if not column.home.tier.addressable]
        bounds = chunk_bounds_of(flat.store.layout, chunk_numel(page_size))
        for first, last in _updated_chunks(flat.states, bounds) if on_disk else ():
            for column in on_disk:
                start, _ = _stretch(column, bounds, first)
                last_start, last_numel = _stretch(column, bounds, last)
                add(updates, column.home, start, last_start + last_numel - start)
        pages, home = flat.gradient.shard.pages, flat.gradient.route.own_pages
        if home is None or home.addressable or id(flat.gradient) in seen:
            continue
        seen.add(id(flat.gradient))
        if pages is not None:
            add(gradients, pages, 0, pages.numel)
            continue
        whole = round_up(flat.store.layout.shard_numel * flat.gradient.route.dtype.itemsize)
        for folder in range(folders):  # pages are allocated at the first gradient
            gradients[folder] += -(-whole // folders)
    return DiskWrites(tuple(updates), tuple(gradients), once)


def _stretch(column: JobColumn, bounds: ChunkBounds, place: int) -> tuple[int, int]:
    """Returns the first element and the number of a column's stored elements in the chunk at index `place`."""
    start, numel = bounds.starts[place], bounds.length(place)
    return (start, numel) if column.layout is None else column.layout.stretch(start, numel)


def _updated_chunks(states: FlatStates, bounds: ChunkBounds) -> Iterator[tuple[int, int]]:
    """Yields runs of chunks of which the optimizer updates elements (I1): indices of their first and last chunk."""
    run: tuple[int, int] | None = None
    for segment in states.segments:
        if states.groups[segment.parameter] is None:
            continue
        first, last = _chunk_of(bounds.starts, segment.start), _chunk_of(bounds.starts, segment.stop - 1)
        if run is None:
            run = (first, last)
        elif first <= run[1] + 1:
            run = (run[0], max(run[1], last))
        else:
            yield run
            run = (first, last)
    if run is not None:
        yield run


def _chunk_of(starts: Sequence[int], element: int) -> int:
    return bisect.bisect_right(starts, element) - 1
