"""Ranks agree on each collective before it is issued, so that ranks which use different units never hang.

Owns this rank's place in the sequence of agreements. Knows requests (an operation on a unit), never tensors.

Not every rank has a part in everything: a unit may be held by some ranks only, and ranks of a group meet to exchange tokens
(`RankTeams`). Those that have none still come to the rounds, so that the order is one for all.

Every rank brings its next request, or the boundary that it has reached, to a round; all ranks see the same proposals
and choose by the same pure rule (`choose`). A rank whose request was not chosen takes part in the chosen one with what
it has (its shard of a gather, zeros for a reduce) and proposes again.

I1: all ranks issue the same collectives in the same order.
I2: a gather goes before a meeting and a meeting before a reduce: a rank that still computes may bring gradients for the
    unit whose reduce waits.
I3: a rank leaves a boundary when no rank is before it, so a rank that skips a batch waits for the others. A boundary
    that every rank reaches is left by all of them in the same round, so what follows it may be collective.
I4: a rank meets when its whole group is at the same meeting. If none can come any more, all ranks raise.
I5: a gathering is left in the round in which all its ranks are there. If they never can be, its ranks are told in that very
    round, and so are those that wait for all others to be at a boundary.
I6: what one rank gives up, all give up in the next round that they bring anything to, each with what all of them did.
I7: ranks that have to have done the same (`alike`), and have not, are told where they leave a boundary together.
A rank that fails brings nothing any more: the communicator ends the others' rounds (`Communicator.fail`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from lightning_ptm.errors import RankError
from lightning_ptm.terms import Operation

_CODES = {Operation.GATHER: 1, Operation.REDUCE: 2}
_BOUNDARY = 0
_MEETING = 3
_GATHERING = 4
_GIVEN_UP = 5

TOGETHER = 1 << 62
"""From here on are positions of boundaries that a rank leaves only when all ranks are at one of these."""

DIFFERENT = 1 << 61
"""Flag in what `reach` returns: the ranks came together at different ones."""

UNLIKE = 1 << 60
"""Flag in what `reach` returns: ranks that have to have done the same have not."""

OTHER_NUMBER = 1 << 59
"""Flag in what `reach` returns: ranks that have to have the same number (their loss) have not."""

_WORD = 1 << 16
"""Flags are below; above, a boundary's row has the word for what its rank has done."""

_CELLS = 1 << 48
"""From here on, a boundary's row has the two cells of its rank's number."""

_CELL_BITS = 7
_STEP = 1e-3
"""Relative, of numbers above a hundredth. Those that differ by no more share a cell of one of two grids, whose cells are
twice as wide."""

Row = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class RankTeams:
    """Which ranks have a part in what, where not all have. Equal on all ranks.

    Attributes:
        groups: ranks that meet; each rank is in one at most.
        holders: by unit the ranks that hold it; a unit that is not named is everybody's.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    holders: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


NO_TEAMS = RankTeams()


@dataclasses.dataclass(frozen=True, slots=True)
class NeededCollective:
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
class Gathering:
    """A point at which some ranks come together for a collective that is none of ours.

    Attributes:
        number: tells which collective of which ranks, below 2**40.
        size: how many ranks these are.
        flag: reaches ranks that leave a boundary meanwhile.
    """

    number: int
    size: int
    flag: int = 0

    def row(self) -> Row:
        return (_GATHERING, self.number << 20 | self.size, self.flag)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a round chose. `unanimous`: every rank that holds the unit had asked for just that."""

    request: NeededCollective
    unanimous: bool
    flags: int


@dataclasses.dataclass(frozen=True, slots=True)
class Met:
    """A round in which groups meet: these ranks go on, the others propose again."""

    ranks: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Stuck:
    """A round after which nobody could go on: some ranks wait for others, and these wait, too."""


