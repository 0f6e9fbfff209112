"""Order, overlap, hazards, errors and threads of the updater. Disks that wait or fail."""

from __future__ import annotations

import errno
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.devices import HERE, on_device
from paged_training import (
    GROUPS,
    PAGE_SIZE,
    SHAPES,
    Twin,
    assert_bits,
    fill,
    make_allocator,
    make_flat,
    make_twin,
    plain_step,
    random_gradients,
    read,
)
from torch import optim

from lightning_ptm.errors import CapacityError, ConfigError, PageIOError, UsageError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import backend_here
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.transfer import Copy, Transfer
from lightning_ptm.planning.inventory import Row, What, pages_of
from lightning_ptm.terms import Tier
from lightning_ptm.update.arithmetic import Arithmetic
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.gradient_source import ShardGradient
from lightning_ptm.update.pipeline import Pipeline
from lightning_ptm.update.shadow import ShadowOptimizer, snapshot
from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.update_job import UpdateJob
from lightning_ptm.update.updater import Updater


class HandOps(FileOps):
    """A disk whose reads and writes wait for a hand, or fail."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_write = threading.Event()
        self.may_read.set()
        self.may_write.set()
        self.reads_fail = False
        self.writes_fail = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.may_read.wait()
        if self.reads_fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.may_write.wait()
        if self.writes_fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwritev(fd, buffers, offset)


class HandPending:
    """A gradient that comes when the test says so."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def come(self) -> None:
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._event.wait()


def adamw(groups: list[dict[str, object]]) -> optim.Optimizer:
    return optim.AdamW(groups, lr=1e-2)  # type: ignore[arg-type]


@pytest.fixture
def twins() -> Iterator[list[Twin]]:
    made: list[Twin] = []
    yield made
    for twin in made:
        twin.close()


@pytest.fixture
def ops() -> Iterator[HandOps]:
    ops = HandOps()
    yield ops
    ops.may_read.set()
    ops.may_write.set()


def gradients(step: int = 0) -> list[torch.Tensor | None]:
    return random_gradients(step, torch.bfloat16)


def siblings(twins: list[Twin], disk: Path | None, ops: HandOps | None = None, **settings: object) -> tuple[Twin, Twin]:
    """Two flats behind one updater."""
    allocator = make_allocator(disk, device_mib=12, disk_mib=12, **({"file_ops": ops} if ops is not None else {}))
    first = make_twin(adamw, allocator, **settings)  # type: ignore[arg-type]
    second = make_twin(adamw, allocator, **settings)  # type: ignore[arg-type]
    second.updater.close()
    second.updater = first.updater
    twins.append(first)
    return first, second


def test_promoted_job_overtakes(twins: list[Twin]) -> None:
    first, second = siblings(twins, None)
    a, b = first.submit(gradients()), second.submit(gradients())
    first.updater.promote(b)
    while not b.done():
        assert first.updater.pump(limit=1)
        assert not a.done()
    first.updater.finish(a)
    assert not first.updater.busy()


def test_finish_serves_its_job_first(twins: list[Twin], tmp_path: Path) -> None:
    first, second = siblings(twins, tmp_path, home=Tier.DISK)
    a, b = first.submit(gradients()), second.submit(gradients())
    first.updater.finish(b)
    assert b.done()
    assert not a.done()
    for twin in (first, second):
        plain_step(twin, gradients())
        twin.assert_equal()
    assert a.done()


def test_jobs_of_one_flat_keep_their_order_when_the_later_is_promoted(twins: list[Twin], tmp_path: Path) -> None:
    first, second = siblings(twins, tmp_path, home=Tier.DISK)
    other = second.submit(gradients())
    a, b = first.submit(gradients(0)), first.submit(gradients(1))
    first.updater.finish(b)
    assert a.done()
    assert not other.done()
    plain_step(first, gradients(0))
    plain_step(first, gradients(1))
    first.assert_equal()


