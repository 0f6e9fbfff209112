"""Storages to RAM and back, with streams that complete by hand (the path of a CUDA device), and the buffers between."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError, UsageError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.activation_buffers import ActivationMover, HostBuffers, HostStore, StoragePlace
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import Copies, CopyStreams, Pair
from lightning_ptm.memory.transfer import LinkStats

GIB = 1 << 30


@dataclass
class HandCompletion:
    """Copies that run when somebody waits for them: no earlier than a device must have run them."""

    pairs: Sequence[Pair]
    orders: int = 0
    times: HandTimer = field(default_factory=lambda: HandTimer())

    def run(self) -> None:
        for pair in self.pairs:
            pair.target.copy_(pair.source)
        self.pairs = ()
        self.times.ended = True

    def done(self) -> bool:
        return not self.pairs

    def synchronize(self) -> None:
        self.run()

    def order(self) -> None:
        self.orders += 1
        self.run()

    def timer(self) -> HandTimer:
        return self.times


@dataclass
class HandTimer:
    """Every copy takes a quarter of a second."""

    ended: bool = False

    def done(self) -> bool:
        return self.ended

    def seconds(self) -> float:
        assert self.ended
        return 0.25


@dataclass
class HandStream:
    launched: list[HandCompletion] = field(default_factory=list)

    def mark(self) -> object:
        return None

    def launch(self, pairs: Sequence[Pair], after: object = None) -> HandCompletion:
        # The queue of a stream holds no reference to what it copies; whoever launches has to.
        completion = HandCompletion(pairs)
        self.launched.append(weakref.proxy(completion))
        return completion


class Bench:
    def __init__(self, free_bytes: int = 8 * GIB) -> None:
        self.to_host, self.to_device = HandStream(), HandStream()
        self.buffers = HostBuffers(CpuBackend(), free_bytes=lambda: free_bytes)
        streams = CopyStreams(self.to_device, self.to_host, Copies(CpuBackend()), Copies(CpuBackend()))
        self.events = Events()
        self.mover = ActivationMover(CpuBackend(), HostStore(streams, self.buffers, self.events))


class Memory(bytearray):
    """Memory whose end shows."""


def storage_of(values: Sequence[float]) -> tuple[Tensor, weakref.ref[Memory]]:
    """A tensor, and a reference that dies with its storage."""
    memory = Memory(torch.tensor(values).numpy().tobytes())
    return torch.frombuffer(memory, dtype=torch.float32), weakref.ref(memory)


def floats(storage: torch.UntypedStorage) -> list[float]:
    return torch.empty(0).set_(storage).tolist()


def test_a_storage_leaves_the_device_and_comes_back() -> None:
    bench = Bench()
    source, alive = storage_of([1.0, 2.0, 3.0])
    away = bench.mover.send(source[1:])  # a view: the whole storage goes
    del source
    gc.collect()
    assert alive() is not None and away.where is StoragePlace.LEAVING  # the copy has not run
    bench.mover.settle(away)
    assert alive() is None and away.where is StoragePlace.AWAY
    bench.mover.settle(away)  # once is enough
    bench.mover.bring(away)
    bench.mover.bring(away)
    assert away.where is StoragePlace.COMING and len(bench.to_device.launched) == 1
    assert floats(bench.mover.storage(away)) == [1.0, 2.0, 3.0]
    assert away.where is StoragePlace.BACK and bench.mover.sent_bytes == 12
    assert floats(bench.mover.storage(away)) == [1.0, 2.0, 3.0]
    assert len(bench.to_device.launched) == 1


def test_what_is_wanted_before_it_has_left_is_the_source_itself() -> None:
    bench = Bench()
    source, _ = storage_of([1.0, 2.0])
    away = bench.mover.send(source)
    assert bench.mover.storage(away).data_ptr() == source.data_ptr()
    assert bench.to_device.launched == []


@pytest.mark.parametrize("settled", [False, True])
def test_a_change_in_place_after_it_was_saved_is_refused_when_it_is_read(settled: bool) -> None:
    bench = Bench()
    source = torch.ones(4)
    away = bench.mover.send(source)
    assert away.still_holds(source[:2])
    source.add_(1.0)
    assert not away.still_holds(source)
    if settled:
        bench.mover.settle(away)
    with pytest.raises(UsageError, match="changed in place after the forward pass had saved it"):
        bench.mover.storage(away)


def test_buffers_are_used_again_and_never_under_a_copy() -> None:
    bench = Bench()
    away = bench.mover.send(torch.ones(1000))
    region = away.buffer
    assert region is not None
    del away  # nobody will read it; its copy is still to run
    other = bench.mover.send(torch.full((1000,), 2.0))
    # The compute stream was made to wait for the first copy before anybody could write to its buffer.
    assert other.buffer is region and region.tensor[:4].view(torch.float32).item() == 1.0
    bench.mover.settle(other)
    assert region.tensor[:4].view(torch.float32).item() == 2.0
    bench.mover.bring(other)
    del other  # forgotten on its way back
    third = bench.mover.send(torch.full((1000,), 3.0))
    assert third.buffer is region and bench.buffers.total_bytes == 4096
    bench.mover.settle(third)
    assert floats(bench.mover.storage(third)) == [3.0] * 1000


def test_copies_are_counted_and_told_when_they_have_ended_and_hold_no_memory() -> None:
    bench = Bench()
    told: list[Event] = []
    source, alive = storage_of([1.0] * 256)
    with bench.events.subscribed(told.append):
        away = bench.mover.send(source, "blocks.0/activations")
        del source
        assert bench.mover.links()["activations_to_host"] == LinkStats(0, 0, 0.0)  # it runs
        assert told == []
        bench.mover.settle(away)
        assert alive() is None  # whoever counts holds nothing
        assert bench.mover.links()["activations_to_host"] == LinkStats(1024, 1, 0.25)
        bench.mover.bring(away)
        bench.mover.storage(away)
        assert bench.mover.links()["activations_to_device"] == LinkStats(1024, 1, 0.25)
    assert [(event.kind, event.track, event.name, event.bytes) for event in told] == [
        (EventKind.COPY, "activations_to_host", "blocks.0/activations", 1024),
        (EventKind.COPY, "activations_to_device", "blocks.0/activations", 1024),
    ]
    assert all(event.end_s - event.begin_s == pytest.approx(0.25) for event in told)


def test_the_table_of_where_a_storage_may_be() -> None:
    legal = {
        (StoragePlace.LEAVING, StoragePlace.AWAY),
        (StoragePlace.AWAY, StoragePlace.COMING),
        (StoragePlace.COMING, StoragePlace.BACK),
    }
    for before in StoragePlace:
        for after in StoragePlace:
            away = Bench().mover.send(torch.ones(2))
            away.where = before
            if (before, after) in legal:
                away.to(after)
                assert away.where is after
            else:
                with pytest.raises(InternalError, match=f"cannot change from {before.value} to {after.value}"):
                    away.to(after)
                assert away.where is before


def test_a_buffer_is_little_larger_than_what_it_holds() -> None:
    buffers = HostBuffers(CpuBackend(), free_bytes=lambda: 1 << 50)
    for size in (1, 4096, 4097, 100_000, 1_000_000, 3_333_333):
        region = buffers.take(size)
        assert size <= region.tensor.numel() <= max(size * 1.125 + 1, size + 4095)
        region.close()


def test_buffers_of_other_sizes_are_used_or_given_up() -> None:
    free = [GIB + 300_000]
    buffers = HostBuffers(CpuBackend(), free_bytes=lambda: free[0])
    first = buffers.take(200_000)
    free[0] -= first.tensor.numel()
    buffers.give(first)
    assert buffers.take(150_000) is first  # less than twice of what is needed
    buffers.give(first)
    with pytest.raises(CapacityError, match=r"needs 47.68 MiB more, but only .* of RAM are free .* lower host_memory"):
        buffers.take(50_000_000)
    assert buffers.total_bytes == 0  # idle ones were given up first
    assert buffers.take(4096).tensor.numel() == 4096


def test_storages_may_be_forgotten_by_any_thread() -> None:
    bench = Bench()
    held = [bench.mover.send(torch.full((100,), float(number))) for number in range(8)]
    for away in held:
        bench.mover.settle(away)
    thread = threading.Thread(target=held.clear)
    thread.start()
    del away
    thread.join()
    again = [bench.mover.send(torch.ones(100)) for _ in range(8)]
    assert bench.buffers.total_bytes == 8 * 4096 and len({away.buffer for away in again}) == 8


def test_what_outlives_the_mover_gives_its_memory_up() -> None:
    bench = Bench()
    away = bench.mover.send(torch.ones(100))
    region = away.buffer
    assert region is not None
    bench.mover.close()
    del away
    assert region.tensor.numel() == 0


def test_what_outlives_the_mover_on_its_way_back_gives_its_memory_up_behind_the_copy() -> None:
    bench = Bench()
    away = bench.mover.send(torch.ones(100))
    bench.mover.settle(away)
    bench.mover.bring(away)
    bench.mover.close()
    target, coming = away.device, away.completion
    assert target is not None and isinstance(coming, HandCompletion) and not coming.done()
    del away
    assert coming.done() and target.view(torch.float32).tolist() == [1.0] * 100


@pytest.mark.parametrize("closes", [False, True])
def test_what_was_forgotten_on_its_way_gives_its_buffer_back_behind_the_copy(closes: bool) -> None:
    bench = Bench()
    away = bench.mover.send(torch.ones(100))
    leaving = away.completion
    assert isinstance(leaving, HandCompletion)
    del away
    assert not leaving.done()
    if closes:
        bench.mover.close()
    else:
        bench.mover.send(torch.ones(100))
    assert leaving.done() and leaving.orders == (0 if closes else 1)
