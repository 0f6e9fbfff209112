"""How ranks agree on the order of collectives: the rule by itself, and N ranks that follow it in N threads."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.comm import (
    DIFFERENT,
    OTHER_NUMBER,
    TOGETHER,
    UNLIKE,
    Agreement,
    Boundary,
    Gathering,
    Meeting,
    NeededCollective,
    RankTeams,
)
from lightning_ptm.comm.agreement import Decision, Met, Row, Stuck, choose
from lightning_ptm.errors import RankError
from lightning_ptm.terms import Operation

GATHER, REDUCE = Operation.GATHER, Operation.REDUCE
NOBODY_MEETS = RankTeams()
PATIENCE_S = 20.0
"""A rank that waits longer than this for the others is stuck: every round takes microseconds."""


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_all_ask_for_the_same() -> None:
    rows = [NeededCollective(GATHER, 3, 1).row(), NeededCollective(GATHER, 3, 2).row()]
    assert choose(rows) == Decision(NeededCollective(GATHER, 3, 3), unanimous=True, flags=3)


def test_a_gather_goes_before_a_reduce() -> None:
    rows = [NeededCollective(REDUCE, 0, 1).row(), Boundary(9).row(), NeededCollective(GATHER, 5).row()]
    assert choose(rows) == Decision(NeededCollective(GATHER, 5, 0), unanimous=False, flags=0)


def test_the_lowest_rank_goes_first() -> None:
    rows = [
        Boundary(1).row(),
        NeededCollective(REDUCE, 7).row(),
        NeededCollective(REDUCE, 2, 1).row(),
        NeededCollective(REDUCE, 7, 1).row(),
    ]
    assert choose(rows) == Decision(NeededCollective(REDUCE, 7, 1), unanimous=False, flags=1)


def test_reductions_wait_for_ranks_that_may_still_come_to_the_unit() -> None:
    ahead, behind = NeededCollective(REDUCE, 0).row(), NeededCollective(REDUCE, 4).row()
    assert choose([ahead, behind]) == Decision(NeededCollective(REDUCE, 4), unanimous=False, flags=0)
    assert choose([ahead, ahead]) == Decision(NeededCollective(REDUCE, 0), unanimous=True, flags=0)
    held = RankTeams(holders={1: (0, 2)})
    asked = [NeededCollective(REDUCE, unit).row() for unit in (1, 3, 1)]
    assert choose(asked, held) == Decision(NeededCollective(REDUCE, 1), unanimous=True, flags=0)


def test_nobody_asks() -> None:
    assert choose([Boundary(1).row(), Boundary(2).row()]) is None


TWO_GROUPS = RankTeams(groups=((0, 1), (2, 3)), holders={5: (0, 2), 6: (1, 3)})


def test_who_holds_a_unit_is_unanimous_without_the_others() -> None:
    rows = [
        NeededCollective(REDUCE, 5).row(),
        Meeting(1, 1).row(),
        NeededCollective(REDUCE, 5).row(),
        NeededCollective(REDUCE, 6).row(),
    ]
    assert choose(rows, TWO_GROUPS) == Decision(NeededCollective(REDUCE, 5), unanimous=True, flags=0)
    rows[2] = Boundary(9).row()
    rows[3] = Boundary(9).row()
    assert choose(rows, TWO_GROUPS) == Decision(NeededCollective(REDUCE, 5), unanimous=False, flags=0)


def test_a_group_meets_when_it_is_complete() -> None:
    met, early = Meeting(1, 7).row(), Meeting(0, 6).row()
    assert choose([met, met, early, NeededCollective(REDUCE, 6).row()], TWO_GROUPS) == Met(frozenset({0, 1}))
    assert choose([met, met, met, met], TWO_GROUPS) == Met(frozenset(range(4)))
    assert choose([met, met, early, NeededCollective(GATHER, 6).row()], TWO_GROUPS) == Decision(
        NeededCollective(GATHER, 6), False, 0
    )


@pytest.mark.parametrize("other", [Boundary(3).row(), Meeting(1, 8).row(), Meeting(2, 7).row()])
def test_a_rank_that_nobody_can_meet_any_more_is_an_error_of_all(other: Row) -> None:
    with pytest.raises(RankError, match=r"rank 2 waits in exchange 7 .* ranks 2, 3, and rank 3 (is at|has no further)"):
        choose([Boundary(3).row(), Boundary(3).row(), Meeting(1, 7).row(), other], TWO_GROUPS)


PAIR, OTHERS, ALL = Gathering(1, 2).row(), Gathering(2, 2).row(), Gathering(3, 4, flag=2).row()


def test_ranks_gather_when_all_of_them_are_there() -> None:
    early, end, gather = Boundary(3).row(), Boundary(TOGETHER, 8).row(), NeededCollective(GATHER, 5).row()
    assert choose([PAIR, OTHERS, PAIR, OTHERS]) == Met(frozenset(range(4)))
    assert choose([PAIR, early, PAIR, NeededCollective(REDUCE, 5).row()]) == Met(frozenset({0, 2}))
    assert choose([PAIR, end, PAIR, gather]) == Decision(NeededCollective(GATHER, 5, 0), unanimous=False, flags=0)
    assert choose([ALL, ALL, ALL, NeededCollective(REDUCE, 5).row()]) == Decision(
        NeededCollective(REDUCE, 5, 0), False, 0
    )
    assert choose([ALL, ALL, ALL, ALL]) == Met(frozenset(range(4)))


@pytest.mark.parametrize("place", [3, 10])
def test_who_gathers_does_not_hold_others_at_a_boundary_of_an_iteration(place: int) -> None:
    assert choose([ALL, Boundary(3).row(), PAIR, Boundary(place).row()]) is None


@pytest.mark.parametrize("other", [PAIR, OTHERS, Boundary(TOGETHER, 8).row()])
def test_nobody_could_go_on(other: Row) -> None:
    assert choose([ALL, ALL, ALL, other]) == Stuck()


rows_of_ranks = st.lists(
    st.one_of(
        st.builds(NeededCollective, st.sampled_from([GATHER, REDUCE]), st.integers(0, 3), st.integers(0, 1)),
        st.builds(Boundary, st.integers(0, 3), st.integers(0, 1)),
    ).map(lambda proposal: proposal.row()),
    min_size=1,
    max_size=5,
)


@given(rows_of_ranks)
def test_what_is_chosen_was_asked_for(rows: list[Row]) -> None:
    decision = choose(rows)
    assert not isinstance(decision, Met | Stuck)
    asked = [row for row in rows if row[0] != Boundary(0).row()[0]]
    assert (decision is None) == (not asked)
    if decision is None:
        return
    same = [row for row in rows if row[:2] == decision.request.row()[:2]]
    assert same
    assert decision.unanimous == (len(same) == len(rows))
    assert bool(decision.flags) == any(row[2] for row in same)
    if any(row[0] == NeededCollective(GATHER, 0).row()[0] for row in rows):
        assert decision.request.operation is GATHER


# -- ranks in threads -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Micro:
    """Requests of one rank in one iteration; a rank that `skips` has no backward pass and so no boundary after it."""

    requests: tuple[NeededCollective | Meeting | Gathering, ...]
    skips: bool
    flag: int


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a rank does together with the others. `own`: it had asked for it itself."""

    what: str
    own: bool
    unanimous: bool = True


