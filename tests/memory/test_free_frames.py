from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.paged_tensor import PagePool
from lightning_ptm.terms import Tier

FRAMES = 24


def pool_of(frames: int) -> PagePool:
    return PagePool(Tier.HOST, frames, 65536)


def test_run_is_the_first_that_fits() -> None:
    pool = pool_of(10)
    pool.take_run(10)
    pool.give_back([1, 4, 5, 8, 9])
    assert list(pool.take_run(2)) == [4, 5]
    assert list(pool.take_run(1)) == [1]


def test_take_collects_scattered_frames() -> None:
    pool = pool_of(10)
    pool.take(10)
    pool.give_back([7, 1, 3])
    assert list(pool.take(3)) == [1, 3, 7]
    assert pool.free_frames == 0


def test_neighbours_given_back_join_into_one_run() -> None:
    pool = pool_of(6)
    pool.take(6)
    pool.give_back([1])
    pool.give_back([3])
    pool.give_back([2])
    assert pool.longest_run() == 3


def test_too_many_pages_names_who_how_much_and_what_to_raise() -> None:
    pool = pool_of(4)
    pool.take(1)
    with pytest.raises(CapacityError) as caught:
        pool.take(9, name="layers.3 master states")
    for word in ("layers.3 master states", "9 pages (576 KiB)", "3 of 4", "host_memory"):
        assert word in str(caught.value)
    assert pool.free_frames == 3


@pytest.mark.parametrize(
    ("tier", "setting"),
    [(Tier.DEVICE, "device_memory"), (Tier.HOST, "host_memory"), (Tier.DISK, "disk_memory")],
)
def test_each_tier_names_its_own_setting(tier: Tier, setting: str) -> None:
    with pytest.raises(CapacityError, match=setting):
        PagePool(tier, 1, 65536).take(2)


def test_no_run_long_enough_says_how_long_the_longest_is() -> None:
    pool = pool_of(5)
    pool.take(5)
    pool.give_back([0, 2, 3])
    with pytest.raises(CapacityError, match="2 of them side by side"):
        pool.take_run(3)
    assert pool.free_frames == 3


@pytest.mark.parametrize("frames", [[3], [0, 3], [1, 1], [99], [-1]])
def test_giving_back_what_is_not_used_changes_nothing(frames: list[int]) -> None:
    pool = pool_of(5)
    pool.take(3)
    with pytest.raises(InternalError):
        pool.give_back(frames)
    assert (pool.free_frames, pool.used_frames) == (2, 3)
    assert list(pool.take(2)) == [3, 4]


def test_taking_used_frames_by_number_changes_nothing() -> None:
    pool = pool_of(5)
    pool.take(2)
    with pytest.raises(InternalError):
        pool.take_at(1, 2)
    assert pool.free_frames == 3


class PoolAgainstASet(RuleBasedStateMachine):
    """A pool is compared with the plain set of its free frames."""

    frames = Bundle("frames")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(FRAMES)
        self.free = set(range(FRAMES))

    @rule(target=frames, count=st.integers(0, FRAMES), as_run=st.booleans())
    def take(self, count: int, as_run: bool) -> object:
        try:
            taken = list(self.pool.take_run(count) if as_run else self.pool.take(count))
        except CapacityError:
            if as_run:
                runs = [set(range(first, first + count)) for first in range(FRAMES - count + 1)]
                assert not any(run <= self.free for run in runs)
            else:
                assert count > len(self.free)
            return multiple()
        assert len(taken) == len(set(taken)) == count
        assert set(taken) <= self.free, "a frame was handed out twice"
        if as_run and taken:
            assert taken == list(range(taken[0], taken[0] + count))
        self.free -= set(taken)
        return multiple(*taken)

    @rule(some=st.lists(consumes(frames), max_size=6))
    def give_back(self, some: list[int]) -> None:
        self.pool.give_back(some)
        self.free |= set(some)

    @rule(frame=st.integers(0, FRAMES - 1), count=st.integers(1, 5))
    def run_at(self, frame: int, count: int) -> None:
        assert self.pool.has_run_at(frame, count) == (set(range(frame, frame + count)) <= self.free)

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.pool.free_frames == len(self.free)
        assert self.pool.free_frames + self.pool.used_frames == self.pool.total_frames

    def teardown(self) -> None:
        self.pool.give_back(set(range(FRAMES)) - self.free)
        assert list(self.pool.take_run(FRAMES)) == list(range(FRAMES))


PoolAgainstASet.TestCase.settings = settings(max_examples=50, deadline=None)
TestPoolAgainstASet = PoolAgainstASet.TestCase