def test_finish_does_not_wait_for_master_states_on_their_way_home(
    twins: list[Twin], tmp_path: Path, ops: HandOps
) -> None:
    allocator = make_allocator(tmp_path, file_ops=ops)
    twins.append(make_twin(adamw, allocator, home=Tier.DISK, staging=12))
    twin = twins[0]
    ops.may_write.clear()
    handle = twin.submit(gradients(0))
    twin.updater.finish(handle)
    assert handle.done()
    assert twin.updater.busy()

    # The same pages again: not read before the writes have landed.
    read_before = twin.updater.stats.bytes_read
    again = twin.submit(gradients(1))
    twin.updater.pump()
    assert twin.updater.stats.bytes_read == read_before
    assert not again.done()
    ops.may_write.set()
    twin.updater.finish(again)
    plain_step(twin, gradients(0))
    plain_step(twin, gradients(1))
    twin.assert_equal()


def test_finish_waits_for_compute_parameters_on_disk(twins: list[Twin], tmp_path: Path, ops: HandOps) -> None:
    allocator = make_allocator(tmp_path, file_ops=ops)
    twins.append(make_twin(adamw, allocator, home=Tier.DEVICE, target_home=Tier.DISK, staging=12))
    twin = twins[0]
    ops.may_write.clear()
    handle = twin.submit(gradients())
    twin.updater.pump()
    assert twin.updater.stats.chunks > 0
    assert not handle.done()
    ops.may_write.set()
    twin.updater.finish(handle)
    plain_step(twin, gradients())
    twin.assert_equal()


def test_pump_does_not_wait(twins: list[Twin], tmp_path: Path, ops: HandOps) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path, file_ops=ops), home=Tier.DISK))
    twin = twins[0]
    ops.may_read.clear()
    handle = twin.submit(gradients())
    assert twin.updater.pump()  # issues reads
    assert not twin.updater.pump()
    assert not handle.done()
    ops.may_read.set()
    twin.updater.finish(handle)
    assert twin.updater.stats.read_stall_s > 0


@pytest.mark.parametrize("in_thread", [False, True])
def test_who_drains_waits_and_does_not_only_look(
    twins: list[Twin], tmp_path: Path, ops: HandOps, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path, file_ops=ops), home=Tier.DISK))
    updater, looks = twins[0].updater, []
    if in_thread:
        updater.run_in_thread()
        monkeypatch.setattr(updater._thread, "is_alive", lambda: looks.append(0) or True)
    ops.may_write.clear()
    twins[0].submit(gradients())
    later = threading.Timer(0.3, ops.may_write.set)
    later.start()
    updater.drain()
    later.join()
    assert updater.stats.write_stall_s > 0 and len(looks) < 10


def test_reads_ahead_are_used(twins: list[Twin], tmp_path: Path) -> None:
    first, second = siblings(twins, tmp_path, home=Tier.DISK, staging=3)
    updater = first.updater
    updater.prefetch([second.states, first.states])
    updater.pump()
    ahead = updater.stats.bytes_read
    assert ahead > 0
    for twin in (second, first):
        updater.finish(twin.submit(gradients()))
        plain_step(twin, gradients())
    updater.drain()
    # The first step reads master parameters only, each once: what was read ahead was not read again.
    assert updater.stats.bytes_read == 2 * first.flat.shard_numel * 4
    for twin in (first, second):
        twin.assert_equal()


def test_reads_ahead_see_the_last_update(twins: list[Twin], tmp_path: Path, ops: HandOps) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path, file_ops=ops), home=Tier.DISK, staging=12))
    twin = twins[0]
    for step in range(3):
        ops.may_write.clear()
        handle = twin.submit(gradients(step))
        twin.updater.prefetch([twin.states])  # too early: the job before is not even computed
        twin.updater.finish(handle)
        twin.updater.pump()
        ops.may_write.set()
        while twin.updater.busy():
            twin.updater.pump()
        plain_step(twin, gradients(step))
    twin.assert_equal()