class Table:
    """The ranks' exchange, in memory: each brings a row, all get all rows."""

    def __init__(self, ranks: int) -> None:
        self._rows: list[Row] = [Boundary(0).row()] * ranks
        self._seen: tuple[Row, ...] = ()
        self._barrier = threading.Barrier(ranks, action=self._show, timeout=PATIENCE_S)

    def exchange(self, rank: int, row: Row) -> Sequence[Row]:
        self._rows[rank] = row
        self._barrier.wait()
        return self._seen  # the next round begins only when this rank has come back with its next row

    def give_up(self) -> None:
        self._barrier.abort()

    def _show(self) -> None:
        self._seen = tuple(self._rows)


class Rank:
    """One rank that goes through its script in a thread of its own."""

    def __init__(self, rank: int, script: Sequence[Micro], table: Table, teams: RankTeams) -> None:
        self.events: list[Event] = []
        self.granted: list[NeededCollective | Meeting | Gathering] = []
        self.flags: list[int] = []
        self.error: BaseException | None = None
        self._script = script
        self._table = table
        self._agreement = Agreement(lambda row: table.exchange(rank, row), self._take_part, rank, teams)
        self.thread = threading.Thread(target=self._run, name=f"rank-{rank}")

    def _take_part(self, decision: Decision) -> None:
        self._note(decision, own=False)

    def _note(self, decision: Decision, *, own: bool) -> None:
        request = decision.request
        self.events.append(Event(f"{request.operation.value} {request.unit} {request.flag}", own, decision.unanimous))

    def _run(self) -> None:
        try:
            for number, micro in enumerate(self._script):
                self.flags.append(self._agreement.reach(Boundary(10 * number, micro.flag)))
                self.events.append(Event(f"iteration {number}", own=True))
                for request in micro.requests:
                    if isinstance(request, Meeting):
                        self._agreement.meet(request)
                        self.granted.append(request)
                        continue
                    if isinstance(request, Gathering):
                        assert self._agreement.gather(request) is None
                        self.granted.append(request)
                        continue
                    decision = self._agreement.request(request)
                    self.granted.append(dataclasses.replace(decision.request, flag=request.flag))
                    self._note(decision, own=True)
                if not micro.skips:
                    self._agreement.reach(Boundary(10 * number + 1))
            self._agreement.reach(Boundary(10 * len(self._script)))
        except BaseException as error:
            self.error = error
            self._table.give_up()


