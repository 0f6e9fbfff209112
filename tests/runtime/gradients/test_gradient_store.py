"""The pages of a gradient: what is added, what is on its way, and what becomes of pages that are given away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import NUMEL, OnePage, UnderWay, parts
from test_flat_gradient import use_of

from lightning_ptm.comm import Work
from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.plan import GradientBuffer
from lightning_ptm.runtime.deciding.gradient_route import Passes, Until, route
from lightning_ptm.runtime.gradients.state import GradEvent, GradientRecord, GradientState
from lightning_ptm.runtime.gradients.store import GradientShard, InFlight
from lightning_ptm.terms import Tier

BOTH = (True, True)
TIERS = [Tier.DEVICE, Tier.HOST, Tier.DISK]


class Driven:
    """The shard of a weight and a bias that fill a page of fp32."""

    def __init__(self, made: Any, tier: Tier) -> None:
        self.parts = made
        (store,) = made.flats
        way = route(tier, torch.float32, use_of(passes=Passes.COPIED, until=Until.STEP))
        assert way.tier is tier
        self.record = GradientRecord("flat 0", 2)
        self.in_flight = InFlight()
        self.before_change: Callable[[], None] = lambda: None
        self.it = GradientShard(
            store,
            way,
            self.record,
            made.allocator,
            made.supply(store, way),
            self.in_flight,
            before_change=lambda: self.before_change(),
        )
        self.free = made.device_pages_free
        self.own = int(tier is Tier.DEVICE)

    def part(self, value: float) -> PagedTensor:
        """A buffer with a gradient."""
        buffer = self.it.take(GradientBuffer.FULL, NUMEL)
        buffer.tensor().fill_(value)
        return buffer

    def values(self) -> list[float]:
        found = self.it.on_device().unique().tolist()
        self.it.settle()
        return found  # type: ignore[no-any-return]

    @property
    def taken(self) -> int:
        return self.free - self.parts.device_pages_free


@contextmanager
def driven(tier: Tier, disk: Path, *, device_pages: int = 6) -> Iterator[Driven]:
    with parts(OnePage(), (), disk=disk, device_pages=device_pages) as made:
        yield Driven(made, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_what_comes_is_added_to_what_is_there(disk: Path, tier: Tier) -> None:
    with driven(tier, disk) as its:
        with pytest.raises(InternalError, match="flat 0 has no gradient pages"):
            its.it.on_device()
        assert its.it.pages is None
        pages = its.it.reserve()
        assert its.it.reserve() is pages is its.it.pages and its.taken == its.own
        for value in (1.0, 2.0):
            its.it.settle()
            its.it.add(its.part(value), its.it.take_sum_buffers(), BOTH)
        assert its.values() == [3.0] and its.record.state is GradientState.IN_PAGES and its.taken == its.own
        its.record.send(GradEvent.FORGET)
        its.it.add(its.part(5.0), its.it.take_sum_buffers(), BOTH)
        assert its.values() == [5.0]


@pytest.mark.parametrize("tier", TIERS)
def test_a_reduction_is_waited_for_once_and_its_buffers_come_back(disk: Path, tier: Tier) -> None:
    with driven(tier, disk) as its:
        its.it.reserve()
        waited: list[int] = []
        full = its.it.take(GradientBuffer.FULL, NUMEL)
        its.it.reduction_started(Work([UnderWay()], finish=lambda: waited.append(1)), full, its.part(4.0), BOTH)
        assert its.it.in_flight and waited == [] and not its.it.release(wait=False)
        assert its.it.release(wait=True) and waited == [1] and its.taken == its.own
        its.it.finish_reduction()
        its.it.settle()
        assert waited == [1] and its.values() == [4.0] and not its.it.in_flight and its.it.transfers() == []


def test_a_reduction_that_has_ended_frees_its_pages_without_a_wait(disk: Path) -> None:
    with driven(Tier.HOST, disk) as its:
        its.it.reserve()
        its.it.reduction_started(Work(), its.it.take(GradientBuffer.FULL, NUMEL), its.part(4.0), BOTH)
        assert its.it.release(wait=False) and its.taken == its.own
        assert its.values() == [4.0]


def test_what_leaves_for_the_disk_is_told_until_it_has(disk: Path) -> None:
    with driven(Tier.DISK, disk) as its:
        its.it.reserve()
        its.it.add(its.part(1.0), (), BOTH)
        (transfer,) = its.it.transfers()
        assert its.it.in_flight and its.taken == 1
        its.it.settle()
        assert transfer.done() and its.taken == 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_change_comes_behind_who_still_reads_and_is_in_the_pages_then(disk: Path, tier: Tier) -> None:
    with driven(tier, disk) as its:
        its.it.reserve()
        its.it.add(its.part(1.0), its.it.take_sum_buffers(), BOTH)
        seen: list[list[float]] = []
        its.before_change = lambda: seen.append(its.values())
        with its.it.changing() as values:
            values.mul_(6)
        assert its.taken == its.own  # at once: a step changes the gradients of all flats, and each has a buffer
        assert seen == [[1.0]] and its.values() == [6.0] and its.taken == its.own


@pytest.mark.parametrize("tier", TIERS)
def test_one_parameter_is_read_written_and_added_to(disk: Path, tier: Tier) -> None:
    with driven(tier, disk) as its:
        weight, bias = its.parts.module.weight, its.parts.module.bias
        its.it.add_to_slot(1, torch.full(bias.shape, 2.0))
        assert its.record.present == (False, True) and its.record.state is GradientState.IN_PAGES
        its.it.add_to_slot(1, torch.full(bias.shape, 3.0))
        assert its.it.value(0, weight).eq(0).all() and its.it.value(1, bias).eq(5).all()
        its.it.write(0, torch.full(weight.shape, 7.0))
        its.it.write(1, None)
        assert its.it.value(0, weight).eq(7).all() and its.it.value(1, bias).eq(0).all() and its.taken == its.own


def test_what_is_taken_of_each_parameter_is_added_where_it_is(disk: Path) -> None:
    with driven(Tier.DEVICE, disk) as its:
        weight, bias = its.parts.module.weight, its.parts.module.bias
        gradients = [torch.full(weight.shape, 1.0), None]
        its.it.add_on_device(gradients.__getitem__)
        gradients = [torch.full(weight.shape, 2.0), torch.full(bias.shape, 4.0)]
        its.it.add_on_device(gradients.__getitem__)
        assert its.it.value(0, weight).eq(3).all() and its.it.value(1, bias).eq(4).all()
        assert its.record.present == (True, True)


@pytest.mark.parametrize("tier", TIERS)
def test_pages_that_are_given_away_leave_nothing(disk: Path, tier: Tier) -> None:
    with driven(tier, disk) as its:
        its.it.reserve()
        its.it.add(its.part(1.0), its.it.take_sum_buffers(), BOTH)
        its.it.settle()
        copy, transfer = its.it.copy()
        transfer.wait(host=True)
        its.record.send(GradEvent.HAND)
        given = its.it.give_away()
        assert its.it.pages is None
        assert its.parts.read(given).eq(1).all() and its.parts.read(copy).eq(1).all()
        for each in (given, copy):
            its.it.return_pages(each)
        assert its.taken == 0
        its.it.use_up()  # there is nothing
        its.it.reserve()
        its.it.use_up()
        assert its.it.pages is None and its.taken == 0


def test_buffers_of_a_sum_on_disk_come_all_or_none(disk: Path) -> None:
    with parts(OnePage(double=True), (), disk=disk, device_pages=3) as made:  # two pages on one rank
        its = Driven(made, Tier.DISK)
        its.it.reserve()
        assert its.it.take_sum_buffers() == []  # nothing to add to
        its.record.send(GradEvent.ADD, BOTH)
        so_far = its.it.take_sum_buffers()
        assert [each.numel for each in so_far] == [NUMEL, NUMEL]
        with pytest.raises(CapacityError):
            its.it.take_sum_buffers()
        assert its.taken == 2
