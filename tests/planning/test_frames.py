"""Frames of lifetimes: never shared, never above the limit, and found where a search over all orders finds them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.planning import frames as module_under_test
from lightning_ptm.planning.frames import FrameBlock, place_blocks
from lightning_ptm.planning.placement_data import PassingPool
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import sequential_trace
from lightning_ptm.terms import Kind, Operation

from .models import PAGE, even_layout
from .test_placement import pages, placed
from .test_schedule import ON_DISK, ON_HOST


def load(blocks: Sequence[FrameBlock]) -> int:
    """The most pages at any instant."""
    instants = [block.first for block in blocks]
    return max(sum(each.pages for each in blocks if each.first <= at <= each.last) for at in instants)


lifetimes = st.builds(lambda first, length, count: (first, first + length, count), *3 * (st.integers(0, 9),))


@settings(max_examples=200, deadline=None)
@given(st.lists(lifetimes, min_size=1, max_size=12), st.integers(0, 4), st.booleans())
def test_blocks_that_overlap_share_no_frame(found: list[tuple[int, int, int]], spare: int, many: bool) -> None:
    limit = load([FrameBlock(*each, 0) for each in found]) + spare
    blocks = [FrameBlock(*each, limit) for each in found]
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr(module_under_test, "MANY", 0)
        frames = place_blocks(blocks, 3000)
        assert frames == place_blocks(blocks, 3000)
    placed_ = [(block, frame) for block, frame in zip(blocks, frames, strict=True) if frame is not None and block.pages]
    assert all(frame >= 0 and frame + block.pages <= limit for block, frame in placed_)
    for (one, at), (other, there) in itertools.combinations(placed_, 2):
        if one.first <= other.last and other.first <= one.last:
            assert at + one.pages <= there or there + other.pages <= at


def test_a_limit_of_its_own_holds_a_block_low() -> None:
    """As where a tick leaves less memory than the others."""
    blocks = [FrameBlock(0, 9, 4, 10), FrameBlock(0, 3, 4, 10), FrameBlock(5, 9, 4, 10), FrameBlock(3, 5, 2, 2)]
    frames = place_blocks(blocks)
    assert frames[3] == 0 and None not in frames


def test_the_lowest_blocks_are_first_in_their_order() -> None:
    blocks = [FrameBlock(0, 9, 2, 9), FrameBlock(2, 5, 6, 9), FrameBlock(0, 9, 1, 9), FrameBlock(6, 9, 3, 9)]
    assert place_blocks(blocks)[1] == 0
    assert place_blocks(blocks, lowest=[2, 0])[:3] == (1, 3, 0)
    assert place_blocks([*blocks, FrameBlock(0, 9, 9, 1)], lowest=[4])[4] is None


def test_very_many_blocks_are_placed_in_the_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each overlaps the one before; the first has the lowest frames from before its first instant on."""
    monkeypatch.setattr(module_under_test, "MANY", 1000)
    blocks = [FrameBlock(5, 9000, 2, 8), *(FrameBlock(at, at + 1, 3, 8) for at in range(2000))]
    frames = place_blocks(blocks, lowest=[0])
    assert frames[0] == 0 and None not in frames
    assert place_blocks([*blocks, FrameBlock(0, 9, 9, 1)], lowest=[2001])[2001] is None
    assert all({one, other} == {2, 5} for one, other in itertools.pairwise(frames[1:]))


def test_what_has_no_room_has_no_frame() -> None:
    assert place_blocks([FrameBlock(0, 3, 4, 4), FrameBlock(2, 5, 1, 4)]) in ((0, None), (None, 0))
    assert place_blocks([FrameBlock(0, 3, 5, 4), FrameBlock(0, 3, 4, 4)]) == (None, 0)
    assert place_blocks([]) == ()


def dissected(seed: int, count: int) -> list[FrameBlock]:
    """Blocks that fill 60 frames at each of 40 instants without a hole."""
    random, parts = Random(seed), [(0, 40, 60)]
    while len(parts) < count:
        first, instants, pages = parts.pop(
            max(range(len(parts)), key=lambda at: parts[at][1] * parts[at][2] * random.random())
        )
        if instants > 1 and (pages == 1 or random.random() < 0.5):
            cut = random.randint(1, instants - 1)
            parts += [(first, cut, pages), (first + cut, instants - cut, pages)]
        elif pages > 1:
            cut = random.randint(1, pages - 1)
            parts += [(first, instants, cut), (first, instants, pages - cut)]
        else:
            parts.append((first, instants, pages))
    random.shuffle(parts)
    return [FrameBlock(first, first + instants - 1, pages, 60) for first, instants, pages in parts]


@pytest.mark.parametrize("seed", [0, 6, 12, 17, 18, 21, 30, 36, 51, 56])
def test_blocks_that_leave_no_hole_are_placed(seed: int) -> None:
    """All but the first are not placed by trying orders of blocks for a quarter of a second."""
    blocks = dissected(seed, 40)
    assert {sum(each.pages for each in blocks if each.first <= at <= each.last) for at in range(40)} == {60}
    assert None not in place_blocks(blocks)


