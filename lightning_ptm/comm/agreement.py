"""Agreement between ranks on each collective before it is issued, so that ranks that use different units never hang.

Owns this rank's position in the sequence of rounds. Knows requests (an operation on a unit), never tensors.

Not every rank takes part in every collective: a unit may be held by some ranks only, and ranks of an expert group
exchange tokens among themselves (`RankTeams`). Ranks without a part still join every round, so that there is one order
for all.

In a round, every rank submits its next request, or the boundary that it has reached. All ranks see the same rows and
choose by the same pure function (`choose`). A rank whose request was not chosen takes part in the chosen collective
with what it has (its shard for an all-gather, zeros for a reduction) and submits its request again.

I1: all ranks issue the same collectives in the same order.
I2: an all-gather goes before a meeting, and a meeting before a reduction: a rank that still computes may have more
    gradients for the unit whose reduction waits. Of several reductions, one that all holders of its unit ask for goes
    first, else that of the last unit: a unit that is reduced before a holder has come to it is reduced twice.
I3: a rank leaves a boundary when no rank is before it, so a rank that skips a batch waits for the others. If all ranks
    reach one boundary, all leave it in the same round, so what follows may be collective.
I4: a rank leaves a meeting when its whole group is at the same meeting. If a member can no longer come, all ranks
    raise.
I5: a rank leaves a gathering in the round in which all of its ranks are there. If they can never be, that round reports
    it to its ranks, and to the ranks that wait at a boundary for all others.
I6: if one rank gives up, all ranks raise in the next round that they join, each with the state of all ranks.
I7: ranks that must have done the same (`compared`), and have not, are informed when they leave a boundary together.

Within a pipeline schedule, rounds are those of a stage's ranks alone (`Agreement.among`): ranks of other stages may wait
for hidden states of these, and would not come to a round.
I8: within `among`, no rank asks for a unit that all ranks hold.

A rank that fails joins no more rounds: the communicator ends the rounds of the other ranks (`Communicator.fail`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from lightning_ptm.errors import InternalError, RankError
from lightning_ptm.terms import Operation

_CODES = {Operation.GATHER: 1, Operation.REDUCE: 2}
_BOUNDARY = 0
_MEETING = 3
_GATHERING = 4
_GIVEN_UP = 5

TOGETHER = 1 << 62
"""Least position of boundaries that a rank leaves only when all ranks are at such a boundary."""

DIFFERENT = 1 << 61
"""Flag in the result of `reach`: the ranks are at different boundaries of those at `TOGETHER` or above."""

UNLIKE = 1 << 60
"""Flag in the result of `reach`: ranks that must have done the same have not."""

OTHER_NUMBER = 1 << 59
"""Flag in the result of `reach`: ranks that must have computed the same number (their loss) have not."""

_WORD = 1 << 16
"""Divides the third number of a boundary's row: flags are below it, the word for what the rank has done above it."""

_CELLS = 1 << 48
"""Divides the third number of a boundary's row: the two grid cells of the rank's number are above it."""

_CELL_BITS = 7
_STEP = 1e-3
"""Relative tolerance for numbers above a hundredth: numbers that differ by no more share a cell of one of two grids.

The cells are twice as wide.
"""

