"""Ranks agree on each collective before it is issued, so that ranks which use different units never hang.

Owns this rank's place in the sequence of agreements. Knows requests (an operation on a unit), never tensors.

Not every rank has a part in everything: a unit may be held by some ranks only, and ranks of a group meet to exchange tokens
(`Teams`). Those that have none still come to the rounds, so that the order is one for all.

Every rank brings its next request, or the boundary that it has reached, to a round; all ranks see the same proposals
and choose by the same pure rule (`choose`). A rank whose request was not chosen takes part in the chosen one with what
it has (its shard of a gather, zeros for a reduce) and proposes again.

I1: all ranks issue the same collectives in the same order.
I2: a gather goes before a meeting and a meeting before a reduce: a rank that still computes may bring gradients for the
    unit whose reduce waits.
I3: a rank leaves a boundary when no rank is before it, so a rank that skips a batch waits for the others. A boundary
    that every rank reaches is left by all of them in the same round, so what follows it may be collective.
I4: a rank meets when its whole group is at the same meeting. If none can come any more, all ranks raise.
A rank that fails brings nothing any more: the communicator ends the others' rounds (`Communicator.fail`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from lightning_ptm.errors import RankError
from lightning_ptm.terms import Operation

_CODES = {Operation.GATHER: 1, Operation.REDUCE: 2}
_OPERATIONS = {code: operation for operation, code in _CODES.items()}
_BOUNDARY = 0
_MEETING = 3

Row = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Teams:
    """Which ranks have a part in what, where not all have. Equal on all ranks.

    Attributes:
        groups: ranks that meet; each rank is in one at most.
        holders: by unit the ranks that hold it; a unit that is not named is everybody's.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    holders: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


NO_TEAMS = Teams()


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
class Meeting:
    """A point at which the ranks of a group exchange tokens: `place` tells which exchange of which layer, `number` which
    one of this rank's it is."""

    place: int
    number: int

    def row(self) -> Row:
        return (_MEETING, self.place, self.number)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a round chose. `unanimous`: every rank that holds the unit had asked for just that."""

    request: Request
    unanimous: bool
    flags: int


@dataclasses.dataclass(frozen=True, slots=True)
class Met:
    """A round in which groups meet: these ranks go on, the others propose again."""

    ranks: frozenset[int]


def choose(rows: Sequence[Row], teams: Teams = NO_TEAMS) -> Decision | Met | None:
    """The collective that all ranks issue next, or who meets, or None when every rank is at a boundary.

    Raises:
        RankError: some ranks wait for others to meet them, and these do not come. It is raised on all ranks.
    """
    gather = _decided(rows, teams, Operation.GATHER)
    if gather is not None:
        return gather
    met = frozenset(rank for group in teams.groups if _together(rows, group) for rank in group)
    if met:
        return Met(met)
    reduce = _decided(rows, teams, Operation.REDUCE)
    waiting = [rank for rank, row in enumerate(rows) if row[0] == _MEETING]
    if reduce is None and waiting:
        raise RankError(_deserted(rows, teams, waiting[0]))
    return reduce


def _decided(rows: Sequence[Row], teams: Teams, operation: Operation) -> Decision | None:
    asked = [row for row in rows if row[0] == _CODES[operation]]
    if not asked:
        return None
    unit = asked[0][1]
    same = [row for row in asked if row[1] == unit]
    flags = 0
    for row in same:
        flags |= row[2]
    holders = len(teams.holders.get(unit, rows))
    return Decision(Request(operation, unit, flags), unanimous=len(same) == holders, flags=flags)


def _together(rows: Sequence[Row], group: Sequence[int]) -> bool:
    first = rows[group[0]]
    return first[0] == _MEETING and all(rows[rank] == first for rank in group)


def _deserted(rows: Sequence[Row], teams: Teams, rank: int) -> str:
    group = next(group for group in teams.groups if rank in group)
    other = next(other for other in group if rows[other] != rows[rank])
    doing = (
        f"is at exchange {rows[other][2]}, which is another one or of another layer"
        if rows[other][0] == _MEETING
        else "has none before the end of its pass"
    )
    return (
        f"rank {rank} waits with exchange {rows[rank][2]} of tokens for its expert group of ranks {group[0]} to {group[-1]}, "
        f"and rank {other} {doing}, so they would wait for ever; with expert_parallel_size above 1 all ranks of a group "
        f"must call the same layers with experts in the same order, in as many batches"
    )


class Agreement:
    """Runs the rounds of one rank.

    Args:
        exchange: all-gathers this rank's row; returns the rows of all ranks by rank.
        participate: takes part in a collective that other ranks asked for and this one did not.
        rank: this one; asked for only where ranks meet.
    """

    def __init__(
        self,
        exchange: Callable[[Row], Sequence[Row]],
        participate: Callable[[Decision], None],
        rank: int = 0,
        teams: Teams = NO_TEAMS,
    ) -> None:
        self._exchange = exchange
        self._participate = participate
        self._rank = rank
        self._teams = teams

    def request(self, request: Request) -> Decision:
        """Returns when all ranks have agreed to issue `request` now; the caller issues it."""
        while True:
            decision = choose(self._exchange(request.row()), self._teams)
            if decision is None:  # cannot be: our own row is a request
                raise RankError(f"no rank proposed {request}; ranks run different versions of lightning_ptm")
            if isinstance(decision, Met):
                continue
            if (decision.request.operation, decision.request.unit) == (request.operation, request.unit):
                return decision
            self._participate(decision)

    def meet(self, meeting: Meeting) -> None:
        """Returns when all ranks of this one's group are here; what follows may be a collective of theirs.

        Raises:
            RankError: one of them cannot come any more.
        """
        while True:
            decision = choose(self._exchange(meeting.row()), self._teams)
            if isinstance(decision, Decision):
                self._participate(decision)
            elif decision is not None and self._rank in decision.ranks:
                return

    def reach(self, boundary: Boundary) -> int:
        """Returns when no rank is before `boundary`, having taken part in all that the others asked for meanwhile.

        Returns:
            All bits that are set in the flags of the boundaries at which the ranks are then.
        """
        while True:
            rows = self._exchange(boundary.row())
            decision = choose(rows, self._teams)
            if isinstance(decision, Met):
                continue
            if decision is not None:
                self._participate(decision)
            elif all(row[1] >= boundary.position for row in rows):
                flags = 0
                for row in rows:
                    flags |= row[2]
                return flags