def test_ctrl_c_takes_effect_when_an_update_is_whole(
    twins: list[Twin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a transfer's begin and its note, say: nobody would wait for its end, and its pages could not be given up."""
    twins.append(make_twin(adamw, make_allocator(tmp_path), home=Tier.DISK))
    twin, copy_all, interrupted = twins[0], Allocator.copy_all, []

    def copy_and_ctrl_c(*args: Any) -> list[Transfer]:
        transfers = copy_all(*args)
        if not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)
        return transfers

    monkeypatch.setattr(Allocator, "copy_all", copy_and_ctrl_c)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        handle = twin.submit(gradients())
        with pytest.raises(KeyboardInterrupt):
            twin.updater.finish(handle)
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted and handle.done()
    plain_step(twin, gradients())
    twin.assert_equal()


def test_draining_drops_what_was_read_ahead(twins: list[Twin], tmp_path: Path) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path), home=Tier.DISK))
    twin = twins[0]
    twin.updater.prefetch([twin.states])
    twin.updater.pump()
    twin.updater.drain()
    assert twin.states.master is not None
    # As loading a checkpoint does.
    fill(twin.allocator, twin.states.master, torch.zeros(twin.flat.shard_numel))
    for parameter in twin.plain:
        parameter.data.zero_()
    twin.updater.finish(twin.submit(gradients()))
    plain_step(twin, gradients())
    twin.assert_equal()


@pytest.mark.parametrize("waits_as", ["job", "read ahead"])
def test_a_job_that_waits_for_its_gradient_gives_way(waits_as: str, twins: list[Twin], tmp_path: Path) -> None:
    first, second = siblings(twins, tmp_path, home=Tier.DISK, staging=1)
    updater, gradient = first.updater, HandPending()
    late = first.job(gradients(), after=[gradient])
    if waits_as == "job":
        handle = updater.submit(late)
    else:
        updater.prefetch([first.states])
    updater.pump()
    updater.finish(second.submit(gradients()))
    if waits_as == "read ahead":
        handle = updater.submit(late)
    updater.pump()
    assert not handle.done()
    gradient.come()
    updater.finish(handle)
    for twin in (first, second):
        plain_step(twin, gradients())
        twin.assert_equal()


def test_parameters_without_any_gradient_keep_their_bytes(twins: list[Twin], tmp_path: Path) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path), home=Tier.DISK))
    twin = twins[0]
    nothing: list[torch.Tensor | None] = [None] * len(SHAPES)
    twin.updater.prefetch([twin.states])
    twin.updater.pump()
    twin.updater.finish(twin.submit(nothing))
    assert twin.updater.stats.bytes_written == 0
    twin.updater.finish(twin.submit(gradients()))
    plain_step(twin, gradients())
    twin.assert_equal()


def test_bytes_are_counted_by_the_size_of_each_columns_elements(twins: list[Twin], tmp_path: Path) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path), home=Tier.DISK, target_home=Tier.DISK))
    twin = twins[0]
    assert twin.states.master is not None
    kept = [twin.states.master, *twin.states.slots.values()]
    states = twin.flat.shard_numel * sum(each.dtype.itemsize for each in kept)
    parameters = twin.flat.shard_numel * torch.bfloat16.itemsize
    for step in range(2):
        before = twin.updater.stats.bytes_written, twin.updater.stats.bytes_read
        twin.updater.finish(twin.submit(gradients()))
        twin.updater.drain()
        assert twin.updater.stats.bytes_written - before[0] == states + parameters
        if step:
            assert twin.updater.stats.bytes_read - before[1] == states  # moments have begun by then


def test_a_write_does_not_meet_a_read_that_nobody_wants_any_more(twins: list[Twin], tmp_path: Path) -> None:
    class FirstReadIsLate(HandOps):
        late: int | None = None

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.late in (None, threading.get_ident()):
                self.late = threading.get_ident()
                self.may_read.wait()
            return FileOps.preadv(fd, buffers, offset)

    ops = FirstReadIsLate()
    ops.may_read.clear()
    twins.append(make_twin(adamw, make_allocator(tmp_path, file_ops=ops), home=Tier.DISK))
    twin = twins[0]
    try:
        twin.updater.prefetch([twin.states])
        twin.updater.pump()
        twin.updater.finish(twin.submit([None] * len(SHAPES)))
        handle = twin.submit(gradients())
        for _ in range(200):
            twin.updater.pump()
            time.sleep(0.001)  # for the other reads to come
    finally:
        ops.may_read.set()
    twin.updater.finish(handle)
    plain_step(twin, gradients())
    twin.assert_equal()