Row = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class RankTeams:
    """The ranks that take part in collectives of less than all ranks. Equal on all ranks.

    Attributes:
        groups: groups of ranks that meet; each rank is in one at most.
        holders: by unit, the ranks that hold it; all ranks hold a unit that is not named.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    holders: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


NO_TEAMS = RankTeams()


@dataclasses.dataclass(frozen=True, slots=True)
class NeededCollective:
    """A collective that this rank needs next.

    All ranks receive `flag` (bit 0: some parameter of the unit got no gradient on this rank).
    """

    operation: Operation
    unit: int
    flag: int = 0

    def row(self) -> Row:
        return (_CODES[self.operation], self.unit, self.flag)


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """A point that all ranks reach in the same order: the end of a micro-batch's backward, an optimizer step.

    All ranks that leave in the same round receive `flag`.
    """

    position: int
    flag: int = 0

    def row(self) -> Row:
        return (_BOUNDARY, self.position, self.flag)


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """A point at which the ranks of a group exchange tokens.

    `place` identifies the exchange and its layer, `number` counts this rank's exchanges.
    """

    place: int
    number: int

    def row(self) -> Row:
        return (_MEETING, self.place, self.number)


@dataclasses.dataclass(frozen=True, slots=True)
class Gathering:
    """A point at which some ranks wait for each other before a collective that torch or the user issues.

    Attributes:
        number: identifies the collective and its ranks, below 2**40.
        size: number of these ranks.
        flag: received by ranks that leave a boundary meanwhile.
    """

    number: int
    size: int
    flag: int = 0

    def row(self) -> Row:
        return (_GATHERING, self.number << 20 | self.size, self.flag)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The collective that a round chose. `unanimous`: every rank that holds the unit had asked for it."""

    request: NeededCollective
    unanimous: bool
    flags: int


@dataclasses.dataclass(frozen=True, slots=True)
class Met:
    """The result of a round in which groups meet: `ranks` go on, the others submit again."""

    ranks: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Stuck:
    """The result of a round after which no rank can go on: the ranks wait for each other."""


def choose(rows: Sequence[Row], teams: RankTeams = NO_TEAMS) -> Decision | Met | Stuck | None:
    """Returns the collective that all ranks issue next, or the ranks that meet, or None if a rank can leave a boundary.

    Raises:
        RankError: some ranks wait for others to meet them, and these do not come. It is raised on all ranks.
    """
    here = {row[0] for row in rows}
    if _CODES[Operation.GATHER] in here:
        return _decide(rows, teams, Operation.GATHER)
    met: set[int] = set()
    if _MEETING in here:
        met.update(rank for group in teams.groups if _at_same_meeting(rows, group) for rank in group)
    if _GATHERING in here:
        met.update(rank for rank, row in enumerate(rows) if row[0] == _GATHERING and rows.count(row) == _size(row))
    if met:
        return Met(frozenset(met))
    if _CODES[Operation.REDUCE] in here:
        return _decide(rows, teams, Operation.REDUCE)
    if _MEETING in here:
        waiting = next(rank for rank, row in enumerate(rows) if row[0] == _MEETING)
        raise RankError(_missing_at_meeting(rows, teams, waiting))
    return Stuck() if _GATHERING in here and not any(_leaves(row, rows) for row in rows) else None


def _size(gathering: Row) -> int:
    return gathering[1] & ((1 << 20) - 1)