def run_scripts(scripts: Sequence[Sequence[Micro]], teams: RankTeams = NOBODY_MEETS) -> list[Rank]:
    table = Table(len(scripts))
    ranks = [Rank(rank, script, table, teams) for rank, script in enumerate(scripts)]
    for rank in ranks:
        rank.thread.start()
    for rank in ranks:
        rank.thread.join(2 * PATIENCE_S)
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    return ranks


requests = st.builds(NeededCollective, st.sampled_from([GATHER, REDUCE]), st.integers(0, 3), st.integers(0, 1))
micros = st.builds(Micro, st.lists(requests, max_size=5).map(tuple), st.booleans(), st.integers(0, 3))


@st.composite
def scripts_of_ranks(draw: st.DrawFn) -> list[list[Micro]]:
    """2 to 4 ranks, the same number of iterations on all of them, and whatever requests in each."""
    iterations = draw(st.integers(1, 3))
    script = st.lists(micros, min_size=iterations, max_size=iterations)
    return draw(st.lists(script, min_size=2, max_size=4))


@settings(max_examples=150, deadline=None)
@given(scripts_of_ranks())
def test_all_ranks_do_the_same_in_the_same_order(scripts: list[list[Micro]]) -> None:
    ranks = run_scripts(scripts)
    for rank, script in zip(ranks, scripts, strict=True):
        # Everything that a rank asked for was granted, in its own order, and each in its turn on all ranks.
        assert rank.granted == [request for micro in script for request in micro.requests]
        assert [event.what for event in rank.events] == [event.what for event in ranks[0].events]
        assert [event.unanimous for event in rank.events] == [event.unanimous for event in ranks[0].events]
        # A boundary that all ranks reach is left by all at once: they know of each other's flags.
        assert rank.flags == ranks[0].flags
    for turn in zip(*(rank.events for rank in ranks), strict=True):
        assert any(event.own for event in turn)
        assert turn[0].unanimous == all(event.own for event in turn)
    for number, flags in enumerate(ranks[0].flags):
        expected = 0
        for script in scripts:
            expected |= script[number].flag
        assert flags == expected


