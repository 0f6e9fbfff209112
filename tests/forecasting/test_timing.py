"""One step among many: what it waits for, and what it leaves to the next."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.models import PAGE, done, even_layout
from planning.test_placement import pages, placed

from lightning_ptm.forecasting.rates import Activity, Hardware, Timing
from lightning_ptm.forecasting.send_order import SendOrder
from lightning_ptm.forecasting.timing import steady
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.placement_data import Budget, Placement, PlacementWishes
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Tick, Trace, sequential_trace
from lightning_ptm.terms import Link, Operation, Phase, Tier

INSTANT = Hardware("no limits", *[1e30] * 7)
SLOW = Hardware("one byte a second", *[1.0] * 7)
LAYOUT = even_layout([1, 2, 2, 2])
TRACE = Trace(tuple(replace(tick, seconds=1.0) for tick in sequential_trace(LAYOUT).ticks))
COMPUTE_S = float(len(TRACE.ticks))
BUDGET = pages(100, host=1000)
PLACEMENT = placed(LAYOUT, BUDGET, trace=TRACE, wishes=PlacementWishes(master=Tier.HOST))
PLAN = done(LAYOUT, PLACEMENT, TRACE, BUDGET)
UPDATE_BYTES = sum(2 * flat.shard_numel * 12 + 2 * flat.shard_bytes for flat in LAYOUT.flats)


def updating_in(seconds: float) -> Hardware:
    return replace(INSTANT, update_host_bytes_per_s=UPDATE_BYTES / seconds)


def test_without_limits_a_step_is_its_compute() -> None:
    timing = steady(LAYOUT, PLACEMENT, PLAN, TRACE, BUDGET, INSTANT)
    assert timing.seconds == pytest.approx(COMPUTE_S)
    assert timing.compute_s == COMPUTE_S


def test_updates_behind_the_last_tick_hide_behind_the_next_forward() -> None:
    placement = placed(LAYOUT, BUDGET, trace=TRACE, wishes=PlacementWishes(master=Tier.HOST), keep_gradients=True)
    plan = done(LAYOUT, placement, TRACE, BUDGET)
    among_others = steady(LAYOUT, placement, plan, TRACE, BUDGET, updating_in(COMPUTE_S / 2))
    assert COMPUTE_S < among_others.seconds < 1.25 * COMPUTE_S


def test_an_update_that_is_slower_than_compute_sets_the_pace() -> None:
    timing = steady(LAYOUT, PLACEMENT, PLAN, TRACE, BUDGET, updating_in(10 * COMPUTE_S))
    assert 10 * COMPUTE_S - 1e-6 <= timing.seconds <= 11 * COMPUTE_S
    waited = {stall.cause: stall.seconds for stall in timing.stalls}
    assert waited[Operation.UPDATE] == pytest.approx(timing.seconds - COMPUTE_S)


def test_lock_free_compute_does_not_wait() -> None:
    timing = steady(LAYOUT, PLACEMENT, PLAN, TRACE, BUDGET, updating_in(10 * COMPUTE_S), wait_for_updates=False)
    assert timing.seconds == pytest.approx(COMPUTE_S)
    busy = {use.link: use.busy_s for use in timing.links}
    assert busy[Link.UPDATE_HOST] == pytest.approx(10 * COMPUTE_S)


def test_micro_batches_share_an_update() -> None:
    one = steady(LAYOUT, PLACEMENT, PLAN, TRACE, BUDGET, updating_in(1.0))
    three = steady(LAYOUT, PLACEMENT, PLAN, TRACE, BUDGET, updating_in(1.0), micro_batches=3)
    assert three.compute_s == 3 * one.compute_s
    assert [use.bytes for use in three.links if use.link is Link.UPDATE_HOST] == [UPDATE_BYTES]
    assert [use.bytes for use in one.links if use.link is Link.UPDATE_HOST] == [UPDATE_BYTES]


def test_the_record_is_of_one_step_and_links_do_one_thing_at_a_time() -> None:
    record: list[Activity] = []
    timing = steady(LAYOUT, PLACEMENT, PLAN, TRACE, BUDGET, updating_in(COMPUTE_S), record=record)
    assert sum(each.seconds for each in record if each.link is None) == COMPUTE_S
    for link in (None, *Link):
        ends = 0.0
        for each in [each for each in record if each.link is link]:
            assert each.start_s + each.seconds > 0 and each.start_s < timing.seconds
            assert each.start_s >= ends - 1e-9 or each.start_s < 0
            ends = each.start_s + each.seconds


@pytest.mark.parametrize("late", [False, True], ids=["behind the backward", "at the step"])
def test_updates_on_the_cores_that_compute_take_their_time_from_it(late: bool) -> None:
    placement = placed(LAYOUT, BUDGET, trace=TRACE, wishes=PlacementWishes(master=Tier.HOST), keep_gradients=late)
    plan = done(LAYOUT, placement, TRACE, BUDGET)
    timing = steady(LAYOUT, placement, plan, TRACE, BUDGET, replace(updating_in(3.0), shared_cores=True))
    assert timing.compute_s == COMPUTE_S
    assert timing.seconds == pytest.approx(COMPUTE_S + 3.0)


@pytest.mark.parametrize(("both", "expected_s"), [(None, 20.0), (2.0, 20.0), (1.0, 40.0), (4 / 3, 30.0)])
def test_a_disk_that_reads_and_writes_at_once_is_as_fast_as_both_together(
    both: float | None, expected_s: float
) -> None:
    """Reads alone take 20 s, and so do writes. `both` is the total rate of concurrent reads and writes, relative to the
    rate of either alone (None: not given)."""
    budget = pages(100, disk=1000)
    placement = placed(LAYOUT, budget, trace=TRACE, wishes=PlacementWishes(master=Tier.DISK), unified=True)
    plan = done(LAYOUT, placement, TRACE, budget)
    rate = sum(flat.shard_numel * 12 for flat in LAYOUT.flats) / 20.0
    disk = replace(INSTANT, disk_read_bytes_per_s=rate, disk_write_bytes_per_s=rate, shared_cores=True)
    together = None if both is None else both * rate
    timing = steady(LAYOUT, placement, plan, TRACE, budget, replace(disk, disk_both_bytes_per_s=together))
    assert 0.95 * expected_s <= timing.seconds <= expected_s + COMPUTE_S


def on_disk() -> tuple[Budget, Placement, Plan]:
    """All master states on a disk that reads and writes, each, for 20 s."""
    budget = pages(100, disk=1000)
    placement = placed(LAYOUT, budget, trace=TRACE, wishes=PlacementWishes(master=Tier.DISK), unified=True)
    plan = done(LAYOUT, placement, TRACE, budget)
    return budget, placement, plan


DISK_RATE = sum(flat.shard_numel * 12 for flat in LAYOUT.flats) / 20.0
DISK = replace(INSTANT, disk_read_bytes_per_s=DISK_RATE, disk_write_bytes_per_s=DISK_RATE, shared_cores=True)


def test_with_little_staging_reads_wait_for_writes() -> None:
    seconds = []
    for chunks in (1, 2, 100):
        budget, placement, plan = on_disk()
        seconds.append(steady(LAYOUT, placement, plan, TRACE, budget, DISK, staging_chunks=chunks).seconds)
    assert 40.0 <= seconds[0] <= 40.0 + COMPUTE_S
    assert seconds[0] > seconds[1] >= seconds[2] >= 20.0 - 1e-6


def test_what_chunks_take_beside_their_arithmetic_counts() -> None:
    budget, placement, plan = on_disk()
    fast = replace(INSTANT, shared_cores=True)
    chunks = sum(-(-flat.shard_numel // (LAYOUT.page_size // 4)) for flat in LAYOUT.flats)
    timing = steady(LAYOUT, placement, plan, TRACE, budget, replace(fast, chunk_s=0.5))
    assert timing.seconds == pytest.approx(COMPUTE_S + 0.5 * chunks)


def test_arithmetic_beside_transfers_has_a_rate_of_its_own() -> None:
    budget, placement, plan = on_disk()
    slower = replace(INSTANT, shared_cores=True, disk_update_bytes_per_s=UPDATE_BYTES / 3.0)
    assert steady(LAYOUT, placement, plan, TRACE, budget, slower).seconds == pytest.approx(COMPUTE_S + 3.0)


def test_transfers_take_cores_from_compute_only_while_it_computes() -> None:
    budget, placement, plan = on_disk()
    fast_disk = replace(DISK, disk_read_bytes_per_s=10 * DISK_RATE, disk_write_bytes_per_s=10 * DISK_RATE)
    free = steady(LAYOUT, placement, plan, TRACE, budget, fast_disk).seconds
    taking = replace(fast_disk, disk_bytes_per_core_s=20 * DISK_RATE)
    took_s = steady(LAYOUT, placement, plan, TRACE, budget, taking).seconds - free
    assert 0.0 < took_s <= 2.0 + 1e-6  # twice the bytes at 20 times the rate of 20 s


def test_each_byte_of_a_step_is_carried_once() -> None:
    """A unit of one page on disk, over links of one byte a second."""
    layout = even_layout([1])
    trace = Trace((Tick(0, Phase.FORWARD, (0,), seconds=3.0), Tick(0, Phase.BACKWARD, (0,), seconds=5.0)))
    budget = pages(6, disk=100)
    placement = placed(layout, budget, trace=trace, wishes=PlacementWishes(parameter=Tier.DISK, master=Tier.DISK))
    timing = steady(layout, placement, done(layout, placement, trace, budget), trace, budget, SLOW)
    carried = {use.link: use.bytes for use in timing.links if use.bytes}
    assert carried == {Link.DISK_READ: 7 * PAGE, Link.DISK_WRITE: 7 * PAGE, Link.UPDATE_DEVICE: 14 * PAGE}
    # The fetch of the next step waits for this one's update, and is blamed on it.
    assert {stall.cause: stall.seconds for stall in timing.stalls if stall.seconds} == {Operation.UPDATE: 15 * PAGE}
    assert timing.seconds == 8.0 + 15 * PAGE


def test_a_faster_link_never_makes_a_plan_slower() -> None:
    layout = even_layout([2, 6, 6, 6], world_size=2)
    trace, budget = sequential_trace(layout), pages(22, host=1000)
    placement = placed(layout, budget, trace=trace, wishes=PlacementWishes(parameter=Tier.HOST, master=Tier.HOST))
    plan = done(layout, placement, trace, budget)
    slow, fast = (
        steady(layout, placement, plan, trace, budget, hardware)
        for hardware in (SLOW, replace(SLOW, collective_bytes_per_s=10.0))
    )
    assert fast.seconds < slow.seconds
    assert slow.seconds == pytest.approx(slow.compute_s + sum(stall.seconds for stall in slow.stalls))


def two_ranks() -> tuple[ModelLayout, Trace, Budget, Placement, Plan]:
    layout = even_layout([2, 6, 6, 6], world_size=2)
    trace, budget = sequential_trace(layout), pages(22, host=1000)
    placement = placed(layout, budget, trace=trace, wishes=PlacementWishes(parameter=Tier.HOST, master=Tier.HOST))
    return layout, trace, budget, placement, done(layout, placement, trace, budget)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ranks_agree_on_every_collective_and_meet_at_boundaries(micro_batches: int) -> None:
    layout, trace, budget, placement, plan = two_ranks()
    exchanged = {1: {Link.TENSOR_EXCHANGE: SendOrder(bytes=100, collectives=4, rounds=2)}}

    def timed(hardware: Hardware) -> Timing:
        return steady(
            layout, placement, plan, trace, budget, hardware, micro_batches=micro_batches, exchanged=exchanged
        )

    tasks = [task.operation for at in range(plan.tick_count + 1) for task in plan.at[at]]
    agreed = tasks.count(Operation.GATHER) + tasks.count(Operation.REDUCE)
    free, slow = timed(INSTANT), timed(replace(INSTANT, round_s=1.0))
    assert agreed and slow.rounds == micro_batches * (4 + 2 + agreed) + 1
    assert slow.rounds_s == pytest.approx(slow.rounds)
    assert slow.seconds - free.seconds == pytest.approx(slow.rounds)
    late = timed(replace(INSTANT, collective_s={Link.TENSOR_EXCHANGE: 1.0}))
    assert late.seconds - free.seconds == pytest.approx(4 * micro_batches)
    waits = {stall.cause: stall.seconds for stall in late.stalls}
    assert waits[Operation.EXCHANGE] == pytest.approx(4 * micro_batches)


def test_one_rank_agrees_with_nobody() -> None:
    timing = steady(LAYOUT, PLACEMENT, PLAN, TRACE, BUDGET, replace(INSTANT, round_s=1.0))
    assert timing.rounds == 0 and timing.seconds == pytest.approx(COMPUTE_S)