def _leaves(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the rank of `row` leaves its boundary, because no rank is before it.

    Ranks at a gathering may have passed any boundary except those of all ranks together.
    """
    together = row[1] >= TOGETHER
    return row[0] == _BOUNDARY and all(
        other[1] >= min(row[1], TOGETHER) if other[0] == _BOUNDARY else other[0] == _GATHERING and not together
        for other in rows
    )


def _decide(rows: Sequence[Row], teams: RankTeams, operation: Operation) -> Decision:
    """Returns the decision on an operation that some rank asks for."""
    code = _CODES[operation]
    asked = [row[1] for row in rows if row[0] == code]

    def all_ask(unit: int) -> bool:
        return asked.count(unit) == len(teams.holders.get(unit, rows))

    # A rank that asks to reduce a unit with a lower number is ahead in its backward: the others may still come there.
    unit = asked[0] if operation is Operation.GATHER else max(asked, key=lambda each: (all_ask(each), each))
    flags = 0
    for row in rows:
        if row[:2] == (code, unit):
            flags |= row[2]
    return Decision(NeededCollective(operation, unit, flags), unanimous=all_ask(unit), flags=flags)


def _at_same_meeting(rows: Sequence[Row], group: Sequence[int]) -> bool:
    first = rows[group[0]]
    return first[0] == _MEETING and all(rows[rank] == first for rank in group)


def _missing_at_meeting(rows: Sequence[Row], teams: RankTeams, rank: int) -> str:
    group = next(group for group in teams.groups if rank in group)
    other = next(other for other in group if rows[other] != rows[rank])
    doing = (
        f"is at exchange {rows[other][2]}, which is another one or of another layer"
        if rows[other][0] == _MEETING
        else "has no further exchange in this forward or backward"
    )
    return (
        f"rank {rank} waits in exchange {rows[rank][2]} of tokens for its expert group of ranks "
        f"{', '.join(map(str, group))}, and rank {other} {doing}, so they would wait forever; with expert_parallel_size "
        f"above 1, call the same layers with experts in the same order, in as many batches, on all ranks of a group"
    )


class Agreement:
    """One rank's part in the rounds in which ranks agree on collectives.

    Args:
        exchange: all-gathers this rank's row; returns the rows of all ranks, by rank.
        participate: takes part in a collective that other ranks asked for and this one did not.
        rank: this rank; used only at meetings and gatherings.
        teams: the ranks that take part in collectives of less than all ranks.
        explain: all-gathers the reason of a rank that gives up (else "") and each rank's position; returns one text.
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
        self._common_units: Collection[int] = ()
        self.same_work: Sequence[Sequence[int]] = ()
        """Groups of ranks that must have done the same when they leave a boundary together. Equal on all ranks."""
        self.same_loss: Sequence[Sequence[int]] = ()
        """Groups of ranks that must have the same number then, except for rounding. Equal on all ranks."""
        self.work_word: Callable[[], int] = lambda: 0
        """Returns a word of 32 bits for what this rank has done."""
        self.compared_number: float = 0.0
        """This rank's number."""

    @contextmanager
    def among(
        self, exchange: Callable[[Row], Sequence[Row]], ranks: Sequence[int], common_units: Collection[int]
    ) -> Iterator[None]:
        """Context in which rounds are of some ranks alone, all of which are in it.

        Args:
            exchange: all-gathers this rank's row; returns the rows of these ranks, in their order.
            ranks: these ranks, this one among them.
            common_units: units that other ranks hold, too (I8).
        """
        kept = self._exchange, self._rank, self._teams, self.same_work, self.same_loss, self._common_units
        place = {rank: index for index, rank in enumerate(ranks)}

        def inside(groups: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
            return [[place[rank] for rank in group] for group in groups if group[0] in place]

        self._exchange, self._rank, self._teams = exchange, place[self._rank], NO_TEAMS
        self.same_work, self.same_loss = inside(self.same_work), inside(self.same_loss)
        self._common_units = common_units
        try:
            yield
        finally:
            self._exchange, self._rank, self._teams, self.same_work, self.same_loss, self._common_units = kept

    def compare(
        self, same_work: Sequence[Sequence[int]], same_loss: Sequence[Sequence[int]], work_word: Callable[[], int]
    ) -> None:
        """Makes the ranks of each of these groups compare their words, or numbers, from now on, when they leave a
        boundary together."""
        self.same_work, self.same_loss, self.work_word = same_work, same_loss, work_word

    def compare_number(self, number: float) -> None:
        """Sets this rank's number for the next boundary; it must be equal within a group, except for rounding."""
        self.compared_number = number

    def request(self, request: NeededCollective) -> Decision:
        """Returns when all ranks have agreed to issue `request` now; the caller issues it."""
        if request.unit in self._common_units:
            raise InternalError(
                f"{request.operation.value} of unit {request.unit}, of all ranks, within a pipeline schedule"
            )
        while True:
            decision = choose(self._round(request.row()), self._teams)
            if decision is None or isinstance(decision, Stuck):  # impossible: this rank's row is a request
                raise RankError(
                    f"ranks disagree about the next collective (here: {request.operation.value} of unit "
                    f"{request.unit}), so they would wait forever; this happens if they run different versions of "
                    "lightning_ptm: install the same version on all machines"
                )
            if isinstance(decision, Met):
                continue
            if (decision.request.operation, decision.request.unit) == (request.operation, request.unit):
                return decision
            self._participate(decision)

    def meet(self, meeting: Meeting) -> None:
        """Returns when all ranks of this rank's group have come; the caller may issue a collective of the group next.

        Raises:
            RankError: one of them can no longer come.
        """
        while True:
            decision = choose(self._round(meeting.row()), self._teams)
            if isinstance(decision, Decision):
                self._participate(decision)
            elif isinstance(decision, Met) and self._rank in decision.ranks:
                return

    def gather(self, gathering: Gathering) -> int | None:
        """Waits for all ranks of a gathering, which may then issue their collective.

        Returns:
            None if all of its ranks have come; if they never can, all bits set in the flags of all ranks' rows.
        """
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
        """Returns when no rank is before `boundary`, after taking part in collectives that other ranks asked for.

        Returns:
            All bits set in the flags of all ranks' rows at that time, with `DIFFERENT`, `UNLIKE` and `OTHER_NUMBER`.
        """
        kind, position, flag = boundary.row()
        ours = (kind, position, flag + _WORD * self.work_word() + _CELLS * cells(self.compared_number))
        while True:
            rows = self._round(ours)
            decision = choose(rows, self._teams)
            if isinstance(decision, Decision):
                self._participate(decision)
            elif isinstance(decision, Stuck) or (decision is None and _leaves(ours, rows)):
                different = ours[1] >= TOGETHER and any(row[:2] != ours[:2] for row in rows)
                return _flags(rows) | DIFFERENT * different | self._differences(rows)

    def _differences(self, rows: Sequence[Row]) -> int:
        """Returns `UNLIKE` and `OTHER_NUMBER`: whether ranks at one boundary have not done the same (I7)."""
        unlike = any(one % _CELLS // _WORD != other % _CELLS // _WORD for one, other in _together(rows, self.same_work))
        differ = any(
            not _may_be_equal(one // _CELLS, other // _CELLS) for one, other in _together(rows, self.same_loss)
        )
        return UNLIKE * unlike | OTHER_NUMBER * differ

    def give_up(self, reason: str) -> NoReturn:
        """Makes all ranks raise RankError in their next round, because some ranks would wait for each other forever."""
        self._exchange((_GIVEN_UP, 0, 0))
        raise RankError(self._explain(reason))

    def _round(self, row: Row) -> Sequence[Row]:
        rows = self._exchange(row)
        for each in rows:
            if each[0] == _GIVEN_UP:
                raise RankError(self._explain(""))
        return rows


def cells(number: float) -> int:
    """Returns the cells of a number in two grids, as one integer.

    Ranks that compute a number with another order of summation share a cell of one of the grids. Cells have few bits,
    so a number that is far off is missed once in 64 times.
    """
    place = math.floor(math.copysign(math.log1p(abs(number) * 100), number) / _STEP) if math.isfinite(number) else -1
    cell, other, most = place // 2, (place + 1) // 2, 1 << _CELL_BITS
    return cell % most | other % most << _CELL_BITS


def _may_be_equal(one: int, another: int) -> bool:
    """Whether two numbers share a cell of one of the grids, and so may be the same."""
    differ = one ^ another
    return not differ % (1 << _CELL_BITS) or not differ >> _CELL_BITS


def _together(rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yields the words above the flags of ranks that are at one boundary: of the first of a group, and of each other."""
    for ranks in groups:
        firsts: dict[int, int] = {}
        for kind, position, flag in (rows[rank] for rank in ranks):
            if kind == _BOUNDARY:
                yield firsts.setdefault(position, flag), flag


def _flags(rows: Sequence[Row]) -> int:
    flags = 0
    for row in rows:
        flags |= row[2] % _WORD
    return flags
