"""When gradients leave and are used, by hand."""

from __future__ import annotations

import pytest

from lightning_ptm.planning.gradient_tasks import gradient_tasks
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.placement_data import PlacementWishes
from lightning_ptm.planning.plan import Task
from lightning_ptm.planning.trace import Tick, Trace, forward_trace, sequential_trace
from lightning_ptm.terms import Operation, Phase, Tier

from .models import even_layout, two_micro_batches
from .test_placement import pages, placed

REDUCE, OFFLOAD, UPDATE = Operation.REDUCE, Operation.OFFLOAD, Operation.UPDATE
ON_HOST = PlacementWishes(parameter=Tier.HOST, master=Tier.HOST)
IN_RAM = PlacementWishes()


def tasks(
    layout: ModelLayout, trace: Trace, wishes: PlacementWishes = ON_HOST, *, keep_gradients: bool = False
) -> list[Task]:
    room = 1000 if wishes is IN_RAM else 30
    placement = placed(layout, pages(room, host=1000), trace=trace, wishes=wishes, keep_gradients=keep_gradients)
    return list(gradient_tasks(layout, placement, trace))


def triggers(found: list[Task], operation: Operation) -> list[list[int]]:
    """By unit."""
    count = max(task.unit for task in found) + 1
    return [
        [task.trigger for task in found if (task.operation, task.unit) == (operation, unit)] for unit in range(count)
    ]


@pytest.mark.parametrize("wishes", [IN_RAM, ON_HOST], ids=["in RAM", "on the host"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_they_leave_and_are_used_behind_a_units_backward(ranks: int, wishes: PlacementWishes) -> None:
    layout = even_layout([2, 8, 8], world_size=ranks)
    found = tasks(layout, sequential_trace(layout), wishes)  # F0 F1 F2 B2 B1 B0
    behind = [[6], [5], [4]]
    assert triggers(found, UPDATE) == behind
    assert triggers(found, REDUCE) == (behind if ranks > 1 else [[], [], []])
    # What passes on the device goes nowhere.
    assert triggers(found, OFFLOAD) == (behind if wishes is ON_HOST else [[], [], []])


def test_a_unit_that_is_used_after_its_backward_is_updated_after_that_use() -> None:
    layout = even_layout([1, 1])
    trace = Trace(
        (
            Tick(1, Phase.FORWARD, (0, 1)),
            Tick(1, Phase.BACKWARD, (0, 1)),
            Tick(0, Phase.FORWARD, (0,)),
            Tick(1, Phase.FORWARD, (1,)),
        )
    )
    assert triggers(tasks(layout, trace), UPDATE) == [[3], [4]]


def test_they_leave_at_the_end_of_each_backward_pass() -> None:
    layout = even_layout([1, 4, 4])
    trace = two_micro_batches(layout)  # forwards 0..4, backwards 5 6 7 and 8 9 10
    found = tasks(layout, trace, keep_gradients=True)
    assert triggers(found, OFFLOAD) == [[8, 11], [7, 10], [6, 9]]
    assert triggers(found, UPDATE) == [[11]] * 3  # where all are seen at once
    # Those that pass leave once, when all are there.
    assert triggers(tasks(even_layout([2, 8, 8], 2), trace, IN_RAM), REDUCE) == [[11], [10], [9]]


def test_an_evaluation_has_none() -> None:
    layout = even_layout([1, 4, 4])
    assert tasks(layout, forward_trace(layout)) == []
