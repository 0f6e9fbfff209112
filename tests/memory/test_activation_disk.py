"""Storages to disk and back: what is written, where errors show, and when pages are used again."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError, PageIOError, UsageError
from lightning_ptm.events import Event, Events
from lightning_ptm.memory.activation_buffers import ActivationMover, OffloadedStorage, StoragePlace
from lightning_ptm.memory.activation_disk import ACTIVATION_PAGE_BYTES, DiskStore, staging_bytes
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.terms import BLOCK_BYTES

from .files import CountedFiles, HandDrivenFiles, ScriptedFiles

PAGE = ACTIVATION_PAGE_BYTES
NUMEL = 2 * PAGE // 4 + 77
"""Elements of a storage of three pages, the last of which is filled in part and ends inside a block."""


class Bench:
    def __init__(self, folder: Path, file_ops: Any = None, *, paths: int = 1, limit_bytes: int = 64 * PAGE) -> None:
        folders = [folder / str(index) for index in range(paths)]
        for each in folders:
            each.mkdir(exist_ok=True)
        self.staging = HostRegion(staging_bytes(paths))
        self.events = Events()
        self.store = DiskStore(
            folders,
            CpuBackend(),
            self.staging.tensor,
            limit_bytes=limit_bytes,
            file_ops=file_ops,
            events=self.events,
        )
        self.mover = ActivationMover(CpuBackend(), self.store)

    def away(self, value: float, numel: int = NUMEL) -> tuple[OffloadedStorage, Tensor]:
        """A storage that is on disk only, and its values."""
        source = torch.arange(float(numel)) + value
        away = self.mover.send(source)
        self.mover.settle(away)
        return away, source


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(*args: Any, **settings: Any) -> Bench:
        made.append(Bench(tmp_path, *args, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.mover.close()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench()


def values(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0).set_(storage)


@pytest.mark.parametrize("paths", [1, 3])
def test_a_storage_goes_to_disk_and_comes_back(make_bench: MakeBench, paths: int) -> None:
    bench = make_bench(paths=paths)
    stored = [bench.away(float(number)) for number in range(4)]
    assert all(away.device is None and away.where is StoragePlace.AWAY for away, _ in stored)
    assert bench.store.total_bytes == bench.store.used_bytes == 4 * 3 * PAGE
    for away, source in reversed(stored):
        bench.mover.bring(away)
        assert torch.equal(values(bench.mover.storage(away)), source)
    assert bench.store.used_bytes == 0 and bench.store.total_bytes == 4 * 3 * PAGE
    sizes = {name: (stats.bytes, stats.transfers) for name, stats in bench.store.links().items()}
    assert sizes == {"activations_to_disk": (16 * NUMEL, 4), "activations_from_disk": (16 * NUMEL, 4)}
    assert 0 < bench.store.core_s_per_byte() < time.process_time() / (32 * NUMEL)


def test_ram_is_the_staging_of_the_threads_and_no_more(bench: Bench) -> None:
    assert bench.staging.tensor.numel() == 2 * (4 * PAGE + BLOCK_BYTES)
    bench.staging.tensor.fill_(7)
    away, source = bench.away(0.0)
    assert not bench.staging.tensor.eq(7).all()  # the bytes have passed through it
    assert torch.equal(values(bench.mover.storage(away)), source)


def test_pages_are_used_again_and_grow_by_what_lacks(bench: Bench) -> None:
    first, _ = bench.away(1.0)
    del first  # a graph that is dropped without a backward
    second, source = bench.away(2.0)
    assert bench.store.total_bytes == bench.store.used_bytes == 3 * PAGE
    third, _ = bench.away(3.0, numel=PAGE // 4)
    assert bench.store.total_bytes == 4 * PAGE
    assert torch.equal(values(bench.mover.storage(second)), source)
    del third
    assert bench.store.used_bytes == 0


def test_a_storage_dropped_while_it_is_written_keeps_its_pages_until_the_write_has_ended(make_bench: MakeBench) -> None:
    disk = HandDrivenFiles()
    bench = make_bench(disk)
    away = bench.mover.send(torch.ones(PAGE // 4))
    disk.started.acquire()
    del away
    gc.collect()
    assert bench.store.used_bytes == PAGE
    disk.let_go(1)
    other = bench.mover.send(torch.zeros(PAGE // 4))  # waits for the first write
    assert bench.store.total_bytes == PAGE
    disk.let_go(2)
    bench.mover.settle(other)
    assert values(bench.mover.storage(other)).count_nonzero() == 0


def test_events_name_the_direction_and_the_bytes(bench: Bench) -> None:
    told: list[Event] = []
    with bench.events.subscribed(told.append):
        away, _ = bench.away(0.0)
        bench.mover.storage(away)
    assert [(event.track, event.bytes) for event in told] == [
        ("activations_to_disk", 4 * NUMEL),
        ("activations_from_disk", 4 * NUMEL),
    ]


@pytest.mark.parametrize("reading", [False, True])
def test_a_failed_transfer_is_an_error_of_the_backward_that_reads_it(make_bench: MakeBench, reading: bool) -> None:
    """Two threads copy the pieces of a storage: either may be the one that fails."""
    disk = ScriptedFiles()
    bench = make_bench(disk)
    (disk.reads if reading else disk.writes).append(errno.EIO)
    broken, _ = bench.away(1.0)
    whole, source = bench.away(2.0)
    with pytest.raises(PageIOError, match=f"{'read' if reading else 'writ'}ing page [012] in .* failed: .*errno 5"):
        bench.mover.storage(broken)
    assert torch.equal(values(bench.mover.storage(whole)), source)
    del broken  # its pages are as good as any: the disk may have recovered
    again, source = bench.away(3.0)
    assert torch.equal(values(bench.mover.storage(again)), source) and bench.store.total_bytes == 6 * PAGE


def test_a_full_disk_is_an_error_of_the_forward_that_needs_more(make_bench: MakeBench) -> None:
    disk = ScriptedFiles()
    bench = make_bench(disk)
    kept, source = bench.away(1.0)
    disk.fallocate_errno = errno.ENOSPC
    with pytest.raises(PageIOError, match=r"needs 3 MiB for pages and has .* free \(No space left.*free some space"):
        bench.mover.send(torch.ones(NUMEL))
    assert torch.equal(values(bench.mover.storage(kept)), source)
    bench.mover.send(torch.ones(NUMEL))  # into the pages that are free now


def test_the_limit_of_the_disk_tier_holds(make_bench: MakeBench) -> None:
    bench = make_bench(limit_bytes=5 * PAGE)
    kept, _ = bench.away(1.0)
    with pytest.raises(CapacityError, match=r"take 6 MiB on disk .*leave 5 MiB to them, .* raise disk_memory"):
        bench.mover.send(torch.ones(NUMEL))
    assert bench.store.total_bytes == 3 * PAGE
    del kept


def test_a_thread_that_dies_ends_no_wait(make_bench: MakeBench) -> None:
    disk = ScriptedFiles()
    bench = make_bench(disk)
    away, _ = bench.away(1.0)
    disk.death = ZeroDivisionError("scripted")
    with pytest.raises(InternalError, match=r"I/O thread .* died.*scripted"):
        bench.mover.storage(away)


def test_after_the_run_nothing_can_be_read_and_nothing_is_left(tmp_path: Path, make_bench: MakeBench) -> None:
    bench = make_bench()
    away, _ = bench.away(1.0)
    bench.mover.close()
    with pytest.raises(UsageError, match="the run has ended, so its files are gone"):
        bench.mover.storage(away)
    del away
    assert list((tmp_path / "0").iterdir()) == []


@pytest.mark.parametrize("paths", [1, 2])
def test_adjacent_pages_are_one_transfer_in_every_step(make_bench: MakeBench, paths: int) -> None:
    files = CountedFiles()
    bench = make_bench(file_ops=files, paths=paths)
    numels = [NUMEL, 5 * PAGE // 4, PAGE // 4]
    for _ in range(3):
        stored = [bench.away(float(number), numel) for number, numel in enumerate(numels)]
        while stored:
            away, source = stored.pop()
            assert torch.equal(values(bench.mover.storage(away)), source)
            del away
    last = -(-4 * (NUMEL - 2 * PAGE // 4) // BLOCK_BYTES) * BLOCK_BYTES
    one_step = [2 * PAGE + last, 4 * PAGE, PAGE, PAGE] if paths == 1 else [PAGE, PAGE, last, *[PAGE] * 6]
    assert sorted(files.moved) == sorted(6 * one_step)  # written and read in each of three steps
