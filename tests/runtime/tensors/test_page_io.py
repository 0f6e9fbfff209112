"""Elements between pages and ordinary tensors: every element at its place, on every tier, through few pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.quantization import QuantizedTensor
from lightning_ptm.runtime.tensors.page_io import BUFFERS, PageIO, PageIOBuffers, within
from lightning_ptm.terms import ALIGN_NUMEL, CODES, TIERS, Tier
from lightning_ptm.update.flat_states import Segment
from lightning_ptm.update.state_encoding import EncodedTensor, Int8

PAGE = 64 * 1024
CELL = PAGE // 4


def made(folder: Path, *, device: int = 40, host: int = 40, disk: int = 40) -> Allocator:
    """Returns an allocator with so many pages in each tier, filled with NaN."""
    return Allocator(
        page_size=PAGE,
        backend=CpuBackend(),
        sizes={Tier.DEVICE: device * PAGE, Tier.HOST: host * PAGE, Tier.DISK: disk * PAGE},
        disk_paths=[folder],
        poison=True,
    )


@pytest.fixture
def allocator(disk: Path) -> Iterator[Allocator]:
    with made(disk) as it:
        yield it


def paged(allocator: Allocator, tier: Tier, numel: int, dtype: torch.dtype = torch.float32) -> PagedTensor:
    """Holds 0, 1, 2 ..."""
    tensor = allocator.allocate("states", numel, dtype, tier)
    PageIO(allocator).write(tensor, [(0, counted(numel, dtype))])
    return tensor


def counted(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(float(numel)).to(dtype)


@pytest.mark.parametrize("tier", TIERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [1, CELL, 5 * CELL + 77])
def test_what_was_written_is_read(allocator: Allocator, tier: Tier, dtype: torch.dtype, numel: int) -> None:
    seen: list[int] = []
    tensor = allocator.allocate("states", numel, dtype, tier)
    PageIO(allocator).write(tensor, [(0, counted(numel, dtype))], seen=seen.append)
    assert torch.equal(PageIO(allocator).read(tensor), counted(numel, dtype))
    assert sum(seen) == numel * dtype.itemsize
    assert allocator.live_tensors() == (tensor,)


def test_a_reading_that_ends_early_gives_its_buffers_back(allocator: Allocator) -> None:
    tensor = paged(allocator, Tier.DISK, 20 * CELL)
    buffers = PageIOBuffers.for_now(allocator, [(torch.float32, tensor.numel)])
    for asked in (1, 2, 20):
        reading = PageIO(allocator).stream(tensor, ((cell * CELL, CELL) for cell in range(asked)), buffers)
        next(reading)
        reading.close()
    taken = [buffers.take(torch.float32) for _ in range(BUFFERS)]
    assert all(taken) and buffers.take(torch.float32) is None
    with pytest.raises(InternalError, match=r"all buffers of torch\.float32 are in use"):
        next(PageIO(allocator).stream(tensor, [(0, CELL)], buffers))


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_stretches_are_asked_for_when_they_are_about_to_be_read(allocator: Allocator, tier: Tier) -> None:
    tensor = paged(allocator, tier, 20 * CELL + 5)
    wanted = [3, 20, 0, 7, 8, 9, 2, 1]
    asked: list[int] = []

    def stretches() -> Iterator[tuple[int, int]]:
        for cell in wanted:
            asked.append(cell)
            yield cell * CELL, min(CELL, tensor.numel - cell * CELL)

    buffers = PageIOBuffers.for_now(allocator, [(torch.float32, tensor.numel)])
    ahead = BUFFERS if tier is Tier.DISK else 1
    found = []
    for start, values in PageIO(allocator).stream(tensor, stretches(), buffers):
        found.append(start // CELL)
        assert torch.equal(values, counted(tensor.numel)[start : start + CELL])
        assert len(asked) == min(len(wanted), len(found) - 1 + ahead)
    assert found == asked == wanted
    buffers.close()
    assert allocator.live_tensors() == (tensor,)


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_who_stops_in_the_middle_can_release_everything(allocator: Allocator, tier: Tier) -> None:
    tensor = paged(allocator, tier, 8 * CELL)
    buffers = PageIOBuffers.for_now(allocator, [(torch.float32, tensor.numel)])
    reading = PageIO(allocator).stream(tensor, ((cell * CELL, CELL) for cell in range(8)), buffers)
    next(reading)
    reading.close()
    buffers.close()
    allocator.release(tensor)
    assert allocator.live_tensors() == ()


SEGMENTS = (
    Segment(2, 0, 30, 100, ragged=True),
    Segment(0, 128, 0, 3 * CELL, ragged=False),  # over several pages
    Segment(1, 3 * CELL + 192, 50, 70, ragged=False),
)
"""Segments of three parameters; the first and the last are cut: what lies before is another rank's."""
NUMEL = 4 * CELL + 64


def values(parameter: int) -> torch.Tensor:
    return counted(3 * CELL) * 0.5 + parameter


@pytest.mark.parametrize("tier", TIERS, ids=str)
@pytest.mark.parametrize("given", [(0, 1, 2), (0,), (1, 2), ()])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("through", [None, torch.bfloat16])
def test_a_shard_is_filled_with_what_is_given(
    allocator: Allocator, tier: Tier, given: tuple[int, ...], keep: bool, through: torch.dtype | None
) -> None:
    tensor, seen = paged(allocator, tier, NUMEL), []
    expected = counted(NUMEL) if keep else torch.zeros(NUMEL)
    numel = 0
    for segment in SEGMENTS:
        if segment.parameter in given:
            part = values(segment.parameter)[segment.parameter_start :][: segment.numel]
            expected[segment.start : segment.stop] = part if through is None else part.to(through).float()
            numel += segment.numel
    whole = [values(parameter).view(-1, 64) if parameter in given else None for parameter in range(3)]
    PageIO(allocator).fill(tensor, SEGMENTS, whole, through=through, keep=keep, seen=seen.append)
    found = PageIO(allocator).read(tensor)
    covered = torch.zeros(NUMEL, dtype=torch.bool)
    for segment in SEGMENTS:
        covered[segment.start : segment.stop] = True
    # Between parameters is padding; of a shard that is given whole nobody asks what is in it.
    counts = covered if len(given) == 3 else torch.ones_like(covered)
    assert torch.equal(found[counts], expected[counts])
    assert sum(seen) == 4 * numel
    assert allocator.live_tensors() == (tensor,)


