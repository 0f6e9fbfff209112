"""Checkpoints that are written while training goes on: they hold the moment at which they began, and nothing is lost when
the disk is slow, fails, or the run ends."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import pytest
import torch
from kit.checkpoint_runs import BATCHES, HALF, Full, FullDisk, fit, names_in, same, sharded, small_files
from kit.outcomes import Outcome
from kit.plain_loop import make_trainer
from kit.settings import merged
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.checkpoints import saving
from lightning_ptm.checkpoints.save_queue import SaveQueue
from lightning_ptm.errors import CheckpointError, ConfigError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.runtime.full_params.snapshot import Snapshot, SnapshotPart
from lightning_ptm.runtime.tensors.page_io import BUFFERS, PageIOBuffers
from lightning_ptm.runtime.updates.updates import SynchronousUpdates
from lightning_ptm.sharded import load
from lightning_ptm.storage import writer
from lightning_ptm.storage.index import PARTIAL
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.terms import Tier


class Gate(SaveOps):
    """A disk that takes no data until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread().name.startswith("save"):  # not the caller's, which makes the files
            assert self.opened.wait(60)
        return super().pwritev(fd, buffers, offset)


class Opens(L.Callback):
    """Opens a gate at a batch of the second epoch, which is trained while the checkpoint of the first is in progress."""

    def __init__(self, gate: Gate, folder: Path, batch: int = 2) -> None:
        self._gate = gate
        self._folder = folder
        self._batch = batch
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch == 1 and index == self._batch:
            self.seen.append(sorted(entry.name for entry in self._folder.glob("*.ckpt")))
            self._gate.opened.set()


def behind(strategy_at: Any, tier: str, ops: SaveOps | None = None, **settings: Any) -> AngelPTMStrategy:
    strategy = sharded(strategy_at, tier, **merged(settings, checkpoints={"async_save": True}))
    strategy.save_ops = ops
    return strategy


@cache
def written_at_once(base: Path, precision: str = "bf16-mixed") -> tuple[Outcome, Path]:
    """A run whose checkpoints are written before it goes on, and their folder; not to be written to."""
    folder = Path(mkdtemp(dir=base))
    strategy = AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, checkpoints={"state_dict_type": "sharded"})
    return fit(strategy, folder, precision=precision, save_last=False)[0], folder


@pytest.fixture
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    return written_at_once(tmp_path_factory.getbasetemp())


def test_it_holds_the_moment_at_which_it_began(strategy_at, tier: str, expected, tmp_path: Path) -> None:
    gate = Gate()
    opens = Opens(gate, tmp_path / "behind")
    strategy = behind(strategy_at, tier, gate)
    outcome, _ = fit(strategy, tmp_path / "behind", callbacks=[opens], save_last=False)
    outcome.assert_equal(expected[0])
    assert opens.seen == [[]]  # training has gone on without it
    for name in ("epoch=0.ckpt", "epoch=1.ckpt"):
        assert same(load(tmp_path / "behind" / name), load(expected[1] / name)), name
    assert not list((tmp_path / "behind").glob(f"{PARTIAL}*"))