def test_a_write_that_failed_before_anybody_waited_for_it_is_no_update(
    twins: list[Twin], tmp_path: Path, ops: HandOps
) -> None:
    allocator = make_allocator(tmp_path, file_ops=ops)
    twins.append(make_twin(adamw, allocator, home=Tier.DEVICE, target_home=Tier.DISK, staging=12))
    twin = twins[0]
    ops.may_write.clear()
    ops.writes_fail = True
    handle = twin.submit(gradients())
    twin.updater.pump()
    (under_way,) = twin.updater._pipeline._landing
    ops.may_write.set()
    while not under_way.landing.done():
        time.sleep(0.001)
    with pytest.raises(PageIOError):
        twin.updater.pump()
    assert not handle.done()
    ops.writes_fail = False


def test_a_read_that_failed_before_anybody_waited_for_it_is_told(
    twins: list[Twin], tmp_path: Path, ops: HandOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = make_allocator(tmp_path, file_ops=ops)
    twins.append(make_twin(adamw, allocator, home=Tier.DISK))
    twin, transfers = twins[0], noted(allocator, monkeypatch)
    ops.may_read.clear()
    ops.reads_fail = True
    handle = twin.submit(gradients())
    twin.updater.pump()
    assert transfers
    ops.may_read.set()
    while not all(transfer.done() for transfer in transfers):
        time.sleep(0.001)
    with pytest.raises(PageIOError):
        twin.updater.pump()
    assert not handle.done()
    ops.reads_fail = False


def noted(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> list[Transfer]:
    """Copies that begin from now on."""
    copy_all, transfers = allocator.copy_all, list[Transfer]()

    def begin(copies: Sequence[Copy]) -> list[Transfer]:
        begun = copy_all(copies)
        transfers.extend(begun)
        return begun

    monkeypatch.setattr(allocator, "copy_all", begin)
    return transfers


def test_a_write_of_master_states_that_failed_before_anybody_waited_for_it_is_told(
    twins: list[Twin], tmp_path: Path, ops: HandOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = make_allocator(tmp_path, file_ops=ops)
    twins.append(make_twin(adamw, allocator, home=Tier.DISK, staging=12))
    twin = twins[0]
    job, transfers = twin.job(gradients()), noted(allocator, monkeypatch)
    ops.may_write.clear()
    ops.writes_fail = True
    twin.updater.finish(twin.updater.submit(job))  # whose compute parameters are on the device
    ops.may_write.set()
    while not all(transfer.done() for transfer in transfers):
        time.sleep(0.001)
    with pytest.raises(PageIOError):
        twin.updater.drain()
    ops.writes_fail = False


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("what", ["read", "write"])
def test_io_errors_reach_the_caller_and_stay(
    what: str, threaded: bool, twins: list[Twin], tmp_path: Path, ops: HandOps
) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path, file_ops=ops), home=Tier.DISK, target_home=Tier.DISK))
    twin = twins[0]
    job = twin.job(gradients())
    if threaded:
        twin.updater.run_in_thread()
    ops.reads_fail, ops.writes_fail = what == "read", what == "write"
    handle = twin.updater.submit(job)
    with pytest.raises(PageIOError) as caught:
        twin.updater.finish(handle)
    assert caught.value.errno == errno.EIO
    assert not handle.done()
    for call in (twin.updater.pump, twin.updater.drain, lambda: twin.updater.submit(job)):
        with pytest.raises(PageIOError):
            call()
    twin.updater.stop()
    ops.reads_fail = ops.writes_fail = False


def test_a_thread_gives_the_same_bits(twins: list[Twin], tmp_path: Path) -> None:
    first, second = siblings(twins, tmp_path, home=Tier.DISK, target_home=Tier.DISK)
    jobs = [[twin.job(gradients(step)) for step in range(3)] for twin in (first, second)]
    updater = first.updater
    updater.run_in_thread()
    updater.prefetch([first.states, second.states])
    handles = [updater.submit(job) for pair in zip(*jobs, strict=True) for job in pair]
    assert not updater.pump()
    for handle in reversed(handles):
        updater.finish(handle)
    updater.drain()
    updater.stop()
    for twin in (first, second):
        for step in range(3):
            plain_step(twin, gradients(step))
        twin.assert_equal()