def choose(rows: Sequence[Row], teams: RankTeams = NO_TEAMS) -> Decision | Met | Stuck | None:
    """The collective that all ranks issue next, or who meets, or None when some rank can leave a boundary.

    Raises:
        RankError: some ranks wait for others to meet them, and these do not come. It is raised on all ranks.
    """
    here = {row[0] for row in rows}
    if _CODES[Operation.GATHER] in here:
        return _decided(rows, teams, Operation.GATHER)
    met: set[int] = set()
    if _MEETING in here:
        met.update(rank for group in teams.groups if _together(rows, group) for rank in group)
    if _GATHERING in here:
        met.update(rank for rank, row in enumerate(rows) if row[0] == _GATHERING and rows.count(row) == _size(row))
    if met:
        return Met(frozenset(met))
    if _CODES[Operation.REDUCE] in here:
        return _decided(rows, teams, Operation.REDUCE)
    if _MEETING in here:
        waiting = next(rank for rank, row in enumerate(rows) if row[0] == _MEETING)
        raise RankError(_deserted(rows, teams, waiting))
    return Stuck() if _GATHERING in here and not any(_leaves(row, rows) for row in rows) else None


def _size(gathering: Row) -> int:
    return gathering[1] & ((1 << 20) - 1)


def _leaves(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a rank at this boundary leaves it: no rank is before it. Who is at a gathering may have passed any boundary but
    those of all ranks together."""
    together = row[1] >= TOGETHER
    return row[0] == _BOUNDARY and all(
        other[1] >= min(row[1], TOGETHER) if other[0] == _BOUNDARY else other[0] == _GATHERING and not together
        for other in rows
    )


def _decided(rows: Sequence[Row], teams: RankTeams, operation: Operation) -> Decision:
    """Of an operation that some rank asks for."""
    code = _CODES[operation]
    asked = [row for row in rows if row[0] == code]
    unit = asked[0][1]
    same = [row for row in asked if row[1] == unit]
    flags = 0
    for row in same:
        flags |= row[2]
    holders = len(teams.holders.get(unit, rows))
    return Decision(NeededCollective(operation, unit, flags), unanimous=len(same) == holders, flags=flags)


def _together(rows: Sequence[Row], group: Sequence[int]) -> bool:
    first = rows[group[0]]
    return first[0] == _MEETING and all(rows[rank] == first for rank in group)


def _deserted(rows: Sequence[Row], teams: RankTeams, rank: int) -> str:
    group = next(group for group in teams.groups if rank in group)
    other = next(other for other in group if rows[other] != rows[rank])
    doing = (
        f"is at exchange {rows[other][2]}, which is another one or of another layer"
        if rows[other][0] == _MEETING
        else "has none before the end of its pass"
    )
    return (
        f"rank {rank} waits with exchange {rows[rank][2]} of tokens for its expert group of ranks "
        f"{', '.join(map(str, group))}, "
        f"and rank {other} {doing}, so they would wait for ever; with expert_parallel_size above 1 all ranks of a group "
        f"must call the same layers with experts in the same order, in as many batches"
    )


class Agreement:
    """Runs the rounds of one rank.

    Args:
        exchange: all-gathers this rank's row; returns the rows of all ranks by rank.
        participate: takes part in a collective that other ranks asked for and this one did not.
        rank: this one; asked for only where ranks meet.
        explain: all-gathers what a rank that gave up says (else ""), and where each is; makes one text of it.
    """

    def __init__(
        self,
        exchange: Callable[[Row], Sequence[Row]],
        participate: Callable[[Decision], None],
        rank: int = 0,
        teams: RankTeams = NO_TEAMS,
        explain: Callable[[str], str] = str,
    ) -> None:
        self._exchange = exchange
        self._participate = participate
        self._rank = rank
        self._teams = teams
        self._explain = explain
        self.alike: Sequence[Sequence[int]] = ()
        """Ranks that have to have done the same where they leave a boundary together. Equal on all ranks."""
        self.done: Callable[[], int] = lambda: 0
        """A word of 32 bits for what this rank has done."""
        self.number: float = 0.0
        """That ranks which have to have done the same have to have, too, but for rounding."""

    def compare(self, alike: Sequence[Sequence[int]], done: Callable[[], int]) -> None:
        """From now on these ranks have to have done the same, which is what `done` says."""
        self.alike, self.done = alike, done

    def compare_number(self, number: float) -> None:
        """Ranks that have to have done the same have to have this one at their next boundary, but for rounding."""
        self.number = number

    def request(self, request: NeededCollective) -> Decision:
        """Returns when all ranks have agreed to issue `request` now; the caller issues it."""
        while True:
            decision = choose(self._round(request.row()), self._teams)
            if decision is None or isinstance(decision, Stuck):  # cannot be: our own row is a request
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
            decision = choose(self._round(meeting.row()), self._teams)
            if isinstance(decision, Decision):
                self._participate(decision)
            elif isinstance(decision, Met) and self._rank in decision.ranks:
                return

    def gather(self, gathering: Gathering) -> int | None:
        """Returns when all ranks of a gathering are here, and None; what follows may be a collective of theirs. If they can
        never be: all bits that are set in the flags of where the ranks are instead."""
        while True:
            rows = self._round(gathering.row())
            decision = choose(rows, self._teams)
            if isinstance(decision, Decision):
                self._participate(decision)
            elif isinstance(decision, Met) and self._rank in decision.ranks:
                return None
            elif isinstance(decision, Stuck):
                return _flags(rows)

    def reach(self, boundary: Boundary) -> int:
        """Returns when no rank is before `boundary`, having taken part in all that the others asked for meanwhile.

        Returns:
            All bits that are set in the flags of the places at which the ranks are then, `DIFFERENT`, `UNLIKE` and
            `OTHER_NUMBER`.
        """
        kind, position, flag = boundary.row()
        ours = (kind, position, flag + _WORD * self.done() + _CELLS * cells(self.number))
        while True:
            rows = self._round(ours)
            decision = choose(rows, self._teams)
            if isinstance(decision, Decision):
                self._participate(decision)
            elif isinstance(decision, Stuck) or (decision is None and _leaves(ours, rows)):
                different = ours[1] >= TOGETHER and any(row[:2] != ours[:2] for row in rows)
                return _flags(rows) | DIFFERENT * different | self._unlike(rows)

    def _unlike(self, rows: Sequence[Row]) -> int:
        """`UNLIKE`, `OTHER_NUMBER`: whether ranks that are at one boundary have not done the same (I7)."""
        found = 0
        for ranks in self.alike:
            here = {rows[rank][1]: rows[rank][2] // _WORD for rank in ranks if rows[rank][0] == _BOUNDARY}
            for rank in ranks:
                kind, position, flag = rows[rank]
                if kind != _BOUNDARY:
                    continue
                number, word = divmod(flag // _WORD, _CELLS // _WORD)
                first_number, first_word = divmod(here[position], _CELLS // _WORD)
                found |= UNLIKE * (word != first_word) | OTHER_NUMBER * (not _share(number, first_number))
        return found

    def give_up(self, reason: str) -> NoReturn:
        """This rank and others would wait for each other for ever: all ranks raise, when they come to their next round."""
        self._exchange((_GIVEN_UP, 0, 0))
        raise RankError(self._explain(reason))

    def _round(self, row: Row) -> Sequence[Row]:
        rows = self._exchange(row)
        for each in rows:
            if each[0] == _GIVEN_UP:
                raise RankError(self._explain(""))
        return rows


def cells(number: float) -> int:
    """Where a number lies in two grids: ranks that compute it in another order of sums share a cell of one of them. Cells
    have few bits, so one that is far off is missed once in 64 times."""
    place = math.floor(math.copysign(math.log1p(abs(number) * 100), number) / _STEP) if math.isfinite(number) else -1
    cell, other, most = place // 2, (place + 1) // 2, 1 << _CELL_BITS
    return cell % most | other % most << _CELL_BITS


def _share(one: int, another: int) -> bool:
    """Whether numbers in these cells may be the same."""
    differ = one ^ another
    return not differ % (1 << _CELL_BITS) or not differ >> _CELL_BITS


def _flags(rows: Sequence[Row]) -> int:
    flags = 0
    for row in rows:
        flags |= row[2] % _WORD
    return flags
