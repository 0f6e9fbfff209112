"""Fits that end in an error or in Ctrl-C between steps, each followed by another fit of the same module: weights are those of
a plain Trainer, and nothing of the first run is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import Twin, assert_alike, quietly, trainer, vectors
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.errors import CapacityError, CheckpointError
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.writer import SaveOps

STEPS = 3
BEHIND = {"checkpoints": {"state_dict_type": "sharded", "async_save": True}}


class Fails(SaveOps):
    """A disk on which syncing fails with what is no error of a disk."""

    def fsync(self, fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")
        super().fsync(fd)


def without_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Has the system refuse to start a thread."""

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        started(thread)

    started = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)


def no_room(*_: Any) -> None:
    raise MemoryError("no room")


class Interrupts(SaveOps):
    """A slow disk. While it syncs, after the last step, Ctrl-C is pressed so many times."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._lock = threading.Lock()

    def fsync(self, fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            with self._lock:
                times, self._times = self._times, 0
                for _ in range(times):
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2 if times else 0)
        super().fsync(fd)


class BreaksOff(L.Callback):
    """Raises at the end of the epoch, and again in `on_exception`, which Lightning calls for that error."""

    def on_train_epoch_end(self, *_: Any) -> None:
        raise ValueError("broken off")

    def on_exception(self, *_: Any) -> None:
        raise LookupError("in on_exception")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Lightning ignores SIGINT after Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not [
        each.name for each in threading.enumerate() if each.name.startswith(("save", "lightning_ptm", "ptm-io"))
    ]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def fitted_twice(strategy: AngelPTMStrategy | None, first: Callable[[L.Trainer, Twin], None], *callbacks: Any) -> Twin:
    """A module after a fit by `first`, and after another by the same Trainer, whose disk is sound then."""
    with quietly():
        torch.manual_seed(0)
        module = Twin()
        fits = trainer(strategy, enable_checkpointing=True, callbacks=list(callbacks))
        first(fits, module)
        if strategy is not None:
            strategy.save_ops = None
        fits.fit_loop.max_epochs = 2
        fits.fit(module, vectors(count=STEPS))
    return module


def fit(fits: L.Trainer, module: Twin) -> None:
    fits.fit(module, vectors(count=STEPS))


def after_last_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=STEPS, save_top_k=-1, filename="{step}")


@pytest.mark.parametrize("where", ["writing", "in place"])
def test_weights_come_back_after_a_background_save_that_failed_in_any_way(
    strategy_at: MakeStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    strategy = strategy_at("masters_on_disk", **BEHIND)

    def fails(fits: L.Trainer, module: Twin) -> None:
        with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=r"no room.*earlier checkpoints"):
            if where == "writing":
                strategy.save_ops = Fails()
            else:
                patched.setattr(Draft, "commit", no_room)
            fit(fits, module)

    ours = fitted_twice(strategy, fails, after_last_step(tmp_path / "ours"))
    assert_alike(ours, fitted_twice(None, fit, after_last_step(tmp_path / "plain")))


@pytest.mark.parametrize("name", ["save 2", "lightning_ptm save"])
def test_a_background_save_without_its_threads_fails(
    strategy_at: MakeStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    strategy = strategy_at("masters_on_disk", checkpoints={**BEHIND["checkpoints"], "on_failure": "warn"})

    def fails(fits: L.Trainer, module: Twin) -> None:
        with monkeypatch.context() as patched:
            without_thread(patched, name)
            fit(fits, module)
        assert not list((tmp_path / "ours").glob("*.ckpt"))

    ours = fitted_twice(strategy, fails, after_last_step(tmp_path / "ours"))
    assert_alike(ours, fitted_twice(None, fit, after_last_step(tmp_path / "plain")))


def test_a_set_up_without_its_threads_ends_those_that_have_started(
    strategy_at: MakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_thread(monkeypatch, "ptm-io-0-1")
    with quietly(), pytest.raises(RuntimeError, match="can't start new thread"):
        trainer(strategy_at("masters_on_disk")).fit(Twin(), vectors())


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_end_waits_for_the_last_checkpoint(
    strategy_at: MakeStrategy, tmp_path: Path, ctrl_c: None, times: int
) -> None:
    """The first takes effect when the checkpoint is written, the second abandons it; weights come back after both."""
    strategy = strategy_at("masters_on_disk", **BEHIND)
    strategy.save_ops = Interrupts(times)

    def interrupted(fits: L.Trainer, module: Twin) -> None:
        with pytest.raises(SystemExit):
            fit(fits, module)
        assert len(list((tmp_path / "ours").glob("*.ckpt"))) == 1 or times == 2

    ours = fitted_twice(strategy, interrupted, after_last_step(tmp_path / "ours"))
    assert_alike(ours, fitted_twice(None, fit, after_last_step(tmp_path / "plain")))


@pytest.mark.parametrize("tier", ["masters_on_disk", "three_tiers"])
def test_a_run_ends_though_on_exception_raises(strategy_at: MakeStrategy, tier: str, tmp_path: Path) -> None:
    """Lightning calls `teardown` of nothing then."""

    def breaks_off(fits: L.Trainer, module: Twin) -> None:
        with pytest.raises(LookupError):
            fit(fits, module)
        fits.callbacks.remove(breaks)  # type: ignore[attr-defined]
        module.blocks[0].weight.sum()  # an ordinary parameter

    alike = []
    for strategy in (strategy_at(tier), None):
        breaks = BreaksOff()
        alike.append(fitted_twice(strategy, breaks_off, breaks))
    assert_alike(*alike)


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_a_set_up_that_fails_is_reported_where_runs_are_saved_on_exceptions(
    strategy_at: MakeStrategy, tmp_path: Path, format: str
) -> None:
    strategy = strategy_at("ram", device_memory="128KiB", checkpoints={"state_dict_type": format})
    callbacks = [OnExceptionCheckpoint(tmp_path / "saved")]
    with quietly(), pytest.raises(CapacityError, match="pages"):
        trainer(strategy, enable_checkpointing=True, callbacks=callbacks).fit(Twin(), vectors())


def test_an_error_while_a_broken_run_is_saved_does_not_hide_the_first(
    strategy_at: MakeStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(L.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            raise ValueError("broken off")

    monkeypatch.setattr(Saving, "_begin", no_room)
    strategy = strategy_at("masters_on_disk", checkpoints={"state_dict_type": "sharded"})
    callbacks = [Breaks(), OnExceptionCheckpoint(tmp_path / "saved")]
    with quietly(), pytest.raises(ValueError, match="broken off"):
        trainer(strategy, enable_checkpointing=True, callbacks=callbacks).fit(Twin(), vectors())