def test_a_value_that_cannot_be_had_leaves_no_buffer(allocator: Allocator) -> None:
    tensor = paged(allocator, Tier.DISK, NUMEL)
    with pytest.raises(RuntimeError):
        PageIO(allocator).fill(tensor, SEGMENTS, [values(0)[: 2 * CELL], None, None])
    allocator.release(tensor)
    assert allocator.live_tensors() == ()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST], ids=str)
@pytest.mark.parametrize("kept", ["states", "frozen weights"])
def test_what_lies_encoded_in_memory_is_written_and_read_without_another_page(
    disk: Path, tier: Tier, kept: str
) -> None:
    numel, code, int8 = 4096, CODES["int8"], Int8(4096, 4096)
    with made(disk, device=1, host=int(tier is Tier.HOST)) as allocator:
        size = int8.numel if kept == "states" else code.bytes_of(numel)
        stored = allocator.allocate(kept, size, torch.uint8, tier)
        assert allocator.free_bytes(tier) == 0
        tensor = (
            EncodedTensor(stored, int8) if kept == "states" else QuantizedTensor(stored, code, torch.float32, numel)
        )
        PageIO(allocator).write(tensor, [(0, torch.ones(numel))])
        assert torch.equal(PageIO(allocator).read(tensor), torch.ones(numel))


def test_parts_within_a_stretch() -> None:
    for start in range(0, NUMEL, 4096):
        for stop in (start + 1, start + 64, start + CELL, NUMEL):
            cut = [segment.cut(start, stop) for segment in SEGMENTS if segment.start < stop and segment.stop > start]
            assert list(within(SEGMENTS, start, stop)) == cut
    assert list(within(SEGMENTS, 100, 128)) == list(within((), 0, NUMEL)) == []


@pytest.mark.parametrize(
    ("device", "host", "numel", "tier", "count"),
    [
        (40, 40, 9 * CELL, Tier.HOST, BUFFERS),
        (40, 0, 9 * CELL, Tier.DEVICE, BUFFERS),
        (40, 4, 9 * CELL, Tier.HOST, 2),  # two pages are left free
        (40, 1, 9 * CELL, Tier.HOST, 1),  # one there must be
        (40, 40, 5, Tier.HOST, BUFFERS),
    ],
)
def test_as_many_buffers_as_there_is_room_for(
    disk: Path, device: int, host: int, numel: int, tier: Tier, count: int
) -> None:
    with made(disk, device=device, host=host) as allocator:
        buffers = PageIOBuffers.for_now(allocator, [(torch.float32, numel), (torch.float32, 1)])
        taken = allocator.live_tensors()
        least = -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL
        assert [(each.tier, each.numel) for each in taken] == [(tier, min(CELL, least))] * count
        found = [buffers.take(torch.float32) for _ in range(count)]
        assert set(map(id, found)) == set(map(id, taken))
        assert buffers.take(torch.float32) is None
        assert found[0] is not None
        buffers.give_back(found[0])
        assert buffers.take(torch.float32) is found[0]
        buffers.close()
        assert allocator.live_tensors() == ()


def test_each_dtype_has_its_own(disk: Path) -> None:
    with made(disk, host=3) as allocator:
        buffers = PageIOBuffers.for_now(allocator, [(torch.bfloat16, 9 * CELL), (torch.float64, 9 * CELL)])
        assert [(each.dtype, each.nbytes) for each in allocator.live_tensors()] == [
            (torch.bfloat16, PAGE),
            (torch.float64, PAGE),
        ]
        for dtype in (torch.bfloat16, torch.float64):
            taken = buffers.take(dtype)
            assert taken is not None and taken.dtype is dtype and buffers.take(dtype) is None
        buffers.close()


def test_buffers_are_given_back_when_a_read_cannot_begin(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = paged(allocator, Tier.DISK, 5 * CELL)
    buffers = PageIOBuffers.for_now(allocator, [(torch.float32, CELL)])
    copy, begun = allocator.copy, []

    def fails_at_the_third(*args: Any, **more: Any) -> Any:
        begun.append(args)
        if len(begun) == 3:
            raise InternalError("busy")
        return copy(*args, **more)

    monkeypatch.setattr(allocator, "copy", fails_at_the_third)
    with pytest.raises(InternalError, match="busy"):
        list(PageIO(allocator).stream(tensor, [(start, CELL) for start in range(0, 5 * CELL, CELL)], buffers))
    taken = [buffers.take(torch.float32) for _ in range(BUFFERS + 1)]
    assert [buffer is not None for buffer in taken] == [True] * BUFFERS + [False]


def test_buffers_for_which_there_is_no_room_leave_none_behind(disk: Path) -> None:
    with made(disk, host=2) as allocator:
        free = allocator.free_bytes(Tier.HOST)
        with pytest.raises(CapacityError):
            PageIOBuffers.for_now(allocator, [(dtype, CELL) for dtype in (torch.float32, torch.int32, torch.uint8)])
        assert allocator.free_bytes(Tier.HOST) == free
