"""Schedule: Algorithm 1's orders on examples that can be checked by hand."""

from __future__ import annotations

import pytest

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.placement_data import Budget, PlacementWishes
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import Tick, Trace, forward_trace, sequential_trace
from lightning_ptm.terms import Operation, Phase, Tier

from .models import even_layout
from .test_placement import pages, placed

ON_DISK = PlacementWishes(parameter=Tier.DISK, master=Tier.DISK)
ON_HOST = PlacementWishes(parameter=Tier.HOST, master=Tier.HOST)


def planned(
    layout: ModelLayout,
    budget: Budget,
    wishes: PlacementWishes,
    trace: Trace | None = None,
    *,
    keep_gradients: bool = False,
) -> Plan:
    """Placed, scheduled and simulated."""
    trace = sequential_trace(layout) if trace is None else trace
    placement = placed(layout, budget, trace=trace, wishes=wishes, keep_gradients=keep_gradients)
    plan = schedule(layout, placement, trace, budget)
    simulate(layout, placement, plan, trace, budget)
    return plan


def triggers(plan: Plan, operation: Operation, unit: int) -> list[int]:
    return [task.trigger for task in plan.tasks if task.operation is operation and task.unit == unit]


def test_what_lies_on_the_device_of_one_rank_needs_no_copies() -> None:
    layout = even_layout([1, 2, 2])
    plan = planned(layout, pages(1000), PlacementWishes())
    assert {task.operation for task in plan.tasks} == {Operation.COMPUTE}


def test_fetches_are_issued_at_the_start_as_far_as_the_device_holds_them() -> None:
    layout = even_layout([1, 4, 4, 4])
    plan = planned(layout, pages(10, disk=1000), ON_DISK)
    assert [triggers(plan, Operation.FETCH, unit)[0] for unit in range(4)] == [0, 0, 0, 2]
    # The third block's pages come free when the first is released.
    assert triggers(plan, Operation.RELEASE, 1)[0] == 2


def test_kept_between_forward_and_backward_are_the_nearest_next_uses() -> None:
    layout = even_layout([1, 4, 4, 4, 4, 4])
    # In the middle: the root, three blocks, and the gradients of one block and of the root.
    plan = planned(layout, pages(1 + 3 * 4 + 4 + 1, disk=1000), ON_DISK)
    fetches = [len(triggers(plan, Operation.FETCH, unit)) for unit in range(6)]
    assert fetches == [1, 2, 2, 1, 1, 1]
    assert [len(triggers(plan, Operation.RELEASE, unit)) for unit in range(6)] == fetches


def test_with_room_each_unit_is_fetched_once() -> None:
    layout = even_layout([1, 4, 4, 4])
    plan = planned(layout, pages(100, disk=1000), ON_DISK)
    assert [triggers(plan, Operation.FETCH, unit) for unit in range(4)] == [[0]] * 4


def test_copies_arrive_a_tick_ahead_when_the_budget_permits() -> None:
    layout = even_layout([1, 4, 4, 4, 4, 4, 4])
    plan = planned(layout, pages(1 + 2 * 4 + 2 * 4 + 1, disk=1000), ON_DISK)
    for unit in range(1, 7):
        for fetched in triggers(plan, Operation.FETCH, unit):
            need = min(number for number in triggers(plan, Operation.COMPUTE, unit) if number >= fetched)
            assert fetched < need


def test_without_room_copies_arrive_at_their_need() -> None:
    layout = even_layout([1, 4, 4])
    plan = planned(layout, pages(1 + 4 + 4 + 1, disk=1000), ON_DISK)
    assert triggers(plan, Operation.FETCH, 1) == [0, 4]
    with pytest.raises(CapacityError):
        planned(layout, pages(1 + 4 + 4, disk=1000), ON_DISK)


def test_several_ranks_gather_from_fetched_pages_and_give_them_up() -> None:
    layout = even_layout([2, 8, 8], world_size=2)
    plan = planned(layout, pages(30, host=1000), ON_HOST)
    for unit in range(3):
        gathers, fetches = triggers(plan, Operation.GATHER, unit), triggers(plan, Operation.FETCH, unit)
        assert fetches[0] <= gathers[0]
        assert len(triggers(plan, Operation.EVICT, unit)) == len(fetches) <= len(gathers)


def test_pages_at_home_on_the_device_are_gathered_without_a_fetch() -> None:
    layout = even_layout([2, 8, 8], world_size=2)
    plan = planned(layout, pages(1000), PlacementWishes())
    assert {task.operation for task in plan.tasks} == {
        Operation.GATHER,
        Operation.COMPUTE,
        Operation.RELEASE,
    }
    assert [triggers(plan, Operation.GATHER, unit) for unit in range(3)] == [[0], [0], [0]]


def test_gathers_move_to_the_earliest_tick_that_holds_them() -> None:
    layout = even_layout([2, 8, 8, 8, 8], world_size=2)
    wish = PlacementWishes(parameter=Tier.DEVICE, master=Tier.DISK)
    plan = planned(layout, pages(17 + 2 + 3 * 8 + 2 + 8, disk=1000), wish)
    assert [triggers(plan, Operation.GATHER, unit)[0] for unit in range(5)] == [0, 0, 0, 0, 0]
    tight = planned(layout, pages(17 + 2 + 2 * 8 + 2 + 4, disk=1000), wish)
    assert [triggers(tight, Operation.GATHER, unit)[0] for unit in range(5)] == [0, 0, 0, 2, 3]


def test_evaluation_moves_parameters_only() -> None:
    layout = even_layout([1, 4, 4])
    plan = planned(layout, pages(9, disk=1000), ON_DISK, forward_trace(layout))
    assert {task.operation for task in plan.tasks} == {Operation.FETCH, Operation.COMPUTE, Operation.RELEASE}


def test_a_trace_that_takes_more_than_placement_saw_is_refused_by_tick() -> None:
    layout = even_layout([1, 4, 4])
    budget = pages(10, disk=1000)
    placement = placed(layout, budget, wishes=ON_DISK)
    trace = sequential_trace(layout)
    grown = Trace((*trace.ticks[:3], Tick(2, Phase.BACKWARD, (0, 1, 2)), *trace.ticks[4:]))
    with pytest.raises(CapacityError, match=r"tick 3 \(layers.1 backward\) needs 18 pages .* pages may take 640 KiB"):
        schedule(layout, placement, grown, budget)


def test_equal_inputs_give_equal_plans_and_other_ones_other_plans() -> None:
    layout = even_layout([1, 4, 4])
    plans = [planned(layout, pages(count, disk=1000), ON_DISK) for count in (10, 10, 14)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize("budget", range(14, 26, 3))
def test_the_last_blocks_gradients_have_no_frames_of_the_root(budget: int) -> None:
    """They are laid out before the root leaves, its own after that: both at the trigger after the last tick."""
    layout = even_layout([2, 4, 4, 4])
    ticks = sequential_trace(layout).ticks
    middle = len(ticks) // 2
    traced = Trace((*ticks[:middle], ticks[-1], *ticks[middle:-1]))  # a run's backward begins with the root's
    plan = planned(layout, pages(budget, disk=1000), ON_DISK, traced)
    root = next(task.frames for task in plan.tasks if task.operation is Operation.FETCH and not task.unit)
    after = {layout.flats[each.flat].unit: each.frame for each in plan.gradients if each.tick == plan.tick_count - 1}
    assert root == (0,) and after[1] >= 2 and 0 in after, after
