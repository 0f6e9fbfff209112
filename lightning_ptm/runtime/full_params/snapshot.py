"""Snapshots: consistent copies of model states, made while training goes on. An update waits until the elements that it
is about to change have been copied (copy on write).

Owns which cells (ranges that one update changes together) of which paged tensors have been copied. Two threads copy
cells: the one that calls `copy_all`, in order, and the updater's thread, through `before_write`. The caller's `put`
    makes the copies.
I1: each cell is copied once, and no update changes it before or during its copy.
I2: `put` is called by one thread at a time.
I3: after a failure no more cells are copied, and updates go on; `copy_all` raises the failure.
I4: Ctrl-C takes effect before or after the updater's thread copies a cell, never during it. A second Ctrl-C, which must
    take effect, counts as a failure. So no cell stays half copied, which would make `copy_all` wait for ever.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import InternalError
from lightning_ptm.interrupts import interrupted_later
from lightning_ptm.runtime.tensors import page_io

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.runtime.tensors.page_io import Elements
    from lightning_ptm.update.updater import Updater


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A paged tensor to copy; `put(first element, elements on the CPU)` must copy the elements.

    Attributes:
        cells: starts of its cells; None: cells have equal lengths.
        at_once: number of elements that are read together, and length of the cells if equal; None: the snapshot's
            default.
        before_put: called with the first element before `put`, by either thread; may wait.
    """

    paged: Elements
    put: Callable[[int, Tensor], None]
    cells: Sequence[int] | None = None
    at_once: int | None = None
    before_put: Callable[[int], None] | None = None


def stretches(numel: int, cells: Sequence[int] | None, at_once: int) -> Iterator[tuple[int, int]]:
    """Yields (first element, number of elements) of each `put` for a tensor of `numel` elements, as `copy_all` makes
    them.

    Args:
        cells, at_once: as in SnapshotPart.
    """
    starts = cells or range(0, numel, at_once)
    for place, first in enumerate(starts):
        end = starts[place + 1] if place + 1 < len(starts) else numel
        yield from stretches_of_cell(first, end, at_once)