@st.composite
def scripts_with_meetings(draw: st.DrawFn) -> list[list[Micro]]:
    """4 ranks in two groups: whatever requests in between, and the same meetings for the members of a group."""
    iterations = draw(st.integers(1, 2))
    scripts: list[list[Micro]] = [[] for _ in range(4)]
    for group in TWO_GROUPS.groups:
        number = 0
        for _ in range(iterations):
            meetings = draw(st.integers(0, 3))
            for rank in group:
                steps: list[NeededCollective | Meeting | Gathering] = []
                for meeting in range(meetings):
                    steps += draw(st.lists(requests, max_size=2))
                    steps.append(Meeting(meeting % 2, number + meeting))
                steps += draw(st.lists(requests, max_size=2))
                scripts[rank].append(Micro(tuple(steps), draw(st.booleans()), 0))
            number += meetings
    return scripts


@settings(max_examples=150, deadline=None)
@given(scripts_with_meetings())
def test_groups_meet_between_collectives_of_all(scripts: list[list[Micro]]) -> None:
    ranks = run_scripts(scripts, TWO_GROUPS)
    for rank, script in zip(ranks, scripts, strict=True):
        assert rank.granted == [request for micro in script for request in micro.requests]
        assert [event.what for event in rank.events] == [event.what for event in ranks[0].events]


@st.composite
def scripts_with_gatherings(draw: st.DrawFn) -> list[list[Micro]]:
    """2 to 4 ranks that issue collectives of some or all of them, in one order, and whatever requests in between."""
    ranks, scripts = draw(st.integers(2, 4)), []
    members = st.sets(st.integers(0, ranks - 1), min_size=2).map(sorted)
    for _ in range(draw(st.integers(1, 2))):
        steps: list[list[NeededCollective | Meeting | Gathering]] = [[] for _ in range(ranks)]
        for group in draw(st.lists(members, max_size=5)):
            for rank in group:
                steps[rank] += draw(st.lists(requests, max_size=2))
                steps[rank].append(Gathering(sum(1 << each for each in group), len(group)))
        scripts.append([Micro(tuple(each), draw(st.booleans()), 0) for each in steps])
    return [list(script) for script in zip(*scripts, strict=True)]


@settings(max_examples=150, deadline=None)
@given(scripts_with_gatherings())
def test_some_ranks_gather_between_collectives_of_all(scripts: list[list[Micro]]) -> None:
    ranks = run_scripts(scripts)
    for rank, script in zip(ranks, scripts, strict=True):
        assert rank.granted == [request for micro in script for request in micro.requests]
        assert [event.what for event in rank.events] == [event.what for event in ranks[0].events]


