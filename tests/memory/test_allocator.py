"""Allocate, release, copy, move and merge over the three tiers of a CPU machine, on poisoned pages."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_ptm.errors import CapacityError, ConfigError, InternalError, UsageError
from lightning_ptm.memory import region
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.transfer import Copy
from lightning_ptm.terms import BLOCK_BYTES, TIERS, Tier

from .conftest import PAGE, MakeAllocator
from .files import CountedFiles, HandDrivenFiles

FLOATS_PER_PAGE = PAGE // 4
BLOCK_FLOATS = 1024
TAPE = dataclasses.replace(Tier.DISK, name="TAPE")
EVERY_LINK = list(itertools.product(TIERS, TIERS))


def filled(allocator: Allocator, name: str, values: torch.Tensor, tier: Tier) -> PagedTensor:
    """A tensor of `tier` that holds `values`."""
    start = Tier.HOST if tier is Tier.DISK else tier
    tensor = allocator.allocate(name, values.numel(), values.dtype, start)
    tensor.tensor().copy_(values)
    allocator.move(tensor, tier).wait()
    return tensor


def read(allocator: Allocator, tensor: PagedTensor) -> torch.Tensor:
    """The tensor's elements, wherever they are."""
    buffer = allocator.allocate("read", tensor.numel, tensor.dtype, Tier.HOST)
    allocator.merge(buffer)
    allocator.copy(tensor, buffer).wait()
    values = buffer.tensor().clone()
    allocator.release(buffer)
    return values


def scatter(allocator: Allocator, tier: Tier, pages: int) -> None:
    """Fill a tier so that exactly `pages` pages are free and no two of them are neighbours."""
    single = [allocator.allocate(f"page {index}", FLOATS_PER_PAGE, torch.float32, tier) for index in range(2 * pages)]
    left = allocator.free_bytes(tier) // 4
    if left:
        allocator.allocate("the rest", left, torch.float32, tier)
    for tensor in single[::2]:
        allocator.release(tensor)


