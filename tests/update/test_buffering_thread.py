"""Threads that wait for one another look now and then, and sleep between: how often is counted, and bounded by the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from paged_training import Twin, make_allocator, make_twin, random_gradients
from test_update_pipeline import HandOps
from torch import optim

from lightning_ptm.terms import Tier
from lightning_ptm.update import buffering_thread, updater
from lightning_ptm.update.buffering_thread import BufferingThread, LockFreeFlat
from lightning_ptm.update.lock_free_buffers import Contribution, FlatBuffer, Origin
from lightning_ptm.update.pipeline import Pipeline

LOOK_S = 0.05
"""Polling interval in these tests, in seconds."""
LOOKS_AT_ONCE = 20
"""Questions that one look may ask. Whoever does not sleep asks thousands in the time that passes here."""


class Late:
    """A gradient that comes after a while."""

    def __init__(self, seconds_s: float = 0.5) -> None:
        self._come = threading.Event()
        self.begun_s = monotonic()
        self._timer = threading.Timer(seconds_s, self._come.set)
        self._timer.start()
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self._come.is_set()

    def wait(self) -> None:
        self._come.wait()


def most_looks(since_s: float) -> float:
    return LOOKS_AT_ONCE * ((monotonic() - since_s) / LOOK_S + 2)


def adamw(groups: list[dict[str, object]]) -> optim.Optimizer:
    return optim.AdamW(groups, lr=1e-2)  # type: ignore[arg-type]


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twin]:
    for module, name in (
        (buffering_thread, "_LOOK_S"),
        (buffering_thread, "_DRAIN_LOOK_S"),
        (updater, "_GRADIENT_WATCH_S"),
    ):
        monkeypatch.setattr(module, name, LOOK_S)
    made = make_twin(adamw, make_allocator())
    yield made
    made.close()


@pytest.fixture
def started(twin: Twin) -> Iterator[BufferingThread]:
    shard = twin.target
    buffer = FlatBuffer("flat", shard.numel, shard.dtype, len(twin.order))
    spares = [twin.allocator.allocate("spare", shard.numel, shard.dtype, Tier.DEVICE) for _ in range(2)]
    made = BufferingThread(twin.updater, [LockFreeFlat(buffer, twin.states, twin.shadow)], spares, room=2, cores=1)
    made.start()
    yield made
    made.stop()


def contribution(twin: Twin, late: Late) -> Contribution:
    job = twin.job(random_gradients(0, torch.bfloat16))
    return Contribution(job.gradient, (Origin(0, job.hyper),), after=[late])


def test_an_updater_that_is_drained_sleeps_until_a_gradient_comes(twin: Twin) -> None:
    twin.updater.run_in_thread()
    late = Late()
    handle = twin.updater.submit(twin.job(random_gradients(0, torch.bfloat16), after=[late]))
    twin.updater.drain()
    assert handle.done() and late.looks <= most_looks(late.begun_s)


def test_an_updater_sleeps_until_a_gradient_comes(twin: Twin) -> None:
    twin.updater.run_in_thread()
    late = Late()
    twin.updater.finish(twin.updater.submit(twin.job(random_gradients(0, torch.bfloat16), after=[late])))
    assert late.looks <= most_looks(late.begun_s)


@pytest.mark.parametrize("who", ["caller", "thread", "thread that is drained"])
def test_an_updater_sleeps_until_a_disk_has_read(who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, advance, ops = 0, Pipeline.advance, HandOps()

    def counted(pipeline: Pipeline) -> bool:
        nonlocal looks
        looks += 1
        return advance(pipeline)

    monkeypatch.setattr(Pipeline, "advance", counted)
    twin = make_twin(adamw, make_allocator(tmp_path, file_ops=ops), home=Tier.DISK)
    ops.may_read.clear()
    timer = threading.Timer(0.3, ops.may_read.set)
    timer.start()
    if who != "caller":
        twin.updater.run_in_thread()
    handle = twin.submit(random_gradients(0, torch.bfloat16))
    if who == "thread that is drained":
        twin.updater.drain()
    twin.updater.finish(handle)
    assert looks <= 200  # who does not sleep looks thousands of times
    twin.close()


def test_who_waits_for_a_version_sleeps_until_there_is_news(started: BufferingThread, twin: Twin) -> None:
    late, looks = Late(), 0
    started.offer(0, contribution(twin, late))

    def until() -> bool:
        nonlocal looks
        looks += 1
        return started.applied(0) == 1

    started.wait(until)
    assert looks <= most_looks(late.begun_s) / LOOKS_AT_ONCE + 2  # two messages are news, too


def test_a_drain_sleeps_until_there_is_news(started: BufferingThread, twin: Twin) -> None:
    late, looks = Late(), 0
    started.offer(0, contribution(twin, late))

    def collect() -> None:
        nonlocal looks
        looks += 1
        version = started.collect(0, 1)
        if version is not None:
            started.give_back(version.pages)

    started.drain(collect)
    assert started.applied(0) == 1
    assert looks <= most_looks(late.begun_s) / LOOKS_AT_ONCE + 4


def test_news_ends_a_wait_at_once(started: BufferingThread, twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits needs not wait for his next look."""
    monkeypatch.setattr(buffering_thread, "_LOOK_S", 100.0)
    started.offer(0, contribution(twin, Late(0.1)))
    begun_s = monotonic()
    started.wait(lambda: started.applied(0) == 1)
    assert monotonic() - begun_s < 50


@pytest.mark.parametrize("whose", ["buffering", "update"])
def test_when_a_thread_was_stopped_it_has_ended(whose: str, started: BufferingThread, twin: Twin) -> None:
    # By the run that it is of: threads of other tests' runs have the same name.
    thread = started._thread if whose == "buffering" else twin.updater._thread
    assert thread is not None and thread.name == f"lightning_ptm {whose}"
    busy = threading.Event()

    def something() -> None:
        busy.set()
        sleep(0.2)

    (started._messages if whose == "buffering" else twin.updater._commands).put(something)
    busy.wait()
    started.stop()
    assert not thread.is_alive()