class SlowQueue(queue.SimpleQueue[Any]):
    """A queue to which the first item comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def put(self, item: Any, *_: Any) -> None:  # type: ignore[override]
        if not self.begun.is_set():
            self.begun.set()
            self.go_on.wait(60)
        super().put(item)


def test_drain_waits_for_a_job_that_another_thread_is_passing_on(twins: list[Twin]) -> None:
    twins.append(make_twin(adamw, make_allocator()))
    updater = twins[0].updater
    commands = updater._commands = SlowQueue()
    updater.run_in_thread()
    handle = updater.submit(twins[0].job(gradients()), at_once=False)
    found: list[bool] = []

    def drain() -> None:
        updater.drain()
        found.append(handle.done())

    threads = [threading.Thread(target=work) for work in (updater.pump, drain)]
    threads[0].start()
    assert commands.begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    commands.go_on.set()
    for thread in threads:
        thread.join()
    assert found == [True]
    updater.stop()


@pytest.mark.parametrize("ends", ["drain", "finish", "stop", "close"])
def test_a_job_that_waits_for_the_next_call_is_not_lost(ends: str, twins: list[Twin]) -> None:
    twins.append(make_twin(adamw, make_allocator()))
    twin = twins[0]
    twin.updater.run_in_thread()
    handle = twin.updater.submit(twin.job(gradients()), at_once=False)
    if ends == "finish":
        twin.updater.finish(handle)
    else:
        getattr(twin.updater, ends)()
    if ends == "stop":  # it stays queued
        twin.updater.drain()
    assert handle.done() or ends == "close"
    if ends != "close":
        plain_step(twin, gradients())
        twin.assert_equal()


def test_a_larger_scratch_on_a_device_replaces_the_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic, on_device = Arithmetic(64, 1 << 20), torch.empty(0, device="meta")
    smaller = weakref.ref(arithmetic._scratch_like(on_device, 128))
    alive: list[bool] = []
    empty = torch.empty

    def note(*given: Any, **how: Any) -> torch.Tensor:
        alive.append(smaller() is not None)
        return empty(*given, **how)

    monkeypatch.setattr(torch, "empty", note)
    assert arithmetic._scratch_like(on_device, 256).numel() == 256
    assert alive == [False]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to choose from")
def test_a_thread_keeps_to_the_cores_beside_the_device(twins: list[Twin], monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    one = frozenset([min(before)])
    monkeypatch.setattr(type(backend_here()), "numa_cores", lambda self: one)
    seen: list[tuple[frozenset[int], int]] = []
    arithmetic = threading.Event()

    def note() -> None:
        seen.append((frozenset(os.sched_getaffinity(0)), torch.get_num_threads()))
        arithmetic.set()

    twin, _ = siblings(twins, None)
    twin.updater.run_in_thread(cores=2)
    twin.updater._command(note)
    assert arithmetic.wait(60)
    twin.updater.stop()
    assert seen == [(one, 1)] and os.sched_getaffinity(0) == before


class BrokenPending:
    """A reduction that failed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("another rank has died")


def test_errors_of_the_thread_carry_its_traceback(twins: list[Twin]) -> None:
    twins.append(make_twin(adamw, make_allocator()))
    twin = twins[0]
    twin.updater.run_in_thread()
    with pytest.raises(RuntimeError, match="another rank has died") as caught:
        twin.updater.finish(twin.updater.submit(twin.job(gradients(), after=[BrokenPending()])))
    assert {"_work", "advance", "wait"} <= {entry.name for entry in caught.traceback}
    twin.updater.stop()
    with pytest.raises(RuntimeError, match="another rank has died"):
        twin.updater.drain()