# Allocation.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_view_has_the_shape_and_dtype_and_the_pages_bytes(
    make_allocator: MakeAllocator, tier: Tier, dtype: torch.dtype
) -> None:
    tensor = make_allocator().allocate("x", 40_001, dtype, tier)
    view = tensor.tensor()
    assert (view.shape, view.dtype) == ((40_001,), dtype)
    assert view.data_ptr() % 4096 == 0
    assert sum(span.bytes for span in tensor.pages.spans) == -(-tensor.nbytes // 4096) * 4096
    view.fill_(1)
    assert tensor.tensor().eq(1).all()


def test_pages_are_counted_per_tier(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=8)
    tensor = allocator.allocate("x", 3 * FLOATS_PER_PAGE + 1, torch.float32, Tier.HOST)
    assert allocator.free_bytes(Tier.HOST) == 4 * PAGE
    assert allocator.free_bytes(Tier.DEVICE) == allocator.capacity_bytes(Tier.DEVICE) == 8 * PAGE
    allocator.release(tensor)
    assert allocator.free_bytes(Tier.HOST) == 8 * PAGE
    assert allocator.peak_bytes(Tier.HOST) == 4 * PAGE


def test_too_large_is_refused_with_the_setting_to_raise(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=4)
    with pytest.raises(CapacityError, match=r"layers.0 gathered needs 5 pages.*raise device_memory"):
        allocator.allocate("layers.0 gathered", 4 * FLOATS_PER_PAGE + 1, torch.float32, Tier.DEVICE)
    assert allocator.free_bytes(Tier.DEVICE) == 4 * PAGE
    assert allocator.live_tensors() == ()


def test_empty_tensor_takes_no_page(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator()
    for tier in TIERS:
        tensor = allocator.allocate("nothing", 0, torch.float32, tier)
        assert allocator.free_bytes(tier) == allocator.capacity_bytes(tier)
        allocator.copy(tensor, tensor).wait()
        allocator.release(tensor)
    assert allocator.allocate("nothing", 0, torch.float32, Tier.HOST).tensor().shape == (0,)


def test_scattered_tensor_has_no_view_until_merged(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=16)
    scatter(allocator, Tier.HOST, 4)
    values = torch.arange(3.0 * FLOATS_PER_PAGE)
    tensor = allocator.allocate("x", values.numel(), torch.float32, Tier.HOST)
    assert not tensor.is_contiguous
    with pytest.raises(UsageError, match="scattered over 3 pages; merge it first"):
        tensor.tensor()
    source = filled(allocator, "source", values, Tier.DEVICE)
    allocator.copy(source, tensor).wait()
    with pytest.raises(CapacityError, match="x needs 3 pages"):
        allocator.merge(tensor)
    for other in allocator.live_tensors():
        if other.name.startswith("page "):
            allocator.release(other)
    allocator.merge(tensor)
    assert torch.equal(tensor.tensor(), values)


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_merge_keeps_the_values(make_allocator: MakeAllocator, tier: Tier) -> None:
    allocator = make_allocator(pages=16)
    small = [allocator.allocate(f"page {index}", 1, torch.float32, tier) for index in range(12)]
    for tensor in small[::2]:
        allocator.release(tensor)
    values = torch.arange(4.5 * FLOATS_PER_PAGE)
    scattered = allocator.allocate("x", values.numel(), torch.float32, tier)
    assert not scattered.is_contiguous
    other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
    allocator.copy(filled(allocator, "source", values, other), scattered).wait()
    for tensor in small[1::2]:
        allocator.release(tensor)
    allocator.merge(scattered)
    assert scattered.is_contiguous
    assert allocator.free_bytes(tier) == 11 * PAGE
    allocator.copy(scattered, allocator.live_tensors()[-1]).wait()
    assert torch.equal(allocator.live_tensors()[-1].tensor(), values)


# Shared tails: tensors end to end.


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_shared_tail_begins_where_the_last_one_ended(make_allocator: MakeAllocator, tier: Tier) -> None:
    allocator = make_allocator(pages=8)
    first = allocator.allocate("a", FLOATS_PER_PAGE + 10, torch.float32, tier, shared_tail=True)
    second = allocator.allocate("b", FLOATS_PER_PAGE, torch.float32, tier, shared_tail=True)
    assert second.pages.spans[0].frame == first.pages.spans[-1].frame
    assert second.pages.spans[0].offset_bytes == 4096
    assert second.is_contiguous
    assert allocator.free_bytes(tier) == 5 * PAGE
    values = [torch.full((FLOATS_PER_PAGE + 10,), 1.0), torch.full((FLOATS_PER_PAGE,), 2.0)]
    for tensor, value in zip((first, second), values, strict=True):
        allocator.copy(
            filled(allocator, "v", value, Tier.HOST if tier is not Tier.HOST else Tier.DEVICE), tensor
        ).wait()
    for tensor, value in zip((first, second), values, strict=True):
        assert torch.equal(read(allocator, tensor), value)


def test_small_tensors_fill_a_page_and_the_next_begins_in_it(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=8)
    tensors = [allocator.allocate(name, 8, torch.float32, Tier.HOST, shared_tail=True) for name in "abcd"]
    assert {tensor.pages.spans[0].frame for tensor in tensors} == {0}
    starts = [tensor.pages.spans[0].offset_bytes for tensor in tensors]
    assert starts == [place * starts[1] for place in range(4)] and starts[1] > 0
    large = allocator.allocate("large", FLOATS_PER_PAGE, torch.float32, Tier.HOST, shared_tail=True)
    assert (
        large.pages.spans[0].frame == 0 and large.pages.spans[0].offset_bytes == 4 * starts[1] and large.is_contiguous
    )
    assert allocator.free_bytes(Tier.HOST) == 6 * PAGE
    for value, tensor in enumerate(tensors):
        tensor.tensor().fill_(float(value))
    large.tensor().fill_(9.0)
    allocator.release(tensors[1])
    assert [float(each.tensor()[0]) for each in (tensors[0], *tensors[2:], large)] == [0.0, 2.0, 3.0, 9.0]
    assert allocator.free_bytes(Tier.HOST) == 6 * PAGE


def test_shared_page_is_free_when_both_are_gone(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=2)
    first, second = (allocator.allocate(name, 8, torch.float32, Tier.HOST, shared_tail=True) for name in "ab")
    second.tensor().fill_(2.0)
    allocator.release(first)
    assert allocator.free_bytes(Tier.HOST) == PAGE
    assert second.tensor().tolist() == [2.0] * 8, "releasing a tensor poisoned its neighbour"
    allocator.release(second)
    assert allocator.free_bytes(Tier.HOST) == 2 * PAGE


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_without_elements_a_tensor_has_no_part_of_a_shared_tail(make_allocator: MakeAllocator, tier: Tier) -> None:
    allocator = make_allocator()
    tensors = [allocator.allocate(f"of {n}", n, torch.float32, tier, shared_tail=True) for n in (8, 0, 8)]
    assert [len(tensor.pages.spans) for tensor in tensors] == [1, 0, 1]
    assert tensors[0].pages.spans[0].frame == tensors[2].pages.spans[0].frame
    for tensor in tensors:
        allocator.release(tensor)
    assert allocator.free_bytes(tier) == allocator.capacity_bytes(tier)


def test_shared_tail_stays_whole_when_the_next_page_is_taken(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=8)
    allocator.allocate("a", 8, torch.float32, Tier.DEVICE, shared_tail=True)
    allocator.allocate("in the way", 8, torch.float32, Tier.DEVICE)
    second = allocator.allocate("b", FLOATS_PER_PAGE, torch.float32, Tier.DEVICE, shared_tail=True)
    assert second.is_contiguous
    assert second.pages.spans[0].offset_bytes == 0


def test_released_tail_is_not_continued(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=8)
    first = allocator.allocate("a", 8, torch.float32, Tier.HOST, shared_tail=True)
    allocator.release(first)
    allocator.allocate("now here", 2048, torch.float32, Tier.HOST)
    second = allocator.allocate("b", 8, torch.float32, Tier.HOST, shared_tail=True)
    assert second.pages.spans[0].frame == 1


# Copies and moves.


@pytest.mark.parametrize(("source_tier", "target_tier"), EVERY_LINK)
@pytest.mark.parametrize("numel", [1, BLOCK_FLOATS, FLOATS_PER_PAGE, 3 * FLOATS_PER_PAGE + 77])
def test_copy_over_every_link(make_allocator: MakeAllocator, source_tier: Tier, target_tier: Tier, numel: int) -> None:
    allocator = make_allocator(pages=16, paths=2)
    values = torch.randn(numel)
    source = filled(allocator, "source", values, source_tier)
    target = allocator.allocate("target", numel, torch.float32, target_tier)
    transfer = allocator.copy(source, target)
    transfer.wait()
    transfer.wait()
    assert transfer.done()
    assert torch.equal(read(allocator, target), values)
    assert torch.equal(read(allocator, source), values)


@pytest.mark.parametrize(("source_tier", "target_tier"), EVERY_LINK)
@pytest.mark.parametrize("numel", [5, BLOCK_FLOATS + 3, 2 * FLOATS_PER_PAGE, 2 * FLOATS_PER_PAGE + 1001])
@pytest.mark.parametrize("aligned", [True, False])
def test_ragged_range_changes_nothing_else(
    make_allocator: MakeAllocator, source_tier: Tier, target_tier: Tier, numel: int, aligned: bool
) -> None:
    """Ranges in the middle of both tensors; in RAM also at starts that are no multiple of a block."""
    allocator = make_allocator(pages=16)
    whole = 4 * FLOATS_PER_PAGE
    values, old = torch.randn(whole), torch.randn(whole)
    source, target = filled(allocator, "source", values, source_tier), filled(allocator, "target", old, target_tier)
    source_start = 3 * BLOCK_FLOATS if aligned or source_tier is Tier.DISK else 777
    target_start = 7 * BLOCK_FLOATS if aligned or target_tier is Tier.DISK else 13
    allocator.copy(source, target, source_start=source_start, target_start=target_start, numel=numel).wait()
    expected = old.clone()
    expected[target_start : target_start + numel] = values[source_start : source_start + numel]
    assert torch.equal(read(allocator, target), expected)
    assert torch.equal(read(allocator, source), values)


@pytest.mark.parametrize("other", TIERS, ids=str)
def test_scattered_pages_are_copied_both_ways(make_allocator: MakeAllocator, other: Tier) -> None:
    allocator = make_allocator(pages=16, paths=2)
    scatter(allocator, Tier.HOST, 4)
    values = torch.randn(2 * FLOATS_PER_PAGE + 5)
    middle = allocator.allocate("scattered", values.numel(), torch.float32, Tier.HOST)
    assert not middle.is_contiguous
    start = filled(allocator, "start", values, Tier.DEVICE)
    allocator.move(start, other if other is not Tier.HOST else Tier.DEVICE).wait()
    allocator.copy(start, middle).wait()
    back = allocator.allocate("back", values.numel(), torch.float32, Tier.DEVICE)
    allocator.copy(middle, back).wait()
    assert torch.equal(back.tensor(), values)
    # Not from the first element: page borders of source and target then differ.
    allocator.copy(back, middle, source_start=3, target_start=100, numel=FLOATS_PER_PAGE + 9).wait()
    allocator.copy(middle, back, source_start=100, target_start=3, numel=FLOATS_PER_PAGE + 9).wait()
    assert torch.equal(back.tensor(), values)


@pytest.mark.parametrize(("source_tier", "target_tier"), EVERY_LINK)
def test_move_there_keeps_the_object_and_frees_the_old_pages(
    make_allocator: MakeAllocator, source_tier: Tier, target_tier: Tier
) -> None:
    allocator = make_allocator(pages=8)
    values = torch.randn(2 * FLOATS_PER_PAGE + 5)
    tensor = filled(allocator, "x", values, source_tier)
    allocator.move(tensor, target_tier).wait()
    assert tensor.tier is target_tier
    assert allocator.free_bytes(target_tier) == 5 * PAGE
    if source_tier is not target_tier:
        assert allocator.free_bytes(source_tier) == 8 * PAGE
    assert torch.equal(read(allocator, tensor), values)


def test_move_without_room_changes_nothing(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=4)
    allocator.allocate("in the way", 2 * FLOATS_PER_PAGE, torch.float32, Tier.HOST)
    tensor = filled(allocator, "x", torch.ones(3 * FLOATS_PER_PAGE), Tier.DEVICE)
    with pytest.raises(CapacityError, match="host_memory"):
        allocator.move(tensor, Tier.HOST)
    assert tensor.tier is Tier.DEVICE
    assert tensor.tensor().sum().item() == 3 * FLOATS_PER_PAGE
    assert allocator.free_bytes(Tier.HOST) == 2 * PAGE


def test_stats_count_bytes_and_transfers_of_each_link(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator()
    host = allocator.allocate("x", 1000, torch.float32, Tier.HOST)
    disk = allocator.allocate("y", 1000, torch.float32, Tier.DISK)
    for _ in range(3):
        allocator.copy(host, disk).wait()
    allocator.copy(disk, host, numel=10).wait()
    stats = allocator.stats()
    assert stats.keys() == {(Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST)}
    written, fetched = stats[Tier.HOST, Tier.DISK], stats[Tier.DISK, Tier.HOST]
    assert (written.bytes, written.transfers) == (12_000, 3)
    assert (fetched.bytes, fetched.transfers) == (40, 1)
    assert written.busy_s > 0
    assert written.bytes_per_s == written.bytes / written.busy_s
    both = allocator.disk_stats()
    assert (both.bytes, both.transfers) == (12_040, 4)
    assert max(written.busy_s, fetched.busy_s) <= both.busy_s <= 1.01 * (written.busy_s + fetched.busy_s) + 1e-3


def test_bytes_go_to_every_path(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(pages=16, paths=3)
    values = torch.randn(7 * FLOATS_PER_PAGE)
    tensor = filled(allocator, "x", values, Tier.DISK)
    disk = allocator._machine.disk
    assert disk is not None
    assert [disk.lane(span.frame) for span in tensor.pages.spans] == [0, 1, 2, 0, 1, 2, 0]
    sizes = [os.fstat(file).st_size for file in disk._files]
    assert sizes == [6 * PAGE, 5 * PAGE, 5 * PAGE]
    assert torch.equal(read(allocator, tensor), values)


# Order: conflicting transfers are refused, others are not.


@pytest.fixture
def on_hold(make_allocator: MakeAllocator) -> tuple[Allocator, HandDrivenFiles, PagedTensor, PagedTensor]:
    """An allocator whose disk moves by hand, a tensor of two pages in RAM and one on disk."""
    files = HandDrivenFiles()
    allocator = make_allocator(files=files, poison=False)
    ram = allocator.allocate("ram", 2 * FLOATS_PER_PAGE, torch.float32, Tier.HOST)
    ram.tensor().copy_(torch.arange(2.0 * FLOATS_PER_PAGE))
    return allocator, files, ram, allocator.allocate("disk", 2 * FLOATS_PER_PAGE, torch.float32, Tier.DISK)


Held = tuple[Allocator, HandDrivenFiles, PagedTensor, PagedTensor]


def test_conflicting_copies_and_releases_are_refused_until_the_transfer_is_over(on_hold: Held) -> None:
    allocator, files, ram, disk = on_hold
    transfer = allocator.copy(ram, disk)
    assert not transfer.done()
    other = allocator.allocate("other", 2 * FLOATS_PER_PAGE, torch.float32, Tier.HOST)
    for conflict in (
        lambda: allocator.copy(disk, other),  # reads what is arriving
        lambda: allocator.copy(other, disk),  # writes what is arriving
        lambda: allocator.copy(other, ram),  # writes what is leaving
        lambda: allocator.release(ram),
        lambda: allocator.release(disk),
        lambda: allocator.move(disk, Tier.HOST),
    ):
        with pytest.raises(InternalError):
            conflict()
    allocator.copy(ram, other).wait()  # what is leaving may be read
    files.let_go(2)
    transfer.wait()
    assert torch.equal(other.tensor(), ram.tensor())
    allocator.release(ram)
    files.let_go(2)
    allocator.copy(disk, other).wait()
    allocator.release(disk)


def test_refused_copy_holds_nothing(on_hold: Held) -> None:
    allocator, files, ram, disk = on_hold
    transfer = allocator.copy(ram, disk, source_start=FLOATS_PER_PAGE, target_start=FLOATS_PER_PAGE)
    other = allocator.allocate("other", 2 * FLOATS_PER_PAGE, torch.float32, Tier.DEVICE)
    with pytest.raises(InternalError, match="copying other to ram"):
        allocator.copy(other, ram)  # its first page is free, its second is leaving
    files.let_go(1)
    transfer.wait()
    allocator.copy(other, ram).wait()


def test_copies_that_begin_together_end_on_disk_as_one_transfer(on_hold: Held) -> None:
    allocator, files, ram, disk = on_hold
    other = allocator.allocate("other", FLOATS_PER_PAGE, torch.float32, Tier.DEVICE)
    half = Copy(ram, disk, 0, 0, FLOATS_PER_PAGE), Copy(ram, disk, FLOATS_PER_PAGE, FLOATS_PER_PAGE, FLOATS_PER_PAGE)
    at_once, together = allocator.copy_all([half[0], Copy(ram, other, 5, 0, 100), half[1]])
    assert at_once.done() and torch.equal(other.tensor()[:100], ram.tensor()[5:105])
    files.let_go(1)
    files.started.acquire()
    files.started.acquire()
    with pytest.raises(InternalError):
        allocator.release(ram)  # one is still at the disk
    assert not together.done()
    files.let_go(1)
    together.wait()
    files.let_go(2)
    assert torch.equal(read(allocator, disk), ram.tensor())
    assert sum(link.transfers for link in allocator.stats().values()) == 4


@pytest.mark.parametrize("wrong", [InternalError, UsageError])
def test_of_copies_that_begin_together_none_is_started_if_one_cannot(on_hold: Held, wrong: type[Exception]) -> None:
    allocator, files, ram, disk = on_hold
    other = allocator.allocate("other", FLOATS_PER_PAGE, torch.float32, Tier.DEVICE)
    second = Copy(disk, ram, 0, 0, 1024) if wrong is InternalError else Copy(disk, ram, 3)
    with pytest.raises(wrong):
        allocator.copy_all([Copy(ram, other), second, Copy(ram, disk)])
    transfer = allocator.copy(ram, disk)  # nothing is held
    files.let_go(2)
    transfer.wait()


def test_two_ends_of_one_page_travel_at_once(on_hold: Held) -> None:
    allocator, files, ram, disk = on_hold
    half = FLOATS_PER_PAGE // 2
    out = allocator.copy(ram, disk, numel=half)
    into = allocator.copy(disk, ram, source_start=half, target_start=half, numel=half)
    files.started.acquire()
    files.started.acquire()  # both are at the disk at the same time
    files.let_go(2)
    out.wait()
    into.wait()


def test_moving_tensor_cannot_be_used(on_hold: Held) -> None:
    allocator, files, ram, _ = on_hold
    values = ram.tensor().clone()
    transfer = allocator.move(ram, Tier.DISK)
    for use in (ram.tensor, lambda: allocator.release(ram), lambda: allocator.move(ram, Tier.HOST)):
        with pytest.raises(UsageError, match="being moved"):
            use()
    files.let_go(2)
    transfer.wait()
    with pytest.raises(UsageError, match="on disk"):
        ram.tensor()
    files.let_go(2)
    allocator.move(ram, Tier.DEVICE).wait()
    assert torch.equal(ram.tensor(), values)


# Poison.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_released_bytes_are_nan(make_allocator: MakeAllocator, tier: Tier, dtype: torch.dtype) -> None:
    allocator = make_allocator()
    tensor = filled(allocator, "x", torch.ones(1000, dtype=dtype), tier)
    frame = tensor.pages.spans[0].frame
    view = tensor.tensor() if tier is not Tier.DISK else None
    allocator.release(tensor)
    if view is not None:
        assert view.isnan().all()
    again = allocator.allocate("y", 1000, dtype, tier)
    assert again.pages.spans[0].frame == frame
    assert read(allocator, again).isnan().all()


def test_first_use_of_a_page_is_nan_too(make_allocator: MakeAllocator) -> None:
    assert make_allocator().allocate("x", 9, torch.float32, Tier.HOST).tensor().isnan().all()


# Misuse and settings.


def test_released_tensor_is_refused_everywhere(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator()
    tensor, other = (allocator.allocate(name, 8, torch.float32, Tier.HOST) for name in "ab")
    allocator.release(tensor)
    for use in (
        tensor.tensor,
        lambda: allocator.release(tensor),
        lambda: allocator.copy(tensor, other),
        lambda: allocator.copy(other, tensor),
        lambda: allocator.move(tensor, Tier.DISK),
        lambda: allocator.merge(tensor),
    ):
        with pytest.raises(UsageError, match="released"):
            use()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_start": -1}, "are not in a"),
        ({"source_start": 5000, "numel": 2000}, "are not in a"),
        ({"target_start": 4096, "numel": 3000}, "are not in b"),
        ({"target_start": 100}, "multiples of 1024 elements"),
        ({"numel": -1}, "are not in"),
    ],
)
def test_bad_ranges_are_refused(make_allocator: MakeAllocator, arguments: dict[str, int], message: str) -> None:
    allocator = make_allocator()
    source = allocator.allocate("a", 6000, torch.float32, Tier.HOST)
    target = allocator.allocate("b", 6000, torch.float32, Tier.DISK)
    with pytest.raises(UsageError, match=message):
        allocator.copy(source, target, **arguments)


def test_dtypes_must_agree(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator()
    source = allocator.allocate("a", 8, torch.float32, Tier.HOST)
    target = allocator.allocate("b", 8, torch.bfloat16, Tier.HOST)
    with pytest.raises(UsageError, match="cast first"):
        allocator.copy(source, target)


def test_copy_within_a_tensor_must_not_overlap_itself(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator()
    tensor = allocator.allocate("a", 100, torch.float32, Tier.HOST)
    with pytest.raises(UsageError, match="overlaps itself"):
        allocator.copy(tensor, tensor, source_start=10, target_start=50, numel=50)
    tensor.tensor().copy_(torch.arange(100.0))
    allocator.copy(tensor, tensor, target_start=50, numel=50).wait()
    assert tensor.tensor().tolist() == [*range(50), *range(50)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 100_000}, "multiple of 4096"),
        ({"page_size": 32768}, "at least 65536"),
        ({"sizes": {Tier.HOST: 1000}}, "host tier has 1000 bytes.*raise host_memory"),
        ({"sizes": {Tier.DEVICE: -1}}, "raise device_memory"),
        ({"sizes": {Tier.DISK: PAGE}}, "no disk_path"),
        ({"sizes": {Tier.DISK: PAGE, TAPE: PAGE}, "disk_paths": [Path()]}, "disk and tape tiers are both on disk"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"page_size": PAGE, "sizes": {Tier.DEVICE: PAGE}} | changes
    with pytest.raises(ConfigError, match=message):
        Allocator(backend=CpuBackend(), **arguments)


def test_tier_of_no_bytes_is_empty() -> None:
    with Allocator(page_size=PAGE, backend=CpuBackend(), sizes={Tier.DEVICE: 2 * PAGE + 5}) as allocator:
        assert allocator.capacity_bytes(Tier.DEVICE) == 2 * PAGE
        with pytest.raises(CapacityError, match="host_memory"):
            allocator.allocate("x", 1, torch.float32, Tier.HOST)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_tensors_without_elements_go_to_and_from_tiers_without_bytes(tier: Tier) -> None:
    with Allocator(page_size=PAGE, backend=CpuBackend(), sizes={Tier.DEVICE: PAGE}, poison=True) as allocator:
        here = allocator.allocate("here", 0, torch.float32, Tier.DEVICE)
        there = allocator.allocate("there", 0, torch.float32, tier)
        for source, target in ((here, there), (there, here), (there, there)):
            allocator.copy(source, target).wait()
        allocator.move(here, tier).wait()
        assert here.tier is tier and allocator.free_bytes(Tier.DEVICE) == PAGE
        allocator.merge(here)
        allocator.release(here)


# Closing.


def test_close_leaves_no_thread_file_or_tensor(make_allocator: MakeAllocator) -> None:
    files_before = set(os.listdir("/proc/self/fd"))
    allocator = make_allocator(paths=2)
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("ptm-io")]) == 4
    tensor = filled(allocator, "x", torch.ones(5), Tier.HOST)
    allocator.close()
    allocator.close()
    assert set(os.listdir("/proc/self/fd")) <= files_before
    assert [thread for thread in threading.enumerate() if thread.name.startswith("ptm-io")] == []
    assert tensor.is_released
    allocator.release(tensor)
    with pytest.raises(UsageError, match="closed"):
        allocator.allocate("x", 1, torch.float32, Tier.HOST)


def test_view_taken_before_close_stays_readable(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator()
    view = filled(allocator, "x", torch.ones(5), Tier.HOST).tensor()
    allocator.close()
    assert view.tolist() == [1.0] * 5


def test_close_finishes_what_runs_and_fails_what_is_queued(on_hold: Held) -> None:
    allocator, files, ram, disk = on_hold
    running = [allocator.copy(ram, disk, numel=FLOATS_PER_PAGE)]
    running.append(
        allocator.copy(ram, disk, source_start=FLOATS_PER_PAGE, target_start=FLOATS_PER_PAGE, numel=FLOATS_PER_PAGE)
    )
    files.started.acquire()
    files.started.acquire()
    other = allocator.allocate("other", 2 * FLOATS_PER_PAGE, torch.float32, Tier.DISK)
    queued = allocator.copy(ram, other)
    closing = threading.Thread(target=allocator.close)
    closing.start()
    with pytest.raises(UsageError, match="closed while this transfer was queued"):
        queued.wait()
    files.let_go(2)
    closing.join()
    for transfer in running:
        transfer.wait()


class AllocatorAgainstTensors(RuleBasedStateMachine):
    """Random allocations, copies, moves, merges and releases over three tiers, against ordinary tensors."""

    PAGES = 10

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.allocator = Allocator(
            page_size=PAGE,
            backend=CpuBackend(),
            sizes=dict.fromkeys(TIERS, self.PAGES * PAGE),
            disk_paths=[Path(self.folder.name)] * 2,
            poison=True,
        )
        self.all_nan = self.allocator.allocate("nan", 3 * FLOATS_PER_PAGE, torch.float32, Tier.DEVICE)
        self.live: list[tuple[PagedTensor, torch.Tensor]] = []
        self.values = itertools.count(1)

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for tensor in self.allocator.live_tensors():
                self.allocator.release(tensor)
            for tier in TIERS:
                assert self.allocator.free_bytes(tier) == self.allocator.capacity_bytes(tier), "a page leaked"
            self.allocator.close()
            self.folder.cleanup()

    def pick(self, index: int) -> int:
        return index % len(self.live)

    @rule(numel=st.integers(1, 3 * FLOATS_PER_PAGE), tier=st.sampled_from(TIERS), shared_tail=st.booleans())
    def allocate(self, numel: int, tier: Tier, shared_tail: bool) -> None:
        try:
            tensor = self.allocator.allocate("x", numel, torch.float32, tier, shared_tail=shared_tail)
        except CapacityError:
            assert self.allocator.free_bytes(tier) < numel * 4
            return
        fresh = torch.arange(numel, dtype=torch.float32) + float(next(self.values))
        if tier is not Tier.DISK and tensor.is_contiguous:
            assert tensor.tensor().isnan().all(), "a page was handed out with somebody's bytes"
            tensor.tensor().copy_(fresh)
        else:
            fresh.fill_(torch.nan)
            self.allocator.copy(self.all_nan, tensor, numel=numel).wait()
        self.live.append((tensor, fresh))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        tensor, _ = self.live.pop(self.pick(index))
        self.allocator.release(tensor)

    @precondition(lambda self: len(self.live) > 1)
    @rule(a=st.integers(0, 99), b=st.integers(0, 99), starts=st.tuples(*[st.integers(0, 9)] * 2), data=st.data())
    def copy(self, a: int, b: int, starts: tuple[int, int], data: st.DataObject) -> None:
        (source, source_values), (target, target_values) = self.live[self.pick(a)], self.live[self.pick(b)]
        if source is target:
            return
        source_start, target_start = (start * BLOCK_FLOATS for start in starts)
        longest = min(source.numel - source_start, target.numel - target_start)
        if longest <= 0:
            return
        numel = data.draw(st.integers(1, longest))
        self.allocator.copy(source, target, source_start=source_start, target_start=target_start, numel=numel).wait()
        target_values[target_start : target_start + numel] = source_values[source_start : source_start + numel]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), tier=st.sampled_from(TIERS))
    def move(self, index: int, tier: Tier) -> None:
        tensor, _ = self.live[self.pick(index)]
        before = tensor.tier
        try:
            self.allocator.move(tensor, tier).wait()
            assert tensor.tier is tier
        except CapacityError:
            assert tensor.tier is before

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99))
    def merge(self, index: int) -> None:
        tensor, _ = self.live[self.pick(index)]
        try:
            self.allocator.merge(tensor)
            assert tensor.is_contiguous
        except CapacityError:
            assert not tensor.is_contiguous

    @invariant()
    def values_in_ram_are_right(self) -> None:
        for tensor, values in getattr(self, "live", []):
            if tensor.tier is not Tier.DISK and tensor.is_contiguous:
                assert torch.equal(tensor.tensor().nan_to_num(-1.0), values.nan_to_num(-1.0))


