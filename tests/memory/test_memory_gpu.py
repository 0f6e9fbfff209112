"""The allocator on a device of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kit.devices import HERE, keep_busy, on_device

from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.memory.activation_buffers import HostBuffers
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import backend_here
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.streams import Copies, Pair
from lightning_ptm.terms import TIERS, Tier

from .conftest import PAGE

pytestmark = [pytest.mark.gpu, on_device]


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def allocator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Allocator]:
    with Allocator(
        page_size=PAGE,
        backend=backend_here(0),
        sizes=dict.fromkeys(TIERS, 32 * PAGE),
        disk_paths=[tmp_path],
        pin_host=request.param,
        poison=True,
    ) as made:
        yield made


def filled(allocator: Allocator, values: torch.Tensor, tier: Tier) -> PagedTensor:
    tensor = allocator.allocate("x", values.numel(), values.dtype, Tier.HOST)
    tensor.tensor().copy_(values)
    allocator.move(tensor, tier).wait()
    return tensor


@pytest.mark.parametrize(("source_tier", "target_tier"), list(itertools.product(TIERS, TIERS)))
@pytest.mark.parametrize("numel", [7, 3 * PAGE // 4 + 77])
def test_copy_over_every_link(allocator: Allocator, source_tier: Tier, target_tier: Tier, numel: int) -> None:
    values = torch.randn(numel)
    source = filled(allocator, values, source_tier)
    target = allocator.allocate("y", numel, torch.float32, target_tier)
    allocator.copy(source, target).wait()
    allocator.move(target, Tier.HOST).wait()
    assert torch.equal(target.tensor(), values)


def test_device_region_is_on_a_block(allocator: Allocator) -> None:
    tensor = allocator.allocate("x", 8, torch.float32, Tier.DEVICE).tensor()
    assert tensor.device == torch.device(HERE.type, 0)
    assert tensor.data_ptr() % 4096 == 0


def test_host_region_is_page_locked_when_asked(allocator: Allocator) -> None:
    pinned = allocator._machine.regions[Tier.HOST].pinned  # type: ignore[attr-defined]
    assert allocator.allocate("x", 8, torch.float32, Tier.HOST).tensor().is_pinned() == pinned


def test_kernels_are_ordered_behind_a_copy_without_blocking(allocator: Allocator) -> None:
    source = filled(allocator, torch.full((PAGE // 4,), 3.0), Tier.HOST)
    target = allocator.allocate("y", PAGE // 4, torch.float32, Tier.DEVICE)
    for _ in range(50):
        target.tensor().zero_()
        allocator.copy(source, target).wait(host=False)
        total = target.tensor().sum()
    assert total.item() == 3.0 * PAGE / 4


@pytest.mark.parametrize("then", ["filled", "written", "refused"])
def test_pages_that_a_copy_still_leaves_are_used_again_in_the_order_of_streams(then: str) -> None:
    numel, handed_over = PAGE // 4, 0
    sizes = {Tier.DEVICE: PAGE, Tier.HOST: 3 * PAGE}
    with Allocator(page_size=PAGE, backend=backend_here(0), sizes=sizes, pin_host=True) as allocator:
        integers = allocator.allocate("integers", numel, torch.int32, Tier.HOST)
        home = allocator.allocate("home", numel, torch.float32, Tier.HOST)
        source = allocator.allocate("source", numel, torch.float32, Tier.HOST)
        source.tensor().fill_(-1.0)
        for value in range(20):
            leaving = allocator.allocate_adjacent("leaving", numel, torch.float32, Tier.DEVICE)
            keep_busy()
            leaving.tensor().fill_(value)
            transfer = allocator.copy(leaving, home)
            after = transfer.hand_over()
            handed_over += after is not None
            allocator.release(leaving, after)
            if then == "refused":  # the copy still leaves the pages
                refused = allocator.allocate_adjacent("refused", numel, torch.float32, Tier.DEVICE, filled=True)
                with pytest.raises(UsageError, match="int32"):
                    allocator.fill(integers, refused)
                allocator.release(refused)
            next_ = allocator.allocate_adjacent("next", numel, torch.float32, Tier.DEVICE, filled=then == "filled")
            if then == "filled":
                allocator.fill(source, next_).wait(host=False)
            else:
                next_.tensor().fill_(-1.0)
            assert next_.tensor().eq(-1).all()
            transfer.wait()
            assert home.tensor().eq(value).all()
            allocator.release(next_)
    assert handed_over


def test_copies_start_behind_the_kernels_that_make_their_source(allocator: Allocator) -> None:
    device = allocator.allocate("x", PAGE // 4, torch.float32, Tier.DEVICE)
    host = allocator.allocate("y", PAGE // 4, torch.float32, Tier.HOST)
    disk = allocator.allocate("z", PAGE // 4, torch.float32, Tier.DISK)
    keep_busy()  # the kernel below starts late; a copy that did not wait would see the old bytes
    device.tensor().fill_(5.0)
    to_host, to_disk = allocator.copy(device, host), allocator.copy(device, disk)
    to_host.wait()
    assert host.tensor().eq(5).all()
    to_disk.wait()
    allocator.copy(disk, host).wait()
    assert host.tensor().eq(5).all()


@pytest.mark.parametrize("link", [(Tier.DISK, Tier.DEVICE), (Tier.DEVICE, Tier.DISK)], ids=str)
def test_copies_between_disk_and_device_are_counted(allocator: Allocator, link: tuple[Tier, Tier]) -> None:
    source, target = (allocator.allocate("x", PAGE, torch.uint8, tier) for tier in link)
    allocator.copy(source, target).wait()
    found = allocator.stats()[link]
    assert (found.bytes, found.transfers, found.busy_s > 0) == (PAGE, 1, True)


def test_busy_seconds_of_a_link_are_positive(allocator: Allocator) -> None:
    allocator.move(filled(allocator, torch.ones(4 * PAGE), Tier.DEVICE), Tier.HOST).wait()
    assert allocator.stats()[Tier.HOST, Tier.DEVICE].busy_s > 0


def test_device_without_room_says_what_to_lower() -> None:
    with pytest.raises(CapacityError, match="lower device_memory"):
        Allocator(page_size=PAGE, backend=backend_here(0), sizes={Tier.DEVICE: 1 << 50})


def test_buffers_of_activations_are_given_up_when_no_stream_copies_from_them() -> None:
    """Buffers are returned in the order of streams (`HostBuffers.give`); the system has their memory at once."""
    backend = backend_here(0)
    buffers = HostBuffers(backend, free_bytes=lambda: 1 << 50)
    region = buffers.take(4 * PAGE)
    region.tensor.fill_(3)
    there = torch.empty(region.tensor.numel(), dtype=torch.uint8, device=HERE)
    copies = Copies(backend, backend.stream())
    keep_busy()
    copied = copies.launch([Pair(there, region.tensor)])
    buffers.give(region)
    del region
    buffers.close()
    assert copied.done()
    assert there.sum().item() == 3 * there.numel()
