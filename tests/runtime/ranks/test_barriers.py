"""Meeting points of one of two ranks: what happens where the other one is there, elsewhere, or at something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from lightning_ptm.comm import Gathering, RankTeams
from lightning_ptm.comm.agreement import TOGETHER, Decision, NeededCollective, Row
from lightning_ptm.comm.deadlock_detector import NOTHING, Exchanged
from lightning_ptm.errors import RankError
from lightning_ptm.runtime.ranks.barriers import BarrierReason, Barriers
from lightning_ptm.terms import Operation


class Other:
    """The communicator of the first of two ranks. The other one brings the same to each round, but for what `brings` says."""

    rank, world_size, alone = 0, 2, False

    def __init__(self) -> None:
        self.rounds_before: list[int] = []
        """Rounds done before each other collective."""
        self.brings: list[Row] = []
        """To the next rounds."""
        self.rounds: list[Row] = []
        self.failures: list[str] = []
        self.done: int | None = None
        """The word for what it has done, if that is another one."""

    def exchange(self, row: Row) -> list[Row]:
        self.rounds.append(row)
        kind, place, flag = self.brings.pop(0) if self.brings else row
        if self.done is not None and kind == 0:
            flag = flag % (1 << 16) + (self.done << 16)
        return [row, (kind, place, flag)]

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        self.rounds_before.append(len(self.rounds))
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value if source == 0 else ("", "is elsewhere", NOTHING, {})

    def exchanged(self) -> Exchanged:
        return NOTHING

    def fail(self, reason: str) -> None:
        self.failures.append(reason)


class Rank:
    """A rank's barriers, and the collectives of others that it took part in."""

    def __init__(self) -> None:
        self.other = Other()
        self.took_part: list[Decision] = []
        communicator: Any = self.other
        self.barriers = Barriers(communicator, self.took_part.append, RankTeams())


def together_at(what: int) -> Row:
    """A boundary of all ranks, with these flags."""
    return (0, TOGETHER + 1, what)