def test_who_loads_a_checkpoint_that_is_in_progress_waits_for_it(
    strategy_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's search for a learning rate loads in this way, a few steps after it has saved."""
    gate, finish = Gate(), SaveQueue.finish

    def opens(saves: SaveQueue) -> None:
        if saves._current is not None:
            gate.opened.set()
        finish(saves)

    monkeypatch.setattr(SaveQueue, "finish", opens)
    strategy = behind(strategy_at, "ram", gate)
    trainer, module = make_trainer(strategy, default_root_dir=tmp_path / "root"), Full()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = Tuner(trainer).lr_find(module, BATCHES.loader(), num_training=3, update_attr=False)
    assert found is not None and len(found.results["lr"]) > 0
    assert same(dict(module.state_dict()), before)
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.slow_unless("masters_on_disk-bf16-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
@pytest.mark.parametrize("tier", ["ram", "masters_on_disk", "all_on_disk"])
def test_in_other_precisions(strategy_at, tier: str, precision: str, tmp_path: Path, tmp_path_factory) -> None:
    gate = Gate()
    settings: dict[str, Any] = {"precision": precision, "save_last": False}
    fit(behind(strategy_at, tier, gate), tmp_path / "it", callbacks=[Opens(gate, tmp_path)], **settings)
    _, expected = written_at_once(tmp_path_factory.getbasetemp(), precision)
    for name in ("epoch=0.ckpt", "epoch=1.ckpt"):
        assert same(load(tmp_path / "it" / name), load(expected / name)), name


@pytest.mark.slow_unless("lock_free")
@pytest.mark.parametrize("tier", ["ram", "masters_on_disk", "lock_free"])
def test_updates_wait_when_there_is_no_room_for_copies(
    strategy_at, tier: str, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(saving, "BUFFERS", 1)
    monkeypatch.setattr(saving, "_COPIES_SHARE", 1 << 60)
    outcome, _ = fit(behind(strategy_at, tier), tmp_path / "behind")
    outcome.assert_equal(expected[0])
    for name in ("epoch=0.ckpt", "epoch=1.ckpt"):
        assert same(load(tmp_path / "behind" / name), load(expected[1] / name)), name


def test_the_wait_is_counted(strategy_at, tmp_path: Path) -> None:
    seen = {}

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen[trainer.global_step] = trainer.strategy.statistics().stall_s["save"]

    fit(behind(strategy_at, "masters_on_disk"), tmp_path, callbacks=[Looks()])
    assert seen[1] == seen[HALF] == 0.0 < seen[HALF + 1] < 60.0


def test_last_may_be_a_link(strategy_at, tmp_path: Path) -> None:
    gate = Gate()
    fit(behind(strategy_at, "ram", gate), tmp_path, callbacks=[Opens(gate, tmp_path)], save_last="link")
    assert (tmp_path / "last.ckpt").resolve().name == "epoch=1.ckpt"
    _, trainer = fit(behind(strategy_at, "ram"), tmp_path, tmp_path / "last.ckpt", max_epochs=3)
    assert trainer.global_step == 3 * HALF


class _KeepsOne(ModelCheckpoint):
    """Saves after every second step and keeps the newest only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, filename="{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=2)


def test_an_earlier_one_is_removed_when_its_successor_is_in_place(strategy_at, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    gate = Gate()
    strategy = behind(strategy_at, "ram", gate)
    seen: dict[int, list[str]] = {}

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                gate.opened.set()
                strategy.wait_for_checkpoint()
                gate.opened.clear()
            if trainer.global_step == 5:
                seen[5] = sorted(entry.name for entry in folder.glob("*.ckpt"))
                gate.opened.set()

    trainer = make_trainer(
        strategy, max_epochs=1, enable_checkpointing=True, callbacks=[_KeepsOne(folder), Looks()], log_every_n_steps=1
    )
    trainer.fit(Full(), BATCHES.loader())
    assert seen == {5: ["step=2.ckpt"]}  # step=4 is on its way
    assert [entry.name for entry in folder.iterdir()] == ["step=8.ckpt"]


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ["ram", "masters_on_disk"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failure_stops_the_run_and_leaves_the_earlier_one(
    strategy_at, tier: str, number: int, tmp_path: Path
) -> None:
    class FailsLater(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            if trainer.global_step == 3:
                trainer.strategy.save_ops = FullDisk(25, number)
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    trainer = make_trainer(behind(strategy_at, tier), max_epochs=1, callbacks=[FailsLater()])
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        trainer.fit(Full(), BATCHES.loader())
    assert load(tmp_path / "x.ckpt")["global_step"] == 2
    assert names_in(tmp_path) == ["disk", "x.ckpt"]


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoints": {"async_save": True}},
        {"checkpoints": {"async_save": False}},
        {"checkpoints": {"state_dict_type": "full"}},
    ],
    ids=str,
)
def test_a_run_may_go_on_after_a_failure(strategy_at, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    seen: list[list[str]] = []

    class FailsOnce(L.Callback):
        """The save after step 4 fails, and so does not replace that of step 2; that of step 6 replaces both."""

        broken = ExitStack()

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.strategy.wait_for_checkpoint()  # the one before it is to succeed
                self.broken.enter_context(small_files(10_000))
            else:
                self.broken.close()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                seen.append(sorted(entry.name for entry in folder.glob("*.ckpt")))

    strategy = strategy_at(
        "ram", **merged({"checkpoints": {"state_dict_type": "sharded", "on_failure": "warn"}}, settings)
    )
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[FailsOnce(), _KeepsOne(folder)],
        log_every_n_steps=1,
    )
    with pytest.warns(UserWarning, match="the run goes on"):
        trainer.fit(Full(), BATCHES.loader())
    assert trainer.global_step == 2 * HALF
    assert seen == [["step=2.ckpt"]]
    assert [entry.name for entry in folder.iterdir()] == ["step=8.ckpt"]


@pytest.mark.slow_unless("{'checkpoints': {'async_save': False}}")
@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoints": {"async_save": True}},
        {"checkpoints": {"async_save": False}},
        {"checkpoints": {"state_dict_type": "full"}},
    ],
    ids=str,
)
def test_a_link_names_what_is_in_place(strategy_at, settings: dict[str, Any], tmp_path: Path) -> None:
    class FailsLater(L.Callback):
        """The save after the second epoch fails."""

        broken = ExitStack()

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.strategy.wait_for_checkpoint()
                self.broken.enter_context(small_files(10_000))

        def teardown(self, *_: Any, **__: Any) -> None:
            self.broken.close()

    strategy = strategy_at(
        "ram", **merged({"checkpoints": {"state_dict_type": "sharded", "on_failure": "warn"}}, settings)
    )
    with pytest.warns(UserWarning, match="the run goes on"):
        fit(strategy, tmp_path, callbacks=[FailsLater()], save_last="link")
    assert (tmp_path / "last.ckpt").is_symlink() and (tmp_path / "last.ckpt").resolve().name == "epoch=0.ckpt"
    _, trainer = fit(strategy_at("ram"), tmp_path / "again", tmp_path / "last.ckpt")
    assert trainer.global_step == 2 * HALF


@pytest.mark.parametrize("behind_training", [True, False])
def test_what_was_to_be_removed_and_is_saved_again_stays(strategy_at, behind_training: bool, tmp_path: Path) -> None:
    class Slots(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            strategy = trainer.strategy
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "0.ckpt")
                strategy.wait_for_checkpoint()
            if trainer.global_step == 2:
                with small_files(10_000):
                    trainer.save_checkpoint(tmp_path / "1.ckpt")
                    strategy.wait_for_checkpoint()
                strategy.remove_checkpoint(tmp_path / "0.ckpt")  # stays, since 1 is not there
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "0.ckpt")

    strategy = sharded(strategy_at, "ram", checkpoints={"async_save": behind_training, "on_failure": "warn"})
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Slots()])
    with pytest.warns(UserWarning, match="the run goes on"):
        trainer.fit(Full(), BATCHES.loader())
    assert load(tmp_path / "0.ckpt")["global_step"] == 3
    assert names_in(tmp_path) == ["0.ckpt", "disk"]


@pytest.mark.parametrize("tier", ["ram", "masters_on_disk"])
def test_a_last_save_that_fails_leaves_the_weights(strategy_at, tier: str, tmp_path: Path) -> None:
    class FailsAtTheEnd(L.Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.save_ops = FullDisk(10, errno.EIO)
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    torch.manual_seed(0)
    expected = Full()
    make_trainer(sharded(strategy_at, tier), max_epochs=1).fit(expected, BATCHES.loader())
    torch.manual_seed(0)
    module = Full()
    trainer = make_trainer(behind(strategy_at, tier), max_epochs=1, callbacks=[FailsAtTheEnd()])
    with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
        trainer.fit(module, BATCHES.loader())
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert ours.dtype is torch.float32 and torch.equal(ours, theirs)


class Interrupted(L.Callback):
    """Ctrl-C while a checkpoint waits for the disk, in the wait for it."""

    def __init__(self, path: Path, gate: Gate) -> None:
        self._path = path
        self._gate = gate

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Timer(0.6, self._gate.opened.set).start()
            trainer.strategy.wait_for_checkpoint()


def test_ctrl_c_in_the_wait_for_it_does_not_give_it_up(strategy_at, tmp_path: Path) -> None:
    gate = Gate()
    strategy = behind(strategy_at, "masters_on_disk", gate)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Interrupted(tmp_path / "x.ckpt", gate)])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what runs in the background
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer.fit(Full(), BATCHES.loader())
    finally:
        signal.signal(signal.SIGINT, before)
    assert load(tmp_path / "x.ckpt")["global_step"] == 2


class InterruptedInACopy(L.Callback):
    """Ctrl-C while an update waits for room for a copy of what it changes; the disk takes nothing until then."""

    def __init__(self, path: Path, gate: Gate) -> None:
        self._path = path
        self._gate = gate
        self.watch = threading.Thread(target=self._interrupt, args=(threading.main_thread().ident,))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)
            self.watch.start()

    def _interrupt(self, main: int) -> None:
        looks = threading.Event()
        while not self._copies(sys._current_frames()[main]):
            looks.wait(0.001)
        signal.pthread_kill(main, signal.SIGINT)
        looks.wait(0.05)  # what would be given up at once has been given up by then
        self._gate.opened.set()

    @staticmethod
    def _copies(frame: Any) -> bool:
        return frame is not None and (
            frame.f_code.co_name == "before_write" or InterruptedInACopy._copies(frame.f_back)
        )


@pytest.mark.parametrize("tier", ["ram", "masters_on_disk"])
def test_ctrl_c_in_the_wait_for_room_does_not_give_it_up(
    strategy_at, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SavesAfterStep2(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "expected.ckpt")

    torch.manual_seed(0)
    trainer = make_trainer(sharded(strategy_at, tier), max_epochs=1, max_steps=2, callbacks=[SavesAfterStep2()])
    trainer.fit(Full(), BATCHES.loader())
    monkeypatch.setattr(writer, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(saving, "BUFFERS", 1)
    monkeypatch.setattr(saving, "_COPIES_SHARE", 1 << 60)
    gate = Gate()
    strategy = behind(strategy_at, tier, gate)
    interrupted = InterruptedInACopy(tmp_path / "x.ckpt", gate)
    torch.manual_seed(0)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[interrupted])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer.fit(Full(), BATCHES.loader())
        interrupted.watch.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert trainer.global_step in (
        2,
        3,
    )  # where states are on disk, the next step's forward may do a step's last updates
    assert same(load(tmp_path / "x.ckpt"), load(tmp_path / "expected.ckpt"))
    assert names_in(tmp_path) == ["disk", "expected.ckpt", "x.ckpt"]


class Interrupts(SaveOps):
    """Ctrl-C when the first data go to the disk."""

    def __init__(self) -> None:
        self._done = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread().name.startswith("save") and not self._done:
            self._done = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().pwritev(fd, buffers, offset)


def test_ctrl_c_while_it_is_written_leaves_nothing(strategy_at, tmp_path: Path) -> None:
    class SavesEachBatch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    strategy = sharded(strategy_at, "masters_on_disk")
    strategy.save_ops = Interrupts()
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[SavesEachBatch()])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer.fit(Full(), BATCHES.loader())
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(names_in(tmp_path)) <= {"disk", "x.ckpt"}


class FailsInBackward(Full):
    """An exception when the first block's gradient comes, after the others have been updated."""

    def loss(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        loss = super().loss(batch, index)
        if index == 2:
            next(self.parameters()).register_hook(self._boom)
        return loss

    def _boom(self, gradient: torch.Tensor) -> None:
        raise ValueError("boom")


@pytest.mark.parametrize("lock_free", [False, True])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_no_checkpoint_of_two_steps_at_once(strategy_at, kind: str, lock_free: bool, tmp_path: Path) -> None:
    settings = {"lock_free": {"max_staleness": 1}} if lock_free else {}
    strategy = strategy_at("masters_on_disk", checkpoints={"state_dict_type": kind}, **settings)
    keep = OnExceptionCheckpoint(tmp_path, "x")
    trainer = make_trainer(strategy, max_epochs=1, enable_checkpointing=True, callbacks=[keep])
    with pytest.raises(ValueError, match="boom"), pytest.warns(UserWarning, match="no checkpoint .*interrupted"):
        trainer.fit(FailsInBackward(), BATCHES.loader())
    assert not (tmp_path / "x.ckpt").exists()


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_no_checkpoint_of_half_a_step(strategy_at, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, seen = SynchronousUpdates._update, []

    def interrupted(updates: SynchronousUpdates, *arguments: Any) -> None:
        seen.append(arguments)
        if len(seen) == 2:
            raise KeyboardInterrupt
        update(updates, *arguments)

    monkeypatch.setattr(SynchronousUpdates, "_update", interrupted)
    keep = OnExceptionCheckpoint(tmp_path, "x")
    trainer = make_trainer(
        strategy_at("ram", checkpoints={"state_dict_type": kind}),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[keep],
    )
    with (
        pytest.raises((KeyboardInterrupt, SystemExit)),
        pytest.warns(
            UserWarning, match=r"(no checkpoint|mix two optimizer steps).*interrupted within a step, when some units"
        ),
    ):
        trainer.fit(Full(), BATCHES.loader())
    assert not (tmp_path / "x.ckpt").exists()
    with pytest.warns(UserWarning, match="weights in .* mix two optimizer steps"):
        trainer.save_checkpoint(tmp_path / "by hand.ckpt", weights_only=True)


def test_an_earlier_save_that_failed_does_not_prevent_that_on_an_exception(strategy_at, tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.strategy.save_ops = FullDisk(25, errno.ENOSPC)
                trainer.save_checkpoint(tmp_path / "earlier.ckpt")  # fails when training goes on
                trainer.strategy.save_ops = None
            if trainer.global_step == 3:
                raise RuntimeError("the user's own")

    strategy = strategy_at("ram", checkpoints={"state_dict_type": "sharded", "async_save": True})
    keep = OnExceptionCheckpoint(tmp_path, "x")
    trainer = make_trainer(strategy, max_epochs=1, enable_checkpointing=True, callbacks=[Fails(), keep])
    with pytest.raises(RuntimeError, match="the user's own"), pytest.warns(UserWarning, match="No space left"):
        trainer.fit(Full(), BATCHES.loader())
    assert load(tmp_path / "x.ckpt")["global_step"] == 3


def test_weights_edited_when_gathered_are_not_in_it(strategy_at, tmp_path: Path) -> None:
    gate = Gate()
    found: dict[str, torch.Tensor] = {}

    class Edits(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
                threading.Timer(0.2, gate.opened.set).start()
                with trainer.strategy.gathered(module):
                    found.update({name: value.clone() for name, value in module.named_parameters()})
                    for value in module.parameters():
                        value.data.zero_()

    trainer = make_trainer(behind(strategy_at, "ram", gate), max_epochs=1, limit_train_batches=3, callbacks=[Edits()])
    trainer.fit(Full(), BATCHES.loader())
    weights = load(tmp_path / "x.ckpt")["state_dict"]
    assert found and all(torch.equal(weights[name], value) for name, value in found.items())


def test_a_run_that_fails_finishes_its_checkpoint(strategy_at, tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            if trainer.global_step == 3:
                raise RuntimeError("the user's own")

    trainer = make_trainer(behind(strategy_at, "masters_on_disk"), max_epochs=1, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer.fit(Full(), BATCHES.loader())
    assert load(tmp_path / "x.ckpt")["global_step"] == 2
    assert names_in(tmp_path) == ["disk", "x.ckpt"]


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"use Checkpoints\(state_dict_type='sharded', async_save=True\)"):
        AngelPTMStrategy(checkpoints={"async_save": True})
    with pytest.raises(ConfigError, match="use 'stop' or 'warn'"):
        AngelPTMStrategy(checkpoints={"on_failure": "ignore"})


# -- the snapshot itself ----------------------------------------------------------------------------------------------------

CELL = 4096


@pytest.fixture(params=[Tier.DEVICE, Tier.DISK])
def allocator(request: pytest.FixtureRequest, disk: Path) -> Any:
    with Allocator(
        page_size=1 << 16,
        backend=CpuBackend(),
        sizes={Tier.DEVICE: 1 << 24, Tier.DISK: 1 << 24},
        disk_paths=[disk],
    ) as made:
        made.tier = request.param  # type: ignore[attr-defined]
        yield made


def _filled(allocator: Any, numel: int, values: torch.Tensor) -> Any:
    staged = allocator.allocate("values", numel, torch.float32, Tier.DEVICE)
    staged.tensor().copy_(values)
    paged = allocator.allocate("states", numel, torch.float32, allocator.tier)
    allocator.copy(staged, paged).wait()
    allocator.release(staged)
    return paged


def _buffers(allocator: Any) -> PageIOBuffers:
    """Returns buffers of a cell each, as an asynchronous save has them for what is on disk."""
    count = BUFFERS if allocator.tier is Tier.DISK else 0
    return PageIOBuffers(
        allocator, [allocator.allocate("a cell", CELL, torch.float32, Tier.DEVICE) for _ in range(count)]
    )


@pytest.mark.parametrize("seed", range(8))
def test_every_cell_is_taken_once_before_it_changes(allocator: Any, seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, 20 * CELL) for _ in range(4)]
    before = [torch.randn(numel) for numel in lengths]
    tensors = [_filled(allocator, numel, values) for numel, values in zip(lengths, before, strict=True)]
    taken = [torch.full((numel,), torch.nan) for numel in lengths]
    times = [torch.zeros(numel) for numel in lengths]

    def put(index: int, start: int, values: torch.Tensor) -> None:
        taken[index][start : start + values.numel()] = values
        times[index][start : start + values.numel()] += 1

    parts = [SnapshotPart(paged, lambda start, values, i=i: put(i, start, values)) for i, paged in enumerate(tensors)]
    buffers = _buffers(allocator)
    snapshot = Snapshot(allocator, parts, CELL, buffers)

    def update() -> None:
        """Updates cell by cell, as the updater does, in an order of its own, more than once."""
        cells = [(i, start) for i, numel in enumerate(lengths) for start in range(0, numel, CELL)] * 2
        chance.shuffle(cells)
        window = allocator.allocate("window", CELL, torch.float32, Tier.DEVICE)
        for index, start in cells:
            numel = min(CELL, lengths[index] - start)
            allocator.copy(tensors[index], window, source_start=start, numel=numel).wait()
            snapshot.before_write(tensors[index], start, window.tensor()[:numel])
            window.tensor().add_(1.0)
            allocator.copy(window, tensors[index], target_start=start, numel=numel).wait()

    updater = threading.Thread(target=update)
    updater.start()
    snapshot.copy_all()
    updater.join()
    buffers.close()
    for index in range(len(lengths)):
        assert torch.equal(taken[index], before[index])
        assert bool((times[index] == 1).all())


def test_updates_go_on_when_it_fails(allocator: Any) -> None:
    paged = _filled(allocator, 4 * CELL, torch.zeros(4 * CELL))

    def put(start: int, values: torch.Tensor) -> None:
        raise CheckpointError("no room")

    buffers = _buffers(allocator)
    snapshot = Snapshot(allocator, [SnapshotPart(paged, put)], CELL, buffers)
    snapshot.before_write(paged, CELL, torch.zeros(CELL))
    snapshot.before_write(paged, 0, torch.zeros(CELL))
    with pytest.raises(CheckpointError, match="no room"):
        snapshot.copy_all()
    buffers.close()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_copy(allocator: Any, times: int) -> None:
    """The first one comes when the cell has been taken. A second one is heard at once, and nobody waits for that cell."""
    paged = _filled(allocator, 3 * CELL, torch.arange(3.0 * CELL))
    taken = torch.full((3 * CELL,), torch.nan)

    def put(start: int, values: torch.Tensor) -> None:
        middle = values.numel() // 2
        taken[start : start + middle] = values[:middle]
        for _ in range(times if start == CELL else 0):
            signal.raise_signal(signal.SIGINT)
        taken[start + middle : start + values.numel()] = values[middle:]

    buffers = _buffers(allocator)
    snapshot = Snapshot(allocator, [SnapshotPart(paged, put)], CELL, buffers)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            snapshot.before_write(paged, CELL, torch.arange(float(CELL), 2.0 * CELL))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    if times == 1:
        snapshot.copy_all()
        assert torch.equal(taken, torch.arange(3.0 * CELL))
    else:
        with pytest.raises(KeyboardInterrupt):
            snapshot.copy_all()
    buffers.close()
