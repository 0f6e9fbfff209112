"""The states of one moment, taken while training goes on: what an update is about to change is copied first.

Owns which cells (stretches that change at once) of which paged tensors have been taken. Two threads take cells: the one that
calls `take_all`, in order, and the updater's, by `before_write`. What taking means is the caller's: `put` copies.
I1: a cell is taken once, and nothing changes it before or while it is.
I2: `put` is called by one thread at a time.
I3: after a failure nothing is taken any more and updates go on; the failure is `take_all`'s to raise.
I4: Ctrl-C comes before or after a cell is taken by the updater, never while it is; where it comes twice, so that it must be
    heard, it is a failure. So no cell stays half taken, for which `take_all` would wait for ever.
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

from lightning_ptm.interrupts import interrupted_later
from lightning_ptm.runtime.tensors import page_io

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.runtime.tensors.page_io import Elements
    from lightning_ptm.update.updater import Updater


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotPart:
    """What lies in pages and what to do with its elements: `put(first element, elements on the CPU)` must copy them.

    Attributes:
        cells: where its cells begin; None: they are of equal length.
        at_once: elements that are read together, and of a cell of equal length; None: as the snapshot says.
        before_put: is called with the first element before `put` is, by any thread at any time; may wait.
    """

    paged: Elements
    put: Callable[[int, Tensor], None]
    cells: Sequence[int] | None = None
    at_once: int | None = None
    before_put: Callable[[int], None] | None = None


def stretches(numel: int, cells: Sequence[int] | None, at_once: int) -> Iterator[tuple[int, int]]:
    """(first element, elements) of all that is put of `numel` elements, each by itself, if nobody takes them out of turn.

    Args:
        cells, at_once: as a part's.
    """
    starts = cells or range(0, numel, at_once)
    for place, first in enumerate(starts):
        end = starts[place + 1] if place + 1 < len(starts) else numel
        yield from stretches_of_cell(first, end, at_once)


def stretches_of_cell(first: int, end: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Those of elements [first, end)."""
    for start in range(first, end, at_once):
        yield start, min(at_once, end - start)


class _State(enum.Enum):
    THERE = enum.auto()
    BEING_TAKEN = enum.auto()
    TAKEN = enum.auto()


class Snapshot:
    """See the file's contract. From now until it has ended, all changes of the parts must be announced to `before_write`.

    Args:
        parts: what to take, in this order.
        cell_numel: elements of a cell, but for parts that say otherwise; as many are read at once. Stretches that are
            announced are cells.
        buffers: for parts on disk.
        failed: is called after a failure, for who waits in a part's `before_put`; by any thread, perhaps more than once.
    """

    def __init__(
        self,
        allocator: Allocator,
        parts: Sequence[SnapshotPart],
        cell_numel: int,
        buffers: page_io.PageIOBuffers,
        failed: Callable[[], None] | None = None,
    ) -> None:
        self._allocator = allocator
        self._buffers = buffers
        self._failed = failed

        # State, under the condition's lock; a part's cells by the number of its paged tensor.
        self._changed = threading.Condition()
        self._parts = {part.paged.id: part for part in parts}
        self._at_once = {part.paged.id: part.at_once or cell_numel for part in parts}
        self._starts = {
            part.paged.id: part.cells or range(0, part.paged.numel, self._at_once[part.paged.id]) for part in parts
        }
        """Where cells begin."""
        self._cells = {key: [_State.THERE] * len(starts) for key, starts in self._starts.items()}
        self._failure: BaseException | None = None
        self._putting = threading.Lock()

    def take_all(self) -> None:
        """Take every cell that nobody has taken; returns when all are. Raises what a `put` raised, in either thread."""
        for part in self._parts.values():
            claims = self._claims(part.paged)
            for start, values in page_io.chosen(self._allocator, part.paged, claims, self._buffers):
                self._put(part, start, values)
        with self._changed:
            # The last ones may be in the updater's hands.
            self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or all(state is _State.TAKEN for cells in self._cells.values() for state in cells)
                )
            )
        if self._failure is not None:
            raise self._failure

    def before_write(self, paged: PagedTensor, start: int, values: Tensor) -> None:
        """The cell that starts at `start` is about to change from `values`, as they lie in pages: return when it is taken.

        Raises:
            KeyboardInterrupt: it has been taken, or given up, all the same (I4).
        """
        part = self._parts.get(paged.id)
        if part is None or not values.numel():
            return
        with interrupted_later():
            try:
                if self._claim(part.paged, start):
                    numel = min(self._at_once[part.paged.id], part.paged.numel - start)
                    self._put(part, start, page_io.elements_of(part.paged, values, numel).cpu())
            except Exception:
                return  # I3
            except BaseException as error:
                self.fail(error)
                raise

    def _claim(self, paged: Elements, start: int) -> bool:
        """Whether the cell is the caller's to take; waits while somebody else takes it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._state(paged, start) is not _State.BEING_TAKEN
            )
            if self._failure is not None or self._state(paged, start) is _State.TAKEN:
                return False
            self._set(paged, start, _State.BEING_TAKEN)
            return True

    def fail(self, error: BaseException) -> None:
        """Give it up."""
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
            self._set(part.paged, start, _State.TAKEN)
            self._changed.notify_all()

    def _claims(self, paged: Elements) -> Iterator[tuple[int, int]]:
        """Cells that are there, a stretch (first element, elements) for each reading of one; a cell is claimed when its first
        is asked for."""
        for first in self._starts[paged.id]:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._state(paged, first) is not _State.THERE:
                    continue
                self._set(paged, first, _State.BEING_TAKEN)
            yield from stretches_of_cell(first, self._end(paged, first), self._at_once[paged.id])

    def _place(self, paged: Elements, start: int) -> int:
        """Of the cell that has an element."""
        return bisect.bisect_right(self._starts[paged.id], start) - 1

    def _end(self, paged: Elements, start: int) -> int:
        """Of the cell that has an element."""
        starts, place = self._starts[paged.id], self._place(paged, start)
        return starts[place + 1] if place + 1 < len(starts) else paged.numel

    def _state(self, paged: Elements, start: int) -> _State:
        return self._cells[paged.id][self._place(paged, start)]

    def _set(self, paged: Elements, start: int, state: _State) -> None:
        self._cells[paged.id][self._place(paged, start)] = state


class Snapshots:
    """Of a run, one at a time. Owns the buffers through which what is on disk comes into memory.

    Args:
        buffers: those of the whole run, where saves go on behind training; else they are taken for each snapshot.
        sizes: (dtype, elements) of such buffers.
        settle: brings every update home, on all ranks, and gives up what is gathered.
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
        """The states of now, to be taken in any thread while updates go on; end it with `end`.

        Args:
            failed: see `Snapshot`.
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
        """Elements of a paged tensor that the next snapshot takes at once: a chunk, where updates go on meanwhile."""
        chunk = self._updater.chunk_numel
        if self._buffers is not None:
            return chunk
        # Buffers that are taken for one save hold a page at most, which is less than a chunk of fp64.
        return min([chunk, *(self._allocator.page_size // dtype.itemsize for dtype, _ in self._sizes)])

    def end(self) -> None:
        """It has been taken, or given up."""
        self._updater.watch(None)
        if self._buffers is not None and not self._for_the_run:
            self._buffers.close()  # the plan has no room of its own for them
            self._buffers = None