@pytest.mark.parametrize("in_thread", [False, True])
def test_transfers_that_end_right_after_the_pipeline_found_none_done(
    in_thread: bool, twins: list[Twin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Pipeline.advance
    ended = False

    def find_none_done_at_first(pipeline: Pipeline) -> bool:
        nonlocal ended
        moved = advance(pipeline)
        ended = not moved
        return moved

    def done(transfer: Transfer) -> bool:
        transfer.wait()
        return ended

    monkeypatch.setattr(Pipeline, "advance", find_none_done_at_first)
    first, second = siblings(twins, tmp_path, home=Tier.DISK)
    monkeypatch.setattr(Transfer, "done", done)
    if in_thread:
        first.updater.run_in_thread()
    for step in range(3):
        handles = [twin.submit(gradients(step)) for twin in (first, second)]
        first.updater.finish(handles[1])
        first.updater.drain()
        assert all(handle.done() for handle in handles)
    first.updater.stop()
    for twin in (first, second):
        for step in range(3):
            plain_step(twin, gradients(step))
        twin.assert_equal()


def test_stopping_leaves_no_thread_and_no_lost_job(twins: list[Twin]) -> None:
    twins.append(make_twin(adamw, make_allocator()))
    twin, gradient = twins[0], HandPending()
    before = threading.active_count()
    twin.updater.run_in_thread()
    with pytest.raises(UsageError, match="already runs"):
        twin.updater.run_in_thread()
    handle = twin.updater.submit(twin.job(gradients(), after=[gradient]))
    twin.updater.stop()
    twin.updater.stop()
    assert threading.active_count() == before
    assert not handle.done()
    gradient.come()
    twin.updater.finish(handle)
    plain_step(twin, gradients())
    twin.assert_equal()


def test_an_idle_thread_can_be_drained_and_stopped(twins: list[Twin]) -> None:
    twins.append(make_twin(adamw, make_allocator()))
    twins[0].updater.run_in_thread()
    twins[0].updater.drain()
    twins[0].updater.close()


def test_closing_with_work_in_flight(twins: list[Twin], tmp_path: Path, ops: HandOps) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path, file_ops=ops), home=Tier.DISK, gradient_home=Tier.DEVICE))
    twin = twins[0]
    twin.submit(gradients())
    twin.updater.pump(limit=2)
    twin.updater.close()
    twin.updater.close()
    with pytest.raises(UsageError, match="this run has ended"):
        twin.updater.pump()
    for tensor in (*twin.states.tensors(), twin.target, twin.gradient):
        assert tensor is not None
        twin.allocator.release(tensor)
    assert twin.allocator.free_bytes(Tier.DEVICE) == twin.allocator.capacity_bytes(Tier.DEVICE)
    assert twin.allocator.free_bytes(Tier.DISK) == twin.allocator.capacity_bytes(Tier.DISK)


def test_nothing_is_allocated_when_staging_was_taken(twins: list[Twin], tmp_path: Path) -> None:
    disk = Tier.DISK
    twins.append(make_twin(adamw, make_allocator(tmp_path), home=disk, target_home=disk, gradient_home=disk, staging=3))
    twin, chunks = twins[0], 3
    before = twin.allocator.free_bytes(Tier.DEVICE)
    rows = []
    for dtype, count in ((torch.float32, 3 * chunks), (torch.bfloat16, 2 * chunks)):  # masters and moments, p16 and g16
        twin.updater.take_staging(Tier.DEVICE, dtype, count)
        numel = twin.updater.chunk_numel
        rows.append(Row(What.STAGING, Tier.DEVICE, numel, str(dtype), dtype.itemsize, count, shares_pages=True))
    free = twin.allocator.free_bytes(Tier.DEVICE)
    assert before - free == pages_of(rows, PAGE_SIZE) * PAGE_SIZE
    job = twin.job(gradients())
    twin.updater.finish(twin.updater.submit(job))
    twin.updater.drain()
    assert twin.allocator.free_bytes(Tier.DEVICE) == free


def test_staging_that_does_not_fit(twins: list[Twin], tmp_path: Path) -> None:
    twins.append(make_twin(adamw, make_allocator(tmp_path, device_mib=1), home=Tier.DISK))
    with pytest.raises(CapacityError, match=r"update staging torch.float32 needs .* raise device_memory"):
        twins[0].updater.take_staging(Tier.DEVICE, torch.float32, 64)


@pytest.mark.parametrize("settings", [{"chunk_numel": 1000}, {"block_numel": 63}, {"staging": 0}])
def test_sizes_that_cannot_work(settings: dict[str, int]) -> None:
    with make_allocator() as allocator, pytest.raises(ConfigError, match="staging"):
        Updater(allocator, **settings)  # type: ignore[arg-type]


