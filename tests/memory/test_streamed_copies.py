"""Copies on streams, with a stream that completes by hand: the path of a CUDA device, on any machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.paged_tensor import PagedTensor, PageTable
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.memory.streams import CopyStreams, Pair
from lightning_ptm.memory.transfer import Copier, Copy, CopyMachine, Transfer
from lightning_ptm.terms import TIERS, Tier

from .conftest import PAGE


@dataclass
class HandCompletion:
    """Copies that run when `complete` is called, as a device would run them later."""

    pairs: Sequence[Pair]
    complete_now: bool = False
    orders: int = 0
    synchronized: int = 0

    def complete(self) -> None:
        for pair in self.pairs:
            pair.target.copy_(pair.source)
        self.pairs = ()
        self.complete_now = True

    def done(self) -> bool:
        return self.complete_now

    def synchronize(self) -> None:
        self.synchronized += 1
        self.complete()

    def order(self) -> None:
        self.orders += 1

    def end(self) -> HandCompletion:
        return self

    def seconds(self) -> float:
        return 0.25


@dataclass
class HandStream:
    launched: list[HandCompletion] = field(default_factory=list)

    def mark(self) -> object:
        return None

    def launch(self, pairs: Sequence[Pair], after: object = None) -> HandCompletion:
        self.launched.append(HandCompletion(pairs))
        return self.launched[-1]


class Bench:
    """A device tier and a host tier of four pages each, with streams moved by hand."""

    def __init__(self) -> None:
        self.to_device, self.to_host, self.within = HandStream(), HandStream(), HandStream()
        self.tables = {tier: PageTable(tier, 4, PAGE) for tier in TIERS}
        regions = {tier: HostRegion(4 * PAGE) for tier in (Tier.DEVICE, Tier.HOST)}
        streams = CopyStreams(self.to_device, self.to_host, self.within, self.within)
        self.machine = CopyMachine(PAGE, regions, None, streams, has_own_memory=True)
        self.lock = threading.RLock()
        self.copier = Copier(self.machine, None, self.lock)
        self.ids = 0

    def tensor(self, tier: Tier, value: float) -> PagedTensor:
        self.ids += 1
        tensor = PagedTensor(self.ids, f"{tier.name} {self.ids}", PAGE // 4, torch.float32, tier)
        pages = self.tables[tier].place(tensor.id, tensor.name, PAGE)
        tensor.place(tier, pages, self.machine.regions.get(tier))
        tensor.tensor().fill_(value)
        return tensor

    def copy(self, source: PagedTensor, target: PagedTensor) -> Transfer:
        with self.lock:
            copy = Copy(source, target)
            self.copier.begin((copy,))
        return self.copier.launch((copy,))[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_waiting_on_the_host_blocks_until_the_event(bench: Bench) -> None:
    source, target = bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)
    transfer = bench.copy(source, target)
    assert not transfer.done()
    assert target.tensor().eq(0).all()
    transfer.wait()
    assert transfer.done()
    assert target.tensor().eq(1).all()
    assert bench.to_device.launched[0].synchronized == 1


def test_what_goes_wrong_at_a_copys_end_is_raised_to_who_waits(bench: Bench) -> None:
    source, target = bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)
    transfer = bench.copy(source, target)
    source.pages.holds.clear()
    for _ in range(2):
        with pytest.raises(InternalError, match="ended twice"):
            transfer.wait()


def test_device_pages_are_handed_over_before_the_copy_has_ended(bench: Bench) -> None:
    source, target = bench.tensor(Tier.DEVICE, 1.0), bench.tensor(Tier.HOST, 0.0)
    transfer = bench.copy(source, target)
    completion = bench.to_host.launched[0]
    assert transfer.hand_over() is completion and not transfer.done()
    assert (completion.orders, completion.synchronized) == (0, 0)
    assert not source.pages.holds and target.pages.holds  # the home has its bytes later
    transfer.wait()
    assert target.tensor().eq(1).all() and not target.pages.holds
    assert transfer.hand_over() is None


def test_ordering_a_stream_does_not_block(bench: Bench) -> None:
    transfer = bench.copy(bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0))
    transfer.wait(host=False)
    completion = bench.to_device.launched[0]
    assert (completion.orders, completion.synchronized) == (1, 0)
    assert not transfer.done()
    completion.complete()
    assert transfer.done()


def test_pages_are_held_until_somebody_has_waited(bench: Bench) -> None:
    source, target = bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)
    bench.copy(source, target)
    with pytest.raises(InternalError, match="leaving"):
        bench.copy(bench.tensor(Tier.DEVICE, 2.0), source)
    with pytest.raises(InternalError, match="arriving"):
        bench.copy(bench.tensor(Tier.HOST, 2.0), target)


def test_event_that_completed_by_itself_lets_the_pages_go(bench: Bench) -> None:
    source, target = bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)
    bench.copy(source, target)
    bench.to_device.launched[0].complete()
    bench.copy(bench.tensor(Tier.HOST, 2.0), target)


def test_device_pages_are_free_for_later_copies_once_a_stream_is_ordered(bench: Bench) -> None:
    source, target = bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)
    bench.copy(source, target).wait(host=False)
    bench.copy(bench.tensor(Tier.HOST, 2.0), target)
    assert bench.to_device.launched[0].synchronized == 0


def test_host_pages_are_waited_for_when_a_stream_was_only_ordered(bench: Bench) -> None:
    """The host's bytes are still being read when the host wants to overwrite them: it must wait, not race or fail."""
    source, target = bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)
    bench.copy(source, target).wait(host=False)
    back = bench.copy(bench.tensor(Tier.DEVICE, 5.0), source)
    assert bench.to_device.launched[0].synchronized == 1
    assert target.tensor().eq(1).all()
    back.wait()
    assert source.tensor().eq(5).all()


def test_copy_within_the_device_is_ordered_by_the_current_stream(bench: Bench) -> None:
    source, target = bench.tensor(Tier.DEVICE, 1.0), bench.tensor(Tier.DEVICE, 0.0)
    bench.copy(source, target)
    bench.copy(target, source)
    assert len(bench.within.launched) == 2


def test_busy_seconds_come_from_the_events(bench: Bench) -> None:
    for _ in range(2):
        bench.copy(bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)).wait()
    link = bench.copier.stats()[Tier.HOST, Tier.DEVICE]
    assert (link.bytes, link.transfers, link.busy_s) == (2 * PAGE, 2, 0.5)


def test_a_copy_is_counted_when_it_has_ended(bench: Bench) -> None:
    """The time of a copy is known at its end; until then neither its bytes nor the time since its launch are
    counted."""
    for _ in range(2):
        bench.copy(bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0))
    counted = []
    for completion in (None, *bench.to_device.launched):
        if completion is not None:
            completion.complete()
        link = bench.copier.stats()[Tier.HOST, Tier.DEVICE]
        counted.append((link.bytes, link.transfers, link.busy_s))
    assert counted == [(0, 0, 0.0), (PAGE, 1, 0.25), (2 * PAGE, 2, 0.5)]


def test_closing_waits_for_every_copy(bench: Bench) -> None:
    transfers = [bench.copy(bench.tensor(Tier.HOST, 1.0), bench.tensor(Tier.DEVICE, 0.0)) for _ in range(2)]
    bench.copier.finish_streamed()
    assert [transfer.done() for transfer in transfers] == [True, True]