AllocatorAgainstTensors.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAllocatorAgainstTensors = AllocatorAgainstTensors.TestCase


@pytest.mark.parametrize(("paths", "transfers"), [(1, [PAGE]), (2, [BLOCK_BYTES, PAGE - BLOCK_BYTES])])
def test_a_chunk_across_two_pages_of_one_file_is_one_transfer(
    make_allocator: MakeAllocator, paths: int, transfers: list[int]
) -> None:
    files = CountedFiles()
    allocator = make_allocator(paths=paths, files=files, poison=False, threads=1)
    before = allocator.allocate(
        "before", FLOATS_PER_PAGE - BLOCK_BYTES // 4, torch.float32, Tier.DISK, shared_tail=True
    )
    home = allocator.allocate("home", 3 * FLOATS_PER_PAGE, torch.float32, Tier.DISK, shared_tail=True)
    chunk = allocator.allocate("chunk", FLOATS_PER_PAGE, torch.float32, Tier.HOST)
    values = torch.arange(3 * FLOATS_PER_PAGE, dtype=torch.float32)
    for start in range(0, home.numel, FLOATS_PER_PAGE):
        chunk.tensor().copy_(values[start : start + FLOATS_PER_PAGE])
        allocator.copy(chunk, home, target_start=start).wait()
    for start in range(0, home.numel, FLOATS_PER_PAGE):
        allocator.copy(home, chunk, source_start=start).wait()
        assert torch.equal(chunk.tensor(), values[start : start + FLOATS_PER_PAGE])

    assert home.pages.spans[0].frame == before.pages.spans[0].frame
    assert sorted(files.moved) == sorted(transfers * 6)