def test_a_parameter_that_changed_its_shape(twins: list[Twin]) -> None:
    twins.append(make_twin(adamw, make_allocator()))
    other = gradients()
    other[1] = torch.zeros(64, 131, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"gradient of p1 has 8384 elements, its pages 8320"):
        twins[0].submit(other)


def test_two_compute_threads_give_the_plain_bits(twins: list[Twin]) -> None:
    torch.set_num_threads(2)
    shapes, groups = ((700, 301), (77,), (64, 1000)), (0, 1, 0)
    twins.append(make_twin(adamw, make_allocator(device_mib=16), shapes=shapes, groups=groups, block_numel=1 << 16))
    twin = twins[0]
    for step in range(3):
        given = random_gradients(step, torch.bfloat16, shapes)
        plain_step(twin, given)
        twin.updater.finish(twin.submit(given))
    twin.assert_equal()


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_of_several_ranks_make_up_the_plain_update(world_size: int) -> None:
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in SHAPES]
    plain = [torch.nn.Parameter(value.clone()) for value in values]
    plain_optimizer = optim.AdamW(plain, lr=1e-2, fused=True)
    users = optim.AdamW([torch.nn.Parameter(value.clone()) for value in values], lr=1e-2)
    traits = probe(users)
    flat = make_flat(SHAPES, [0] * len(GROUPS), torch.float32, world_size)
    result = torch.zeros(flat.padded_numel)
    full = torch.zeros(flat.padded_numel)
    with make_allocator(device_mib=12) as allocator:
        ranks = []
        for rank in range(world_size):
            for slot, value in zip(flat.slots, values, strict=True):
                full[slot.start : slot.end] = value.reshape(-1)
            states = FlatStates.allocate(allocator, flat, rank, traits, Tier.DEVICE, master_dtype=None)
            target = allocator.allocate("p", flat.shard_numel, torch.float32, Tier.DEVICE)
            shard = allocator.allocate("g", flat.shard_numel, torch.float32, Tier.DEVICE)
            for piece in flat.pieces(rank):
                part = full[piece.full_start : piece.full_start + piece.numel]
                target.tensor()[piece.shard_start : piece.shard_start + piece.numel] = part
            ranks.append((states, target, shard))
        updater = Updater(allocator, chunk_numel=4096, block_numel=2048)
        shadow = ShadowOptimizer(users, traits)
        for step in range(3):
            given = random_gradients(step, torch.float32, unused=(4,) if step == 1 else ())
            for parameter, gradient in zip(plain, given, strict=True):
                parameter.grad = gradient.clone() if gradient is not None else None
            plain_optimizer.step()
            hyper = snapshot(users, traits)
            present = [gradient is not None for gradient in given]
            for slot, gradient in zip(flat.slots, given, strict=True):
                full[slot.start : slot.end] = gradient.reshape(-1) if gradient is not None else float("nan")
            for rank, (states, target, shard) in enumerate(ranks):
                for piece in flat.pieces(rank):
                    part = full[piece.full_start : piece.full_start + piece.numel]
                    shard.tensor()[piece.shard_start : piece.shard_start + piece.numel] = part
                updater.finish(updater.submit(UpdateJob(states, shadow, ShardGradient(shard, present), target, hyper)))
        for rank, (states, target, _) in enumerate(ranks):
            # Every rank knows every parameter's scalars, even of those that it holds no element of.
            steps = [scalars.values["step"].item() for scalars in map(states.scalars, range(len(SHAPES))) if scalars]
            assert steps == [2.0 if index == 4 else 3.0 for index in range(len(SHAPES))]
            for piece in flat.pieces(rank):
                part = read(allocator, target)[piece.shard_start : piece.shard_start + piece.numel]
                result[piece.full_start : piece.full_start + piece.numel] = part
        updater.close()
    for slot, parameter in zip(flat.slots, plain, strict=True):
        assert_bits(result[slot.start : slot.end], parameter.detach().reshape(-1), slot.spec.name)