class AtOnce:
    """Ranks that each do one thing, in threads of their own; what they return or raise, by rank."""

    def __init__(self, *acts: Callable[[Agreement], object]) -> None:
        table = Table(len(acts))
        self.results: list[object] = [None] * len(acts)

        def run(rank: int) -> None:
            agreement = Agreement(
                lambda row: table.exchange(rank, row), lambda _: None, explain=lambda text: f"told {text}"
            )
            try:
                self.results[rank] = acts[rank](agreement)
            except RankError as error:
                self.results[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(acts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)


def test_ranks_that_wait_for_each_other_are_told_where_the_others_are() -> None:
    ran = AtOnce(
        lambda agreement: agreement.gather(Gathering(1, 3, flag=2)),
        lambda agreement: agreement.gather(Gathering(1, 3, flag=2)),
        lambda agreement: agreement.reach(Boundary(TOGETHER, 8)),
    )
    assert ran.results == [10, 10, 10 | DIFFERENT]


def test_ranks_that_come_together_for_different_things_are_told() -> None:
    ran = AtOnce(*(lambda agreement, deed=deed: agreement.reach(Boundary(TOGETHER + deed, 8)) for deed in (5, 9, 5)))
    assert ran.results == [8 | DIFFERENT] * 3
    ran = AtOnce(*(lambda agreement: agreement.reach(Boundary(TOGETHER + 5, 8)) for _ in range(3)))
    assert ran.results == [8] * 3


@pytest.mark.parametrize(
    ("done", "told"),
    [((7, 7, 5), 0), ((7, 8, 5), UNLIKE), ((7, 7 << 15, 5), UNLIKE)],
    ids=["alike", "by one bit", "high"],
)
def test_ranks_that_have_to_have_done_the_same_are_told_where_they_have_not(done: tuple[int, ...], told: int) -> None:
    """I7. The third rank is in no tensor group."""

    def reaches(rank: int) -> Callable[[Agreement], object]:
        def act(agreement: Agreement) -> object:
            agreement.compare([(0, 1)], [(0, 1)], lambda: done[rank])
            return agreement.reach(Boundary(TOGETHER, 8))

        return act

    assert AtOnce(*map(reaches, range(3))).results == [8 | told] * 3


NUMBERS = [1e-9, 0.003, 0.01, 0.7, 1.0, 2.5, 11.0, 4e4]


@pytest.mark.parametrize("number", [*NUMBERS, *(-each for each in NUMBERS), 0.0, math.inf, math.nan])
def test_numbers_are_alike_but_for_rounding(number: float) -> None:
    """I7. Nobody is told of what another order of sums makes, and all are told of more, but for one in 64."""

    def told(other: float) -> int:
        def reaches(own: float) -> Callable[[Agreement], object]:
            def act(agreement: Agreement) -> object:
                agreement.compare([(0, 1)], [(0, 1)], lambda: 0)
                agreement.compare_number(own)
                return agreement.reach(Boundary(TOGETHER, 8))

            return act

        return AtOnce(*map(reaches, (number, other))).results[0] & ~8

    assert told(number * (1 + 1e-6)) == 0 and told(number * (1 - 4e-4)) == 0
    others = [number * factor + shift for factor in (1.01, 0.9, 2.0) for shift in (0.003, -0.01)]
    assert not math.isfinite(number) or [told(each) for each in others].count(OTHER_NUMBER) >= 5


@pytest.mark.parametrize("rows", [[Boundary(1).row()], [Gathering(1, 2).row()]], ids=["at a boundary", "stuck"])
def test_a_round_without_this_ranks_request_is_of_another_version(rows: list[Row]) -> None:
    agreement = Agreement(lambda row: rows, lambda decision: None)
    with pytest.raises(RankError, match="different versions of lightning_ptm"):
        agreement.request(NeededCollective(GATHER, 1))


def test_what_one_rank_gives_up_all_give_up() -> None:
    def leaves(agreement: Agreement) -> None:
        agreement.reach(Boundary(3))
        agreement.give_up("mine")

    ran = AtOnce(
        leaves, lambda agreement: agreement.gather(Gathering(1, 2)), lambda agreement: agreement.reach(Boundary(5))
    )
    assert ran.results == ["told mine", "told ", "told "]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_the_same_script_are_unanimous(world_size: int) -> None:
    script = [
        Micro(
            (
                NeededCollective(GATHER, 1),
                NeededCollective(GATHER, 2),
                NeededCollective(REDUCE, 2),
                NeededCollective(REDUCE, 1),
            ),
            False,
            0,
        )
    ] * 2
    for rank in run_scripts([script] * world_size):
        assert all(event.own and event.unanimous for event in rank.events)


def test_a_rank_that_skips_waits_at_the_next_boundary() -> None:
    busy = [Micro((NeededCollective(GATHER, 1), NeededCollective(REDUCE, 1)), False, 0), Micro((), False, 0)]
    idle = [Micro((), True, 0), Micro((), True, 0)]
    ranks = run_scripts([busy, idle])
    assert [event.what for event in ranks[1].events] == ["iteration 0", "gather 1 0", "reduce 1 0", "iteration 1"]
    assert [event.own for event in ranks[1].events] == [True, False, False, True]
