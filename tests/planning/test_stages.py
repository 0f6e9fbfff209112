"""The division of blocks among stages against every division, and replays against formulas and by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.schedules import actions
from lightning_ptm.planning.stages import StageCost, StageReplay, divide, replay


def every_division(count: int, stages: int) -> list[list[range]]:
    """Returns all divisions of `count` blocks among `stages`."""
    return [
        [range(first, end) for first, end in itertools.pairwise((0, *cuts, count))]
        for cuts in itertools.combinations(range(1, count), stages - 1)
    ]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=9), st.data())
def test_the_slowest_stage_is_as_fast_as_it_can_be_and_the_others_are_alike(
    seconds: list[float], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    exact = list(map(Fraction, seconds))

    def cost(division: list[range]) -> tuple[Fraction, Fraction]:
        sums = [sum((exact[block] for block in of), Fraction()) for of in division]
        return max(sums), sum((each**2 for each in sums), Fraction())

    found = divide(seconds, stages)
    assert [block for of in found for block in of] == list(range(len(seconds)))
    assert len(found) == stages and all(found)
    assert cost(found) == min(map(cost, every_division(len(seconds), stages)))


def test_equal_blocks_are_divided_evenly() -> None:
    assert sorted(map(len, divide([0.1] * 10, 4))) == [2, 2, 3, 3]
    assert set(map(len, divide([0.3] * 96, 32))) == {3}


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 blocks for 4 pipeline stages, .* use at most pipeline_parallel_size=3"):
        divide([1.0] * 3, 4)


def step(kind: str, stages: int, micro_batches: int, cost: StageCost, chunks: int = 1) -> StageReplay:
    orders = [actions(kind, stages, stage, micro_batches, chunks) for stage in range(stages)]
    return replay(orders, [cost] * (stages * chunks))


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_the_bubble_of_equal_stages_is_that_of_the_papers(
    kind: str, stages: int, micro_batches: int, forward: int, backward: int
) -> None:
    if kind == "1f1b":
        micro_batches = max(micro_batches, stages)
    found = step(kind, stages, micro_batches, StageCost(forward, backward))
    assert found.step_s == (micro_batches + stages - 1) * (forward + backward)
    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_interleaving_shortens_the_bubble_by_the_number_of_chunks() -> None:
    whole = step("1f1b", 4, 8, StageCost(2, 4))
    found = step("interleaved", 4, 8, StageCost(1, 2), chunks=2)
    idle = whole.step_s - whole.busy_s[0]
    assert found.busy_s == whole.busy_s
    assert found.step_s - found.busy_s[0] == pytest.approx(idle / 2)


def test_sends_of_two_stages() -> None:
    # Stage 1 waits for the first hidden states (0 to 1 s it has nothing, 1 to 1.5 s they are sent); stage 0 for the last
    # gradient. The second hidden states arrive while stage 1 computes.
    found = step("gpipe", 2, 2, StageCost(1, 1, 0.5))
    assert found.step_s == 1 + 0.5 + 2 + 2 + 0.5 + 1
    assert found.send_s == (1.0, 1.0)
    assert found.exposed_s == (0.5, 0.5)
    assert found.hidden_s == 1.0


def test_sends_that_take_longer_than_the_compute_are_exposed() -> None:
    fast, slow = (step("1f1b", 4, 8, StageCost(1, 1, send_s)) for send_s in (0.1, 3.0))
    assert fast.exposed_s < fast.send_s and fast.hidden_s > 0
    assert slow.step_s > 3.0 * 8
    assert sum(slow.exposed_s) > 0.5 * sum(slow.send_s)


def test_one_stage_hands_on_what_its_chunks_compute_without_sending() -> None:
    found = step("breadth_first", 1, 4, StageCost(1, 2, 5.0), chunks=3)
    assert found == StageReplay(4 * 3 * 3, (36.0,), (12,), (0.0,), (0.0,))