def test_default_chunk_is_a_page_of_float32() -> None:
    with make_allocator() as allocator:
        updater = Updater(allocator)
        assert updater.chunk_numel * 4 == PAGE_SIZE
        updater.close()


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize(
    ("home", "comes"), [(Tier.DEVICE, Tier.DEVICE), (Tier.HOST, Tier.HOST), (Tier.HOST, Tier.DEVICE)]
)
def test_on_a_device(home: Tier, comes: Tier) -> None:
    """Masters on the device are updated there; masters on the host on the CPU, the compute copy sent to the device. Gradients
    in pages of the device are read behind what has been queued when the job was submitted."""
    from lightning_ptm.memory.allocator import Allocator

    mib = 1 << 20
    optimizer = optim.AdamW([torch.nn.Parameter(torch.ones(5000))], lr=1e-2)
    plain = torch.nn.Parameter(torch.ones(5000, device=HERE if home is Tier.DEVICE else "cpu"))
    plain_optimizer = optim.AdamW([plain], lr=1e-2, fused=True)
    backend = backend_here()
    with Allocator(
        page_size=PAGE_SIZE, backend=backend, sizes={Tier.DEVICE: 8 * mib, Tier.HOST: 8 * mib}, pin_host=True
    ) as allocator:
        flat = make_flat([(5000,)], [0], torch.bfloat16)
        traits = probe(optimizer, device=backend.device if home is Tier.DEVICE else "cpu")
        states = FlatStates.allocate(allocator, flat, 0, traits, home, master_dtype=torch.float32)
        assert states.master is not None
        states.master.tensor().fill_(1.0)
        target = allocator.allocate("p", flat.shard_numel, torch.bfloat16, Tier.DEVICE)
        gradient = allocator.allocate("g", flat.shard_numel, torch.bfloat16, comes)
        updater = Updater(allocator, staging_tier=Tier.HOST, stream=backend.stream())
        updater.run_in_thread()
        for step in range(3):
            given = random_gradients(step, torch.bfloat16, [(5000,)])[0]
            assert given is not None
            gradient.tensor()[:5000].copy_(given.pin_memory(), non_blocking=True)
            if comes is Tier.HOST:
                backend.synchronize()
            plain.grad = given.to(plain.device).float()
            plain_optimizer.step()
            hyper = snapshot(optimizer, traits)
            handle = updater.submit(
                UpdateJob(states, ShadowOptimizer(optimizer, traits), ShardGradient(gradient), target, hyper)
            )
            if step < 2:
                updater.finish(handle)
        updater.drain()
        with backend.stream().entered():  # behind nothing: what was drained may be read on any stream
            found, _ = target.tensor()[:5000].cpu(), states.master.tensor().sum().item()
        assert_bits(found, plain.detach().to(torch.bfloat16).cpu(), "compute parameter")
        updater.close()


@pytest.mark.gpu
@on_device
def test_what_is_read_ahead_to_a_device_is_behind_what_has_used_its_pages(tmp_path: Path) -> None:
    """Before there was a job."""
    mib = 1 << 20
    optimizer = optim.AdamW([torch.nn.Parameter(torch.ones(5000))], lr=1e-2)
    backend = backend_here()
    sizes = {Tier.DEVICE: 4 * mib, Tier.HOST: 4 * mib, Tier.DISK: 4 * mib}
    with Allocator(
        page_size=PAGE_SIZE, backend=backend, sizes=sizes, disk_paths=[tmp_path], pin_host=True
    ) as allocator:
        flat = make_flat([(5000,)], [0], torch.float32)
        traits = probe(optimizer, device=backend.device)
        states = FlatStates.allocate(allocator, flat, 0, traits, Tier.DISK, master_dtype=torch.float32)
        assert states.master is not None
        fill(allocator, states.master, torch.ones(flat.shard_numel))
        values = torch.full((mib,), 7.0).pin_memory()
        before = allocator.allocate("before", mib, torch.float32, Tier.DEVICE)
        before.tensor().copy_(values, non_blocking=True)
        allocator.release(before)
        updater = Updater(allocator, staging_tier=Tier.DEVICE, stream=backend.stream())
        updater.take_staging(Tier.DEVICE, torch.float32, 4)
        updater.run_in_thread()
        updater.prefetch([states])
        until_s = time.monotonic() + 30
        while not updater.stats.bytes_read and time.monotonic() < until_s:
            time.sleep(0.001)
        assert updater.stats.bytes_read
        updater.drain()
        updater.close()
