"""Sharded saves of what ranks cut by columns: they exchange columns, a page at a time, so that each writes whole rows.

A part's rows are short stretches of the file, hundreds or thousands in a page, and each would be a write of its own. The
ranks of a tensor group own the same elements of their parts, so a page of each together is whole rows of the file, of which
each rank writes an equal share. What a page has of a row that begins or ends elsewhere is written from where it is.

I1: ranks of a group have the same exchanges, in the same order; they compare how many before the first.
I2: every message says whether its sender has failed. Whoever fails still sends the next one, so all of a group stop after the
    same exchange, and none waits for ever.
I3: no more than a page of each rank is held at once. Exchanges are the caller's thread's only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from lightning_ptm.comm import Communicator
from lightning_ptm.errors import CheckpointError, FailedElsewhere, InternalError
from lightning_ptm.planning.boxes import Box
from lightning_ptm.runtime.pieces import within
from lightning_ptm.runtime.values import ShardedFlat
from lightning_ptm.update import Segment

_MANY_ROWS = 16
"""Fewer stretches are written faster than they are exchanged."""
_SHORT_NUMEL = 64 << 10
"""So are longer ones."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a part that a page holds whole; `start` is the place of their first element in the page."""

    parameter: str
    box: Box
    start: int
    rows: range

    def of(self, part: int) -> range:
        """Those that the rank with this part writes."""
        first, last = (self.rows.start + len(self.rows) * each // self.box.parts for each in (part, part + 1))
        return range(first, last)

    def numel(self, part: int) -> int:
        """What each rank sends to the one with this part."""
        return len(self.of(part)) * self.box.run_numel

    def sent_to(self, part: int, page: Tensor) -> Tensor:
        """That, of this rank's page."""
        start = self.start + (self.of(part).start - self.rows.start) * self.box.run_numel
        return page.narrow(0, start, self.numel(part))


def exchanged(box: Box | None) -> TypeGuard[Box]:
    """Whether whole rows of such a parameter are exchanged."""
    return box is not None and box.rows >= _MANY_ROWS and 0 < box.run_numel < _SHORT_NUMEL


def not_exchanged(segment: Segment, box: Box | None) -> Iterator[tuple[int, int]]:
    """What of a segment within a page no exchange has: (first element, its end), counted from the segment's start."""
    if not exchanged(box) or not (rows := box.full_rows(segment.parameter_start, segment.numel)):
        yield 0, segment.numel
        return
    for begin, end in (
        (0, rows.start * box.run_numel - segment.parameter_start),
        (rows.stop * box.run_numel - segment.parameter_start, segment.numel),
    ):
        if begin < end:
            yield begin, end


class RowExchange:
    """The exchanges of one save. Collective, among the ranks of a tensor group.

    Args:
        group: the ranks with the other parts, in the order of the parts.
        flats: all that this rank writes, in this order.
        page_numel: elements of a flat that are given to `rows_of` at once.

    Raises:
        InternalError: on all ranks of the group, if they would exchange other rows (I1).
    """

    def __init__(self, group: Communicator, flats: Iterable[ShardedFlat], page_numel: int) -> None:
        self._group = group
        pages = [
            (flat.paged.dtype, rows)
            for flat in flats
            if not group.alone
            for start in range(0, flat.paged.numel, page_numel)
            if (rows := self._rows_in(flat, start, min(flat.paged.numel, start + page_numel)))
        ]
        counts = group.exchange((len(pages), sum(each.numel(0) for _, rows in pages for each in rows), 0))
        if len(set(counts)) > 1:
            raise InternalError(
                f"the ranks of a tensor group would exchange other rows of a checkpoint: {counts}; save with "
                f"state_dict_type='full' and report this"
            )

        # State: the exchanges that are to come, the next one last; none once one has failed, or told of a failure.
        self._left = pages[::-1]

    def rows_of(self, flat: ShardedFlat, start: int, page: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Exchange what of a page of a flat is whole rows. Yields (parameter, first element in the whole, elements) of this
        rank's share of them.

        Raises:
            FailedElsewhere: another rank of the group has failed.
        """
        if not self._rows_in(flat, start, start + page.numel()):
            return
        _, rows = self._left[-1]
        received = self._exchange(page)
        mine, place = self._group.rank, 1
        for each in rows:
            numel, box = each.numel(mine), each.box
            whole = page.new_empty(len(each.of(mine)), box.parts, box.run_numel)
            for part, message in enumerate(received):
                column = each.sent_to(mine, page) if part == mine else message[place : place + numel]
                whole[:, part].copy_(column.view(-1, box.run_numel))
            yield each.parameter, each.of(mine).start * box.parts * box.run_numel, whole.view(-1)
            place += numel

    def give_up(self) -> None:
        """This rank has failed: the others of its group are told in the next exchange, if there is one."""
        if self._left:
            with contextlib.suppress(CheckpointError):
                self._exchange(None)

    def _exchange(self, page: Tensor | None) -> Sequence[Tensor]:
        """The next one: (1 + elements,) of each rank, what it has sent to this one behind an element for I2; nothing of this
        rank itself.

        Args:
            page: this rank's; None if it has failed.
        """
        left, self._left = self._left, []
        dtype, rows = left.pop()
        mine, parts = self._group.rank, range(self._group.world_size)
        sizes = [dtype.itemsize * (1 + sum(each.numel(part) for each in rows)) for part in parts]
        others = [part for part in parts if part != mine]
        if page is None:
            sent = torch.ones(sum(sizes[part] for part in others), dtype=torch.uint8)
        else:
            well = page.new_zeros(1)
            pieces = [piece for part in others for piece in (well, *(each.sent_to(part, page) for each in rows))]
            sent = torch.cat(pieces).view(torch.uint8)
        outgoing = [0 if part == mine else sizes[part] for part in parts]
        coming = [0 if part == mine else sizes[mine] for part in parts]
        received = self._group.all_to_all(sent, outgoing, coming).split(coming)
        failed = [part for part in others if received[part][0]]
        if failed:
            raise FailedElsewhere(f"the rank with part {failed[0]} of parameters could not write its own")
        if page is not None:
            self._left = left
        return [message.view(dtype) for message in received]

    @staticmethod
    def _rows_in(flat: ShardedFlat, start: int, stop: int) -> list[_Rows]:
        """What of elements [start, stop) of a flat is exchanged."""
        found = []
        for segment in within(flat.segments, start, stop):
            spec = flat.parameters[segment.parameter]
            if exchanged(spec.box):
                rows = spec.box.full_rows(segment.parameter_start, segment.numel)
                first = rows.start * spec.box.run_numel - segment.parameter_start
                if rows:
                    found.append(_Rows(spec.name, spec.box, segment.start - start + first, rows))
        return found
