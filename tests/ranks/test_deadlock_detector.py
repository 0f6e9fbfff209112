"""Who waits for long finds out whether the others can still come; who is only slow is waited for."""

from __future__ import annotations

import datetime

import pytest

from lightning_ptm.comm.deadlock_detector import OF_A_BATCH, DeadlockDetector, explained
from lightning_ptm.errors import RankError


class Board(dict[str, str]):
    """Stands for the store of the process group."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value


class Collective:
    """Stands for one that ends when it was waited for in vain so many times."""

    def __init__(self, board: Board, misses: int = 0, error: str = "") -> None:
        self.board, self.misses, self.error = board, misses, error

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if timeout is not None and self.misses:
            self.misses -= 1
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return not self.misses


@pytest.fixture
def board() -> Board:
    return Board()


def two_ranks(board: Board) -> tuple[DeadlockDetector, DeadlockDetector]:
    ranks = DeadlockDetector(board, "run", 0), DeadlockDetector(board, "run", 1)
    for each, told in zip(ranks, (["a", "b"], ["a", "c"]), strict=True):
        each.exchanged = lambda told=told: (0, told)  # type: ignore[misc]
    return ranks


def test_a_rank_that_waits_for_this_one_elsewhere_is_found_and_what_it_did(board: Board) -> None:
    ours, theirs = two_ranks(board)
    theirs.in_round(Collective(board, misses=2), (0, 1))
    with pytest.raises(RankError, match=r"rank 0 waits for rank 1 .* elsewhere: rank 0 has come to b .* to c;"):
        ours.in_exchange(Collective(board, misses=9), (0, 1))


def test_who_does_not_wait_for_long_tells_nothing(board: Board) -> None:
    ours, _ = two_ranks(board)
    ours.in_round(Collective(board), (0, 1))
    ours.in_exchange(Collective(board), (0, 1))
    assert not board


@pytest.mark.parametrize(("rounds", "exchanges"), [(1, 0), (2, 1), (3, 0)])
def test_a_rank_that_may_still_come_is_waited_for(board: Board, rounds: int, exchanges: int) -> None:
    """The rank is waited for if it waited in a round that is over, has been in this exchange, or its state is
    unknown."""
    ours, theirs = two_ranks(board)
    for _ in range(exchanges):
        theirs.in_exchange(Collective(board), (0, 1))
    for number in range(rounds):
        theirs.in_round(Collective(board, misses=2 * (number == rounds - 1)), (0, 1))
    ours.in_round(Collective(board), (0, 1))
    slow = Collective(board, misses=3)
    ours.in_exchange(slow, (0, 1))
    assert not slow.misses


def test_what_a_collective_fails_with_is_raised(board: Board) -> None:
    ours, _ = two_ranks(board)
    for wait in (ours.in_round, ours.in_exchange):
        with pytest.raises(RuntimeError, match="connection closed"):
            wait(Collective(board, error="connection closed"), (0, 1))


def test_a_reason_is_explained_by_the_first_difference_of_a_group() -> None:
    told = {0: (0, ["a", "b"]), 1: (0, ["a", "b"]), 2: (1, ["c"]), 3: (1, ["c", "d"])}
    assert explained("stuck", told).startswith("stuck: rank 2 has come to no exchange where rank 3 has come to d; call")
    assert explained("stuck", dict(list(told.items())[:3])) == "stuck"


def test_different_batches_are_told_in_the_place_of_a_reason() -> None:
    ours, theirs = OF_A_BATCH + "3: 17", OF_A_BATCH + "3: 18"
    text = explained("stuck", {0: (0, ["a", ours, "b"]), 1: (0, ["a", theirs, "b"])})
    assert "stuck" not in text and f"rank 0 has come to {ours} where rank 1 has come to {theirs}; give these" in text
    assert explained("stuck", {0: (0, ["a", ours]), 1: (0, ["a"])}).startswith("stuck: ")


def test_a_stage_whose_hidden_states_never_come_is_found(board: Board) -> None:
    """The other rank waits for this one in a round, and has sent fewer hidden states than this one needs."""
    ours, theirs = two_ranks(board)
    theirs.sends((0,))
    theirs.in_round(Collective(board, misses=2), (0, 1))
    ours.in_receive(Collective(board), 1)
    with pytest.raises(
        RankError, match="rank 0 waits for rank 1 for its hidden states, and rank 1 waits for rank 0 else"
    ):
        ours.in_receive(Collective(board, misses=9), 1)


def test_hidden_states_on_their_way_are_waited_for(board: Board) -> None:
    ours, theirs = two_ranks(board)
    theirs.sends((0,))
    theirs.in_round(Collective(board, misses=2), (0, 1))
    slow = Collective(board, misses=3)
    ours.in_receive(slow, 1)
    assert not slow.misses


def test_ranks_that_wait_for_each_other_in_turn_are_found(board: Board) -> None:
    """Stage 1 of rank 0 waits for stage 0 of rank 1, whose round waits for rank 2, which waits for rank 0."""
    ranks = [DeadlockDetector(board, "run", rank) for rank in range(3)]
    ranks[1].in_round(Collective(board, misses=2), (1, 2))
    ranks[2].in_round(Collective(board, misses=2), (0, 1, 2))
    with pytest.raises(
        RankError, match="rank 0 waits for rank 1 and rank 2, one for the other, and the last one for it"
    ):
        ranks[0].in_receive(Collective(board, misses=9), 1)
    ranks[2].in_round(Collective(board), (1, 2))  # it has come to the round of rank 1 since, and posts that
    ranks[2].in_round(Collective(board, misses=2), (0, 1, 2))
    ranks[0].in_receive(Collective(board, misses=1), 1)
