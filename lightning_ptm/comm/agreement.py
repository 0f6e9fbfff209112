"""Ranks agree on each collective before it is issued, so that ranks which use different units never hang.

Owns this rank's place in the sequence of agreements. Knows requests (an operation on a unit), never tensors.

Every rank brings its next request, or the boundary that it has reached, to a round; all ranks see the same proposals
and choose by the same pure rule (`choose`). A rank whose request was not chosen takes part in the chosen one with what
it has (its shard of a gather, zeros for a reduce) and proposes again.

I1: all ranks issue the same collectives in the same order.
I2: a gather goes before a reduce: a rank that still computes may bring gradients for the unit whose reduce waits.
I3: a rank leaves a boundary when no rank is before it, so a rank that skips a batch waits for the others. A boundary
    that every rank reaches is left by all of them in the same round, so what follows it may be collective.
A rank that fails brings nothing any more: the communicator ends the others' rounds (`Communicator.fail`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lightning_ptm.errors import RankError
from lightning_ptm.terms import Operation

_CODES = {Operation.GATHER: 1, Operation.REDUCE: 2}
_OPERATIONS = {code: operation for operation, code in _CODES.items()}
_BOUNDARY = 0

Row = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A collective that this rank needs next. `flag` rides along and reaches all ranks (bit 0: some parameter of the
    unit got no gradient here)."""

    operation: Operation
    unit: int
    flag: int = 0

    def row(self) -> Row:
        return (_CODES[self.operation], self.unit, self.flag)


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """A point that all ranks reach in the same order: the end of a micro-batch's backward, an optimizer step. `flag`
    rides along and reaches all ranks that leave in the same round."""

    position: int
    flag: int = 0

    def row(self) -> Row:
        return (_BOUNDARY, self.position, self.flag)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a round chose. `unanimous`: every rank had asked for just that."""

    request: Request
    unanimous: bool
    flags: int


def choose(rows: Sequence[Row]) -> Decision | None:
    """The collective that all ranks issue next, or None when every rank is at a boundary."""
    for code in (_CODES[Operation.GATHER], _CODES[Operation.REDUCE]):
        asked = [row for row in rows if row[0] == code]
        if asked:
            unit = asked[0][1]
            same = [row for row in asked if row[1] == unit]
            flags = 0
            for row in same:
                flags |= row[2]
            request = Request(_OPERATIONS[code], unit, flags)
            return Decision(request, unanimous=len(same) == len(rows), flags=flags)
    return None


class Agreement:
    """Runs the rounds of one rank.

    Args:
        exchange: all-gathers this rank's row; returns the rows of all ranks by rank.
        participate: takes part in a collective that other ranks asked for and this one did not.
    """

    def __init__(self, exchange: Callable[[Row], Sequence[Row]], participate: Callable[[Decision], None]) -> None:
        self._exchange = exchange
        self._participate = participate

    def request(self, request: Request) -> Decision:
        """Returns when all ranks have agreed to issue `request` now; the caller issues it."""
        while True:
            decision = choose(self._exchange(request.row()))
            if decision is None:  # cannot be: our own row is a request
                raise RankError(f"no rank proposed {request}; ranks run different versions of lightning_ptm")
            if (decision.request.operation, decision.request.unit) == (request.operation, request.unit):
                return decision
            self._participate(decision)

    def reach(self, boundary: Boundary) -> int:
        """Returns when no rank is before `boundary`, having taken part in all that the others asked for meanwhile.

        Returns:
            All bits that are set in the flags of the boundaries at which the ranks are then.
        """
        while True:
            rows = self._exchange(boundary.row())
            decision = choose(rows)
            if decision is not None:
                self._participate(decision)
            elif all(row[1] >= boundary.position for row in rows):
                flags = 0
                for row in rows:
                    flags |= row[2]
                return flags