def test_the_lowest_blocks_stay_while_others_are_moved() -> None:
    for seed in range(12):
        blocks = [FrameBlock(0, 39, 3, 63), *(dataclasses.replace(each, limit=63) for each in dissected(seed, 20))]
        assert place_blocks(blocks, lowest=[0])[0] == 0
        # There are no frames for the last one, and all others find theirs.
        frames = place_blocks([*blocks, FrameBlock(5, 5, 1, 63)], lowest=[0])
        assert frames[0] == 0 and frames.count(None) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_copy_and_gradient_of_a_plan_has_a_place(ranks: int) -> None:
    layout = even_layout([size * ranks for size in (1, 7, 3, 5, 2)], ranks)
    trace = sequential_trace(layout)
    for device_pages in range(10, 60):
        try:
            placement = placed(layout, pages(device_pages, host=1000), wishes=ON_HOST, trace=trace)
        except CapacityError:
            continue
        plan = schedule(layout, placement, trace, pages(device_pages, host=1000))
        simulate(layout, placement, plan, trace, pages(device_pages, host=1000))
        brings = (Operation.FETCH, Operation.GATHER)
        assert all(task.frames for task in plan.tasks if task.operation in brings)
        assert plan.gradients


def broken(plan: Plan, how: str) -> Plan:
    """The plan with a place that is wrong."""
    first, second = [each for each in plan.tasks if each.operation is Operation.FETCH][:2]
    change = {
        "shared": (second, dataclasses.replace(second, frames=first.frames)),
        "outside": (second, dataclasses.replace(second, frames=(10_000,))),
        "below": (second, dataclasses.replace(second, frames=(-1,))),
        "too many": (second, dataclasses.replace(second, frames=(*second.frames, 3))),
    }
    if how in change:
        old, new = change[how]
        return dataclasses.replace(plan, tasks=tuple(new if each is old else each for each in plan.tasks))
    place = plan.gradients[0]
    places = {
        "a gradient in a forward": dataclasses.replace(place, tick=0),
        "a gradient of no flat": dataclasses.replace(place, flat=99),
        "a gradient after the end": dataclasses.replace(place, tick=99),
        "a gradient twice": place,
    }
    return dataclasses.replace(plan, gradients=(*plan.gradients, places[how]))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("shared", "fetch of .* takes frames .*, of which the full of flat . has"),
        ("outside", "takes frames 10000 to 10003 of 24"),
        ("below", "takes frames -1 to 2 of 24"),
        ("too many", "has frames for 2 flats, and moves 1"),
        ("a gradient in a forward", "that tick is not of its backward"),
        ("a gradient of no flat", "there is no such gradient"),
        ("a gradient after the end", "have frames after tick 99, which the plan does not have"),
        ("a gradient twice", "takes frames a second time"),
    ],
)
def test_the_simulator_finds_wrong_places(how: str, told: str) -> None:
    layout = even_layout([1, 4, 4, 4])
    budget, trace = pages(24, disk=1000), sequential_trace(layout)
    placement = dataclasses.replace(placed(layout, budget, wishes=ON_DISK, trace=trace), gather_bytes=24 * PAGE)
    plan = schedule(layout, placement, trace, budget)
    simulate(layout, placement, plan, trace, budget)
    with pytest.raises(InternalError, match=told):
        simulate(layout, placement, broken(plan, how), trace, budget)


def test_gradients_in_grad_have_no_places_and_copies_keep_to_a_smaller_pool() -> None:
    layout = even_layout([1, 4, 4, 4])
    budget, trace = pages(24, disk=1000), sequential_trace(layout)
    placement = placed(layout, budget, wishes=ON_DISK, trace=trace)
    pool = PassingPool(9, frozenset(range(len(layout.flats))))
    plan = schedule(layout, placement, trace, budget, pool)
    simulate(layout, placement, plan, trace, budget, pool)
    assert not plan.gradients
    full = [task for task in plan.tasks if task.operation is Operation.FETCH and task.kind is Kind.FULL]
    assert full and all(0 <= frame <= 9 - 1 for task in full for frame in task.frames)


def test_units_outside_of_plans_have_the_last_frames_while_one_around_them_computes() -> None:
    layout = even_layout([1, 4, 4, 4])
    budget, trace = pages(24, disk=1000), sequential_trace(layout)
    placement = placed(layout, budget, wishes=ON_DISK, trace=trace)
    without = PassingPool(24, frozenset(range(len(layout.flats))))
    pool = dataclasses.replace(without, around=frozenset((2,)), by_need=12)
    simulate(layout, placement, schedule(layout, placement, trace, budget, pool), trace, budget, pool)
    with pytest.raises(
        InternalError, match=r"frames .*, and those from 12 on are for units that the plan does not contain"
    ):
        simulate(layout, placement, schedule(layout, placement, trace, budget, without), trace, budget, pool)