def stretches_of_cell(first: int, end: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges for elements [first, end)."""
    for start in range(first, end, at_once):
        yield start, min(at_once, end - start)


class _State(enum.Enum):
    PENDING = enum.auto()
    COPYING = enum.auto()
    COPIED = enum.auto()


class Snapshot:
    """One snapshot. From its construction to its end, all changes of the parts must be announced to `before_write`.

    Args:
        parts: the paged tensors to copy, in this order.
        cell_numel: elements of a cell, and of one read, for parts that do not say otherwise. The ranges that are
            announced to `before_write` are cells.
        buffers: for parts on disk.
        failed: called after a failure, to wake what waits in a part's `before_put`; by either thread, perhaps
            repeatedly.
    """

    def __init__(
        self,
        allocator: Allocator,
        parts: Sequence[SnapshotPart],
        cell_numel: int,
        buffers: page_io.PageIOBuffers,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self._pages = page_io.PageIO(allocator)
        self._buffers = buffers
        self._failed = failed

        # State, under the condition's lock; a part's cells by the number of its paged tensor.
        self._changed = threading.Condition()
        self._parts = {part.paged.id: part for part in parts}
        self._at_once = {part.paged.id: part.at_once or cell_numel for part in parts}
        self._starts = {
            part.paged.id: part.cells or range(0, part.paged.numel, self._at_once[part.paged.id]) for part in parts
        }
        """Starts of cells, by id of the paged tensor."""
        self._cells = {key: [_State.PENDING] * len(starts) for key, starts in self._starts.items()}
        self._failure: BaseException | None = None
        self._putting = threading.Lock()

    def copy_all(self) -> None:
        """Copies every cell that the updater has not copied; returns when all cells are copied. Raises what a `put`
        raised, in either thread."""
        for part in self._parts.values():
            claims = self._claims(part.paged)
            for start, values in self._pages.stream(part.paged, claims, self._buffers):
                self._put(part, start, values)
        with self._changed:
            # The updater's thread may be copying the last ones.
            self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or all(state is _State.COPIED for cells in self._cells.values() for state in cells)
                )
            )
        if self._failure is not None:
            raise self._failure

    def before_write(self, paged: PagedTensor, start: int, values: Tensor) -> None:
        """Returns when the cell from `start` on is copied. Called before an update changes it.

        Args:
            values: the cell's present values, as pages store them.

        Raises:
            KeyboardInterrupt: after the cell was copied, or the snapshot has failed (I4).
        """
        part = self._parts.get(paged.id)
        if part is None or not values.numel():
            return
        with interrupted_later():
            try:
                if self._claim(part.paged, start):
                    numel = min(self._at_once[part.paged.id], part.paged.numel - start)
                    elements = page_io.elements_of(part.paged, values, numel)
                    end = self._end(part.paged, start)
                    if (
                        start + elements.numel() != end
                    ):  # its cell would stay COPYING, and `copy_all` would wait for ever
                        raise InternalError(
                            f"an update announced elements {start} to {start + elements.numel()} of a state for a snapshot "
                            f"whose cell ends at {end}"
                        )
                    self._put(part, start, elements.cpu())
            except BaseException as error:
                # Also an error before `_put`, as of a copy to RAM: the cell is COPYING, and `copy_all` waits for it.
                self.fail(error)
                if not isinstance(error, Exception):
                    raise

    def _claim(self, paged: Elements, start: int) -> bool:
        """Returns whether the caller is to copy the cell; waits while the other thread copies it."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._state(paged, start) is not _State.COPYING)
            if self._failure is not None or self._state(paged, start) is _State.COPIED:
                return False
            self._set(paged, start, _State.COPYING)
            return True

    def fail(self, error: BaseException) -> None:
        """Ends the snapshot with this failure."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        if self._failed is not None:
            self._failed()

    def _put(self, part: SnapshotPart, start: int, values: Tensor) -> None:
        try:
            if part.before_put is not None:
                part.before_put(start)
            with self._putting:
                part.put(start, values)
        except BaseException as error:
            self.fail(error)
            raise
        if start + values.numel() < self._end(part.paged, start):
            return  # the rest of the cell comes next
        with self._changed:
            self._set(part.paged, start, _State.COPIED)
            self._changed.notify_all()

    def _claims(self, paged: Elements) -> Iterator[tuple[int, int]]:
        """Yields the ranges to read of cells that are not copied yet. A cell is claimed when its first range is
        requested."""
        for first in self._starts[paged.id]:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._state(paged, first) is not _State.PENDING:
                    continue
                self._set(paged, first, _State.COPYING)
            yield from stretches_of_cell(first, self._end(paged, first), self._at_once[paged.id])

    def _place(self, paged: Elements, start: int) -> int:
        """Returns the index of the cell that has this element."""
        return bisect.bisect_right(self._starts[paged.id], start) - 1

    def _end(self, paged: Elements, start: int) -> int:
        """Returns the end of the cell that has this element."""
        starts, place = self._starts[paged.id], self._place(paged, start)
        return starts[place + 1] if place + 1 < len(starts) else paged.numel

    def _state(self, paged: Elements, start: int) -> _State:
        return self._cells[paged.id][self._place(paged, start)]

    def _set(self, paged: Elements, start: int, state: _State) -> None:
        self._cells[paged.id][self._place(paged, start)] = state


class Snapshots:
    """The snapshots of a run, one at a time. Owns the buffers through which elements on disk are read.

    Args:
        buffers: buffers for the whole run, if checkpoints are saved in the background; None: each snapshot allocates
            its own.
        sizes: (dtype, elements) of these buffers.
        settle: drains all updates, on all ranks, and releases gathered flats.
    """

    def __init__(
        self,
        allocator: Allocator,
        updater: Updater,
        buffers: page_io.PageIOBuffers | None,
        sizes: Sequence[tuple[torch.dtype, int]],
        settle: Callable[[str], None],
    ) -> None:
        self._allocator = allocator
        self._updater = updater
        self._buffers = buffers
        self._for_the_run = buffers is not None
        self._sizes = sizes
        self._settle = settle

    def begin(self, parts: Sequence[SnapshotPart], failed: Callable[[], None] | None = None) -> Snapshot:
        """Begins a snapshot of the present states, to be copied by any thread while updates go on; end it with `end`.

        Args:
            failed: as for `Snapshot`.
        """
        self._settle("snapshot")
        cell_numel = self.at_once
        if self._buffers is None:
            self._buffers = page_io.PageIOBuffers.for_now(self._allocator, self._sizes)
        snapshot = Snapshot(self._allocator, parts, cell_numel, self._buffers, failed)
        self._updater.watch(snapshot.before_write)
        return snapshot

    @property
    def at_once(self) -> int:
        """Elements that the next snapshot copies together: a chunk, if updates go on meanwhile."""
        chunk = self._updater.chunk_numel
        if self._buffers is not None:
            return chunk
        # Buffers that are allocated for one save hold at most a page, which is less than a chunk of fp64.
        return min([chunk, *(self._allocator.page_size // dtype.itemsize for dtype, _ in self._sizes)])

    def end(self) -> None:
        """Ends the snapshot, whether it was completed or has failed."""
        self._updater.watch(None)
        if self._buffers is not None and not self._for_the_run:
            self._buffers.close()  # the memory budget has no room for them between snapshots
            self._buffers = None