MEETINGS = {
    "another number of batches": (
        BarrierReason.END_OF_EPOCH,
        BarrierReason.TRAINING_STEP,
        "rank 0 has ended its training epoch and another rank begins a training step: they got different "
        r"numbers of training batches; give all of them as many",
    ),
    "and the other way round": (
        BarrierReason.TRAINING_BATCH,
        BarrierReason.END_OF_EPOCH,
        "rank 0 goes on to another training batch and another rank has ended its training epoch: they got different",
    ),
    "a save of one rank": (
        BarrierReason.TRAINING_STEP,
        BarrierReason.USER_CALL,
        "another rank reads, edits or saves weights, so they would wait .* save_checkpoint and gathered need all ranks",
    ),
    "a collective of one rank": (
        BarrierReason.END_OF_RUN,
        BarrierReason.COLLECTIVE,
        "rank 0 has come to the end of the run and another rank is in a collective .* call collectives and step optimizers",
    ),
    "the same in another way": (
        BarrierReason.USER_CALL,
        BarrierReason.USER_CALL,
        "rank 0 reads, edits or saves weights in another way than another rank, so their collectives would "
        "not match; save_checkpoint and gathered need",
    ),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_ranks_that_come_together_for_different_things_all_stop(case: str) -> None:
    ours, theirs, says = MEETINGS[case]
    it = Rank()
    it.other.brings = [together_at(theirs)]
    with pytest.raises(RankError, match=says) as caught:
        it.barriers.meet(ours)
    assert "[rank 0 " in str(caught.value) and "rank 1 is elsewhere]" in str(caught.value)  # I1
    assert it.barriers.failed and it.other.failures == [str(caught.value)]
    before = len(it.other.rounds)
    it.barriers.meet(ours)  # I2
    assert len(it.other.rounds) == before


def test_ranks_that_come_together_for_the_same_thing_go_on_with_the_flags_of_both() -> None:
    it = Rank()
    for what in BarrierReason:
        it.barriers.meet(what, "deed")
    assert not it.barriers.failed and len({row[1] for row in it.other.rounds}) == 1
    it.other.brings = [(0, it.other.rounds[0][1], BarrierReason.TRAINING_STEP | 256)]
    assert it.barriers.come_together(BarrierReason.TRAINING_STEP, "deed", flags=1) == BarrierReason.TRAINING_STEP | 257


def test_a_rank_waits_at_a_point_for_one_that_is_before_it_and_takes_part_in_what_that_needs() -> None:
    it = Rank()
    it.barriers.iteration_begins()
    it.barriers.reach(3)
    place = it.other.rounds[0][1]
    it.other.brings = [NeededCollective(Operation.GATHER, 7).row(), (0, place - 1, 0)]
    it.barriers.reach(3)
    assert [each.request.unit for each in it.took_part] == [7] and len(it.other.rounds) == 4


def test_ranks_meet_before_they_tell_each_other_whether_all_has_gone_well() -> None:
    """Others may still gather what they need of this one for it."""
    it = Rank()
    with it.barriers.errors_on_all_ranks():
        assert it.other.rounds == []
    assert it.other.rounds_before == [1]


def test_points_are_ordered_by_iterations_since_ranks_were_together() -> None:
    it = Rank()
    for _ in range(2):
        it.barriers.iteration_begins()
        it.barriers.reach(5)
    it.barriers.meet(BarrierReason.USER_CALL)
    it.barriers.iteration_begins()
    it.barriers.reach(5)
    first, second, _, again = (row[1] for row in it.other.rounds)
    assert first < second and again == first < TOGETHER


def test_an_optimizer_step_beside_something_else_stops_all() -> None:
    it = Rank()
    it.barriers.reach_step(5)
    it.other.brings = [together_at(BarrierReason.END_OF_RUN)]
    with pytest.raises(
        RankError, match="rank 0 is in an optimizer step and another rank has come to the end of the run"
    ):
        it.barriers.reach_step(5)


def test_collectives_that_are_not_ours_meet_or_stop_all() -> None:
    it = Rank()
    it.barriers.gather_for(Gathering(1, 2))
    it.other.brings = [Gathering(2, 2, BarrierReason.COLLECTIVE).row()]
    with pytest.raises(
        RankError, match=r"rank 0 is in a collective .* and another rank is in another one, or in one with other"
    ):
        it.barriers.gather_for(Gathering(1, 2))
    with pytest.raises(RankError, match="this run has failed, so other ranks may never come to a collective"):
        it.barriers.gather_for(Gathering(1, 2))  # I2


POINTS: dict[str, Callable[[Rank], Any]] = {
    "the end of a pass": lambda rank: rank.barriers.reach(1),
    "a step": lambda rank: rank.barriers.reach_step(5),
    "the next training step": lambda rank: rank.barriers.meet(BarrierReason.TRAINING_STEP),
}


@pytest.mark.parametrize("point", POINTS)
def test_ranks_of_a_group_that_have_not_exchanged_the_same_stop_where_they_wait_for_each_other(point: str) -> None:
    """I3. The other one is at the same point."""
    stops, goes_on = Rank(), Rank()
    for rank, theirs in ((stops, 7), (goes_on, 8)):
        rank.barriers.compare([(0, 1)], [(0, 1)], lambda: 8)
        rank.other.done = theirs
    with pytest.raises(RankError, match="have not exchanged the same"):
        POINTS[point](stops)
    assert stops.barriers.failed
    POINTS[point](goes_on)
    assert not goes_on.barriers.failed


def test_what_ranks_elsewhere_have_exchanged_is_not_compared() -> None:
    """One that is behind has more of the same pass to come, and ranks of other groups exchange other things."""
    rank = Rank()
    rank.barriers.compare([(0,), (1,)], [(0,), (1,)], lambda: 3)
    rank.other.brings = [(0, 1, 9 << 16)]
    assert rank.barriers.reach(1) == 0
    rank.barriers.compare([(0, 1)], [(0, 1)], lambda: 3)
    rank.other.brings = [(0, 1, 9 << 16), (0, 2, 3 << 16)]
    assert rank.barriers.reach(2, 1) == 1  # flags are what they were
    assert [row[1] for row in rank.other.rounds] == [1, 2, 2]
