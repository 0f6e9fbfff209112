"""Device pages at each tick of a virtual iteration, against counts by hand.

The model has a root of one page and blocks of one, two and three (with two ranks, shards of 1, 1, 1 and 2 pages): ticks are
F0 F1 F2 F3 B3 B2 B1 B0 and the end. What is counted is the worst moment of a tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from decided_by_hand import CLUSTER, PAGE, decided
from torch import nn

from lightning_ptm.errors import CapacityError
from lightning_ptm.models.moe import MixtureOfExperts
from lightning_ptm.planning.gradient_tasks import gradient_tasks
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.engine.predicted_memory import predicted_memory
from lightning_ptm.runtime.engine.virtual_run import VirtualRun
from lightning_ptm.terms import Kind, Mode, Operation, Phase, Tier

ON_HOST: dict[str, Any] = {"offload_parameters": "host", "offload_optimizer": "host"}


def replayed(found: Blueprint, *, follows: bool = True, steps: bool = True) -> tuple[list[int], Plan, Plan]:
    """Pages at ticks; the plan; what was done. Where the plan is not followed, the root's backward comes first.

    Args:
        steps: whether a step follows; otherwise the iteration is an earlier micro-batch.
    """
    plan = make_plan(found, Mode.TRAIN, found.planned(found.trace))
    virtual = VirtualRun(found)
    if follows:
        return virtual.run(plan, found.trace, steps=steps), plan, virtual.done(plan)
    ticks = found.trace.ticks
    half = len(ticks) // 2
    happens = Trace((*ticks[:half], ticks[-1], *ticks[half:-1]))
    pages = virtual.run(plan, happens, found.trace, steps=steps)
    return pages, plan, virtual.done(plan)


@pytest.mark.parametrize(
    ("options", "follows", "pages"),
    [
        # Resident flats are no pages of units; gradients stay in `.grad`.
        ({}, True, [0] * 9),
        # All is fetched at once. A unit is released with its backward, and its gradients take as many pages.
        ({"device_memory": 32 * PAGE, **ON_HOST}, True, [7, 7, 7, 7, 4 + 3, 2 + 2, 1 + 1, 1, 0]),
        # In the first iteration the root's backward comes first; at the end of block 1, its gradients come, too.
        ({"device_memory": 32 * PAGE, **ON_HOST}, False, [7, 7, 7, 7, 7, 7 + 3, 4 + 2, 2 + 1, 0]),
        # Room for eight: blocks 1 and 2 are given up in the forward, and come back when the gradients of 3 have left.
        ({"device_memory": 8 * PAGE, **ON_HOST}, True, [7, 7, 7, 6, 4, 4, 2, 1, 0]),
        # Block 3 is fetched again to one end, so that its gradients have adjacent pages beside it.
        ({"device_memory": 8 * PAGE, **ON_HOST}, False, [7, 7, 7, 6, 4, 4 + 3, 3 + 2, 2 + 1, 0]),
        # Two ranks: 7 gathered pages and 5 of shards, which go when their unit is needed, since the all-gather reads them
        # until then. Gradients of 3: whole 3 and reduced 2; they have left when those of 2 are laid out (2 + 1).
        (
            {"machine": CLUSTER, "ranks": 2, **ON_HOST},
            True,
            [12, 12, 10, 9, 4 + 5, 2 + 3, 1 + 2, 2, 0],
        ),
        # Reduced once a step: in the last backward before it, as above.
        (
            {"machine": CLUSTER, "ranks": 2, "keep_gradients": True, "tuning": {"reduce_gradients": "each_step"}},
            True,
            [7, 7, 7, 7, 4 + 5, 2 + 3, 1 + 2, 2, 0],
        ),
        (
            {"machine": CLUSTER, "ranks": 2, "keep_gradients": True, "tuning": {"reduce_gradients": "each_step"}},
            False,
            [7, 7, 7, 7, 7, 7 + 5, 7 + 3, 7 + 2, 7],
        ),
    ],
)
def test_pages_at_ticks(options: dict[str, Any], follows: bool, pages: list[int]) -> None:
    found = decided(**options)
    ticks, plan, done = replayed(found, follows=follows)
    assert ticks == pages
    if follows:  # every unit is in it
        assert done == plan.with_tasks(gradient_tasks(found.layout, found.placement, found.trace))


@pytest.mark.parametrize("follows", [True, False])
def test_an_earlier_micro_batch_reduces_nothing_that_is_reduced_once_a_step(follows: bool) -> None:
    options = {"keep_gradients": True, "tuning": {"reduce_gradients": "each_step"}}
    pages, _, _ = replayed(decided(machine=CLUSTER, ranks=2, **options), follows=follows, steps=False)
    assert pages == ([7, 7, 7, 7, 7, 4, 2, 1, 0] if follows else [7] * 9)


@pytest.mark.slow_unless("1-False-True", "1-True-False", "2-False-False", "2-True-True")
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_never_more_than_the_pool_has_nor_less_than_is_live(ranks: int, keep: bool, follows: bool) -> None:
    sizes = []
    for device_pages in range(5, 24):
        try:
            found = decided(
                ranks=ranks,
                device_memory=device_pages * PAGE,
                keep_gradients=keep,
                **ON_HOST,
            )
            ticks, _, _ = replayed(found, follows=follows)
        except CapacityError:
            continue
        sizes.append(device_pages)
        room = found.pool_bytes[Tier.DEVICE] // PAGE
        for used, tick in zip(ticks[:-1], found.trace.ticks, strict=True):
            assert sum(map(found.layout.full_pages, tick.live)) <= used <= room
    assert len(sizes) > 10


# -- sweeps of budgets ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, device="meta"))


class Widths(nn.Module):
    """Blocks of so many parameters, and a root with a parameter of one page if `head`."""

    def __init__(self, numels: Sequence[int], head: bool) -> None:
        super().__init__()
        if head:
            self.head = nn.Parameter(torch.empty(5000, device="meta"))
        self.blocks = nn.ModuleList(map(Wide, numels))


def width_profiles() -> list[list[int]]:
    """Twelve models of 4 to 12 blocks, of 1 to 23 pages each."""
    random = Random(0)
    profiles = [[width * 257 for width in (96, 700, 260, 1200, 150, 900, 420, 620)]]
    for _ in range(11):
        profiles.append([int(2 ** random.uniform(13, 18.5)) for _ in range(random.randint(4, 12))])
    return profiles


def late_fetches(numels: Sequence[int], head: bool, ranks: int, device_pages: int) -> int:
    """Returns the fetches of a virtual iteration, not the first, that came late or had no room at their tick.

    Checks that the plan has frames for all copies. In the iterations the root's backward comes first.
    """
    found = decided(Widths(numels, head), ranks=ranks, device_memory=device_pages * PAGE, units=["Wide"], **ON_HOST)
    ticks = found.planned(found.trace).ticks
    half = len(ticks) // 2
    trace = Trace((*ticks[:half], ticks[-1], *ticks[half:-1]))
    plan = make_plan(found, Mode.TRAIN, trace)
    assert all(task.frames for task in plan.tasks if task.operation in (Operation.FETCH, Operation.GATHER))
    virtual = VirtualRun(found)
    virtual.run(plan, trace)
    before = virtual.fetching.misses
    virtual.run(plan, trace)
    return virtual.fetching.misses - before


def least_pages(numels: Sequence[int], head: bool, ranks: int) -> int:
    device_pages = 4
    while True:
        try:
            late_fetches(numels, head, ranks, device_pages)
            return device_pages
        except CapacityError:
            device_pages += 1


@pytest.mark.parametrize(
    ("profile", "head", "ranks", "device_pages"),
    [
        (0, False, 1, [38, 44, 64, 69]),
        (0, False, 2, [50, 57, 64]),
        # Not all lifetimes of the first choice find frames.
        (4, False, 2, [44, 47, 51]),
        # A reduced gradient comes where an all-gather of the tick before reads a shard.
        (4, False, 2, [82]),
    ],
)
def test_no_fetch_is_late(profile: int, head: bool, ranks: int, device_pages: Sequence[int]) -> None:
    numels = width_profiles()[profile]
    assert [late_fetches(numels, head, ranks, each) for each in device_pages] == [0] * len(device_pages)


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("profile", range(12))
def test_no_fetch_is_late_in_fifty_budgets(profile: int, head: bool, ranks: int) -> None:
    numels = width_profiles()[profile]
    least = least_pages(numels, head, ranks)
    more = sum(-(-numel * 4 // PAGE) for numel in numels)
    budgets = sorted({least + more * step // 49 for step in range(50)})
    assert {each: late for each in budgets if (late := late_fetches(numels, head, ranks, each))} == {}


# -- units that are in no plan ----------------------------------------------------------------------------------------


class Sparse(nn.Module):
    """Four experts of two pages, of which each of two ranks has two."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(PAGE // 4))
        self.layer = MixtureOfExperts(
            64,
            256,
            experts=4,
            choices=1,
            capacity_factor=1.0,
            eval_capacity_factor=1.0,
            jitter=0.0,
            gated=False,
            dropout=0.0,
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_are_fetched_ahead_of_each_other_and_stay_until_their_update(rank: int) -> None:
    found = decided(Sparse(), machine=CLUSTER, ranks=2, rank=rank, expert_parallel_size=2, **ON_HOST)
    ticks, plan, done = replayed(found)
    ours = sorted(set(found.by_need) - set(found.layout.remote_flats))
    assert [(tick.unit, tick.phase) for tick in found.trace.ticks] == [
        *((unit, Phase.FORWARD) for unit in (0, *ours)),
        *((unit, Phase.BACKWARD) for unit in (*reversed(ours), 0)),
    ]
    acts = [(task.trigger, task.operation, task.unit) for task in done.tasks if task.unit in ours]
    first, second = ours
    assert acts == [
        (1, Operation.FETCH, first),
        (1, Operation.FETCH, second),  # while the first computes
        (1, Operation.COMPUTE, first),
        (2, Operation.COMPUTE, second),
        (3, Operation.COMPUTE, second),
        (4, Operation.COMPUTE, first),
        (5, Operation.RELEASE, second),  # one unit behind
        (5, Operation.OFFLOAD, second),
        (5, Operation.UPDATE, second),
        (6, Operation.RELEASE, first),
        (6, Operation.OFFLOAD, first),
        (6, Operation.UPDATE, first),
    ]
    # The plan's tasks are all there, among the ticks of the whole iteration: the root's backward is the last.
    planned = [task for task in done.tasks if task.unit == 0 and task.kind in (Kind.FULL, Kind.PARAMETER)]
    assert len(planned) == len(plan.tasks) and done.tick_count == 6 and plan.tick_count == 2
    assert [task.trigger for task in planned if task.operation is Operation.COMPUTE] == [0, 5]
    # The root (two pages whole, for its router) and its shard; two experts of two; gradients of an expert, two, while the
    # root's shard is given up; then the next one's, and the root's, which has been released: two whole, one reduced.
    assert ticks == [2 + 1, 3 + 4, 7, 6 + 2, 6 + 2, 2 + 2 + 1, 0]


def test_what_is_fetched_is_given_up_once() -> None:
    for device_pages in range(12, 30):
        found = decided(
            Sparse(),
            machine=CLUSTER,
            ranks=2,
            expert_parallel_size=2,
            device_memory=device_pages * PAGE,
            **ON_HOST,
        )
        _, _, done = replayed(found)
        there: set[int] = set()
        for task in done.tasks:
            if task.kind is not Kind.FULL or task.unit not in found.by_need:
                continue
            match task.operation:
                case Operation.FETCH | Operation.GATHER:
                    assert task.unit not in there
                    there.add(task.unit)
                case Operation.RELEASE:
                    there.remove(task.unit)
                case Operation.COMPUTE:
                    assert task.unit in there
        assert not there


def test_sums_on_disk_are_added_to_in_pages_beside_the_gradients_from_the_second_pass_on() -> None:
    """Blocks and their gradients as without; once more as many pages for what there is of each sum."""
    found = decided(
        device_memory=32 * PAGE,
        offload_parameters="disk",
        offload_optimizer="disk",
        disk_path="/d",
        keep_gradients=True,
        sums_gradients=True,
    )
    plan = make_plan(found, Mode.TRAIN, found.trace)
    virtual = VirtualRun(found)
    passes = [virtual.run(plan, found.trace, steps=steps) for steps in (False, True, False)]
    first = [7, 7, 7, 7, 4 + 3, 2 + 2, 1 + 1, 1, 0]
    assert passes == [first, [7, 7, 7, 7, 4 + 2 * 3, 2 + 2 * 2, 1 + 2 * 1, 2 * 1, 0], first]
    predicted = [size // PAGE for size in predicted_memory(found, plan, found.trace).device_per_tick]
    assert all(
        most >= pages for most, pages in zip(predicted, passes[1], strict=True)
    )  # the first iteration counts, too


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_has_the_shards_that_it_owns(rank: int) -> None:
    """Of an optimizer that updates whole parameters."""
    found = decided(
        optimizers=lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
        machine=CLUSTER,
        ranks=3,
        rank=rank,
        **ON_HOST,
    )
    assert found.layout.owned
    ticks, _, _ = replayed(found)
    shards = sum(-(-flat.shard_bytes // PAGE) for flat in found.layout.flats)
    assert ticks[0] == sum(map(found.layout.full_pages, range(4))) + shards  # all are gathered at once