# -- contents that nobody reads again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("system_page", [4096, 16384, 65536])
def test_discarded_contents_leave_ram_and_neighbours_keep_theirs(
    make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch, system_page: int
) -> None:
    monkeypatch.setattr(region.mmap, "PAGESIZE", system_page)
    allocator = make_allocator(poison=False)
    numel = 3 * PAGE // 4 + 3 * 1024  # ends inside of a page, where the next one begins
    before, between, after = (
        allocator.allocate(name, numel, torch.float32, Tier.DEVICE, shared_tail=True) for name in ("a", "b", "c")
    )
    for value, tensor in ((1.0, before), (2.0, between), (3.0, after)):
        tensor.tensor().fill_(value)
    free = allocator.free_bytes(Tier.DEVICE)
    allocator.discard(between)
    assert allocator.free_bytes(Tier.DEVICE) == free
    assert before.tensor().eq(1.0).all() and after.tensor().eq(3.0).all()
    given_back = between.tensor().eq(0.0)
    assert given_back.any() and (between.tensor().eq(2.0) | given_back).all()
    between.tensor().fill_(4.0)
    allocator.release(between)
    with pytest.raises(UsageError, match="is released"):
        allocator.discard(between)


def test_discarding_on_the_disk_does_nothing(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(poison=False)
    there, ram = (allocator.allocate("x", PAGE // 4, torch.float32, tier) for tier in (Tier.DISK, Tier.HOST))
    ram.tensor().fill_(5.0)
    allocator.copy(ram, there).wait()
    allocator.discard(there)
    ram.tensor().fill_(0.0)
    allocator.copy(there, ram).wait()
    assert ram.tensor().eq(5.0).all()


@pytest.mark.parametrize("whole_blocks", [False, True])
def test_the_rest_of_a_targets_block_is_overwritten_only_if_it_may_be(
    make_allocator: MakeAllocator, whole_blocks: bool
) -> None:
    allocator = make_allocator(poison=False)
    home = filled(allocator, "home", torch.full((3 * BLOCK_FLOATS,), 7.0), Tier.DISK)
    buffer = filled(allocator, "buffer", torch.zeros(3 * BLOCK_FLOATS), Tier.HOST)
    numel = BLOCK_FLOATS + 10
    allocator.copy(home, buffer, numel=numel, whole_blocks=whole_blocks).wait()
    values = buffer.tensor()
    assert values[:numel].eq(7.0).all() and values[2 * BLOCK_FLOATS :].eq(0.0).all()
    assert values[numel : 2 * BLOCK_FLOATS].eq(7.0 if whole_blocks else 0.0).all()
