"""Simulation: what placement and schedule make is clean; what is broken is found; bytes and seconds add up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.planning.gradient_tasks import gradient_tasks
from lightning_ptm.planning.layout import ModelLayout, build_layout
from lightning_ptm.planning.placement import place
from lightning_ptm.planning.placement_data import Budget, Placement, PlacementWishes
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import Tick, Trace, sequential_trace
from lightning_ptm.terms import Kind, Operation, Phase, Tier

from .models import BESIDE, PAGE, even_layout, in_parts, replanned, traces, two_micro_batches, unit_lists
from .test_placement import pages, placed
from .test_schedule import ON_DISK, ON_HOST


@st.composite
def problems(draw: st.DrawFn) -> tuple[ModelLayout, Trace]:
    """A random model on one to four ranks, of which fewer may share a unit (an expert) and some may have parts of parameters,
    and a random iteration of it."""
    units = draw(unit_lists())
    world_size = draw(st.sampled_from((1, 1, 2, 3, 4)))
    parts = draw(st.sampled_from([count for count in (1, 2, 4) if world_size % count == 0]))
    if parts > 1:
        units = [in_parts(unit, parts, draw(st.booleans())) for unit in units]
    fewer = st.sampled_from([count for count in (1, 2, 4) if world_size % count == 0 and count % parts == 0])
    shared_by = draw(st.dictionaries(st.integers(1, max(1, len(units) - 1)), fewer))
    layout = build_layout(units, page_size=PAGE, world_size=world_size, shared_by=shared_by)
    return layout, draw(st.one_of(traces(len(units)), st.just(sequential_trace(layout))))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.data())
def test_every_plan_that_is_made_simulates_clean(problem: tuple[ModelLayout, Trace], data: st.DataObject) -> None:
    layout, trace = problem
    unified = data.draw(st.booleans())
    further = st.sampled_from((BESIDE, replace(BESIDE, update_link=None)))
    # Around what the most demanding tick takes when nothing lives on the device: there memory is short.
    least_pages = max((_least_pages(layout, trace, number) for number in range(len(trace.ticks))), default=0)
    device_pages = data.draw(st.one_of(st.integers(0, 20), st.integers(0, 120))) + least_pages
    budget = Budget(
        {
            Tier.DEVICE: device_pages * PAGE - data.draw(st.integers(0, 1)),
            Tier.HOST: 0 if unified else data.draw(st.sampled_from((0, 20, 1000))) * PAGE,
            Tier.DISK: data.draw(st.sampled_from((0, 100, 10_000))) * PAGE,
            data.draw(further): data.draw(st.sampled_from((0, 20, 1000))) * PAGE,
        }
    )
    tiers = [tier for tier in budget if budget[tier] and tier is not Tier.DEVICE]
    wish = st.sampled_from((None, Tier.DEVICE, *tiers, *tiers))
    keep_gradients = data.draw(st.booleans())
    try:
        placement = place(
            layout,
            [12 if flat.trainable else 0 for flat in layout.flats],
            trace,
            budget,
            wishes=PlacementWishes(data.draw(wish), data.draw(wish)),
            unified=unified,
            keep_gradients=keep_gradients,
            sums_gradients=keep_gradients and data.draw(st.booleans()),
            staging_bytes=data.draw(st.sampled_from((0, PAGE))),
            update_on_device=True,
        )
    except CapacityError as error:
        assert re.search("raise .*(device|host|beside|disk)_(memory|path)", str(error))
        assume(False)
        raise
    # What placement accepts, schedule can plan and the simulator finds nothing in.
    plan = schedule(layout, placement, trace, budget)
    simulation = simulate(layout, placement, plan, trace, budget)
    for use in simulation.tiers:
        assert use.peak_bytes <= use.budget_bytes
        assert use.bytes_per_tick[use.peak_tick] == use.peak_bytes == max(use.bytes_per_tick)
    for task in gradient_tasks(layout, placement, trace):
        with pytest.raises(InternalError, match="no plan issues that"):
            simulate(layout, placement, plan.with_tasks([task]), trace, budget)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_a_budget_one_page_too_small_is_refused_at_the_right_tick(problem: tuple[ModelLayout, Trace]) -> None:
    layout, trace = problem
    assume(layout.world_size == 1)
    needs = [_least_pages(layout, trace, number) for number in range(len(trace.ticks))]
    assume(max(needs, default=0) > 0)

    def attempt(device_pages: int) -> Placement:
        return place(
            layout,
            [12] * len(layout.flats),
            trace,
            Budget({Tier.DEVICE: device_pages * PAGE, Tier.DISK: 10**12}),
            wishes=ON_DISK,
            unified=True,
            keep_gradients=False,
            staging_bytes=0,
            update_on_device=True,
        )

    assert attempt(max(needs)).gather_bytes == max(needs) * PAGE
    with pytest.raises(CapacityError, match=rf"^tick {needs.index(max(needs))} \(.* needs {max(needs)} pages? at once"):
        attempt(max(needs) - 1)


def _least_pages(layout: ModelLayout, trace: Trace, number: int) -> int:
    """Pages of one rank at one tick when everything lives on disk, counted by looking at the whole trace each time."""
    count = 0
    for unit in range(len(layout.units)):
        live = [at for at, tick in enumerate(trace.ticks) if unit in tick.live]
        backward = [at for at in live if trace.ticks[at].phase is Phase.BACKWARD]
        sizes = [(flat.trainable, -(-flat.padded_bytes // PAGE)) for flat in layout.flats_of(unit)]
        if number in live:
            count += sum(size for _, size in sizes)
        # Passing gradients stay until the update, which follows the unit's last use.
        if backward and backward[0] <= number <= live[-1]:
            count += sum(size for trainable, size in sizes if trainable)
    return count


def _valid(
    world_size: int, wishes: PlacementWishes, budget: Budget, *, in_flight: bool = False
) -> tuple[ModelLayout, Placement, Plan, Trace, Budget]:
    layout = even_layout([size * world_size for size in (1, 3, 3, 3)], world_size)
    trace = two_micro_batches(layout) if in_flight else sequential_trace(layout)
    placement = placed(layout, budget, wishes=wishes, trace=trace, keep_gradients=in_flight)
    return layout, placement, schedule(layout, placement, trace, budget), trace, budget


VALID = {
    "one rank, tight": _valid(1, ON_DISK, pages(9, disk=1000)),
    "one rank, roomy": _valid(1, ON_DISK, pages(100, disk=1000)),
    "two ranks, tight": _valid(2, ON_HOST, pages(22, host=1000)),
    "two ranks, roomy": _valid(2, ON_HOST, pages(40, host=1000)),
    "two ranks, resident": _valid(2, PlacementWishes(), pages(1000)),
    "one rank, two micro-batches": _valid(1, ON_DISK, pages(9, disk=1000), in_flight=True),
    "two ranks, two micro-batches": _valid(2, ON_HOST, pages(22, host=1000), in_flight=True),
}


@pytest.mark.parametrize("name", VALID)
def test_each_dropped_task_is_found(name: str) -> None:
    layout, placement, plan, trace, budget = VALID[name]
    simulate(layout, placement, plan, trace, budget)
    for task in plan.tasks:
        broken = replace(plan, tasks=tuple(other for other in plan.tasks if other is not task))
        with pytest.raises((InternalError, CapacityError)):
            simulate(layout, placement, broken, trace, budget)


@pytest.mark.parametrize("name", VALID)
def test_each_doubled_task_is_found(name: str) -> None:
    layout, placement, plan, trace, budget = VALID[name]
    for task in plan.tasks:
        with pytest.raises((InternalError, CapacityError)):
            simulate(layout, placement, replanned(plan, [*plan.tasks, task]), trace, budget)


@pytest.mark.parametrize("name", VALID)
def test_each_task_delayed_beyond_its_need_is_found(name: str) -> None:
    layout, placement, plan, trace, budget = VALID[name]
    for task in plan.tasks:
        for delay in range(1, plan.tick_count):
            late = replace(task, trigger=task.trigger + delay)
            if _may_wait(task, late, trace):
                continue
            tasks = [late if other is task else other for other in plan.tasks]
            with pytest.raises((InternalError, CapacityError)):
                simulate(layout, placement, replanned(plan, tasks), trace, budget)


def _may_wait(task: Task, late: Task, trace: Trace) -> bool:
    """Copies may arrive as late as their first use."""
    if task.operation in (Operation.FETCH, Operation.GATHER):
        return not any(task.unit in tick.live for tick in trace.ticks[task.trigger : late.trigger])
    return False


def test_a_plan_that_exceeds_the_device_is_refused_by_tick() -> None:
    layout, placement, plan, trace, budget = VALID["one rank, roomy"]
    smaller = Budget({**budget, Tier.DEVICE: 12 * PAGE})
    with pytest.raises(
        CapacityError,
        match=r"tick \d+ \(.* (for|back)ward\) needs 14 pages at once .* pages may take 768 KiB of RAM; raise host_memory",
    ):
        simulate(layout, placement, plan, trace, smaller)
    with pytest.raises(CapacityError, match=r"model states and staging buffers need .* on disk.* raise disk_memory"):
        simulate(layout, placement, plan, trace, Budget({**budget, Tier.DISK: PAGE}))


def test_homes_that_do_not_hold_the_states_are_found() -> None:
    layout, placement, plan, trace, budget = VALID["one rank, roomy"]
    with pytest.raises(InternalError, match="homes on the disk tier"):
        simulate(
            layout, replace(placement, at_home_bytes={**placement.at_home_bytes, Tier.DISK: PAGE}), plan, trace, budget
        )


def test_a_plan_for_another_trace_is_found() -> None:
    layout, placement, plan, trace, budget = VALID["one rank, roomy"]
    with pytest.raises(InternalError, match="the plan has 8 ticks, the trace 7"):
        simulate(layout, placement, plan, Trace(trace.ticks[:-1]), budget)
    with pytest.raises(InternalError, match="comes after trigger"):
        simulate(layout, placement, replace(plan, tasks=plan.tasks[::-1]), trace, budget)


@pytest.mark.parametrize(("sums", "pages_at"), [(False, (1, 2, 2)), (True, (1, 3, 3))])
def test_a_plan_written_in_this_test_is_accepted_and_its_bytes_are_counted(
    sums: bool, pages_at: tuple[int, ...]
) -> None:
    """The unit; its gradient; and where there are several on disk, what there is of their sum."""
    layout = even_layout([1])
    trace = Trace((Tick(0, Phase.FORWARD, (0,)), Tick(0, Phase.BACKWARD, (0,))))
    budget = pages(6, disk=100)
    placement = placed(layout, budget, trace=trace, wishes=ON_DISK, keep_gradients=sums, sums_gradients=sums)
    plan = Plan(
        (
            Task(Operation.FETCH, 0, Kind.FULL, 0),
            Task(Operation.COMPUTE, 0, Kind.FULL, 0),
            Task(Operation.COMPUTE, 0, Kind.FULL, 1),
            Task(Operation.RELEASE, 0, Kind.FULL, 2),
        ),
        2,
    )
    simulation = simulate(layout, placement, plan, trace, budget)
    device, disk = simulation.tier(Tier.DEVICE), simulation.tier(Tier.DISK)
    assert device.bytes_per_tick == tuple(each * PAGE for each in pages_at)
    assert (device.peak_bytes, device.peak_tick) == (pages_at[1] * PAGE, 1)
    assert disk.bytes_per_tick == ((7 + sums) * PAGE,) * 3
    with pytest.raises(CapacityError, match=f"needs {pages_at[1]} pages? at once"):
        simulate(layout, replace(placement, gather_bytes=(pages_at[1] - 1) * PAGE), plan, trace, budget)
