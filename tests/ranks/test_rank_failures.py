"""A rank that fails takes the others with it at once: they end with an error that says why, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from kit.ranks.harness import End, watch_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from torch import Tensor

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.memory.disk import FileOps

PROMPT_S = 20.0
"""Far less than the collectives' time limit of 60 s: the others are told, they do not run into it."""


class Fault(Tower):
    """At step 1 the rank `culprit` does `act` at `place`."""

    culprit = 1
    place = "forward"

    def act(self) -> None:
        raise ValueError("this rank has had enough")

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        loss = super().loss(batch, rank, step)
        if rank == self.culprit and step == 1 and loss is not None:
            if self.place == "forward":
                self.act()
            # A hook in mid-backward: some units have been reduced by then, others have not.
            self.blocks[1].bonus.register_hook(lambda gradient: self.act())
        return loss


class RaisesInForward(Fault):
    pass


class RaisesInBackward(Fault):
    place = "backward"


class RankZeroRaises(Fault):
    culprit = 0


class DiesInForward(Fault):
    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesInBackward(DiesInForward):
    place = "backward"


class RankZeroDies(DiesInBackward):
    culprit = 0


class ExitsInBackward(Fault):
    place = "backward"

    def act(self) -> None:
        os._exit(5)


class NoLossOnOneRank(Tower):
    """Returns no loss on one rank, which Lightning itself refuses on several ranks."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        return None if rank == 1 and step == 1 else super().loss(batch, rank, step)


class RaisesInValidation(Tower):
    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        if self.trainer.global_rank == 1:
            raise ValueError("this rank has had enough")


class InterruptedInMidRun(Tower):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2 and self.trainer.global_rank == 1:
            raise KeyboardInterrupt


def fail_together(training: Training, world_size: int, folder: Path, tier: str) -> tuple[str, str, float, list[str]]:
    """(type and text of the error, its cause, seconds from step 1 to the end, threads left) of this rank's fit."""
    module = training.build()
    clock = Clock()
    trainer = make_trainer(
        training, make_strategy(folder, tier), world_size, callbacks=[clock], val_check_interval=3, limit_val_batches=1
    )
    data = loader(tokens(training, world_size), world_size)
    try:
        trainer.fit(module, data, data)
    except (Exception, SystemExit) as error:
        seconds = time.monotonic() - clock.started_s
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ptm")]
        return f"{type(error).__name__}: {error}", repr(error.__cause__), seconds, threads
    raise AssertionError("fit ended without an error")


class Clock(L.Callback):
    def __init__(self) -> None:
        self.started_s = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index <= 1:
            self.started_s = time.monotonic()


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ["ram", "all_on_disk"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("build", "culprit", "error"),
    [
        pytest.param(RaisesInForward, 1, "ValueError: this rank has had enough", marks=pytest.mark.slow),
        (RaisesInBackward, 1, "ValueError: this rank has had enough"),
        (RankZeroRaises, 0, "ValueError: this rank has had enough"),
        (RaisesInValidation, 1, "ValueError: this rank has had enough"),
        (NoLossOnOneRank, 1, "RuntimeError: Skipping the `training_step` by returning None"),
        (InterruptedInMidRun, 1, "SystemExit: 1"),
    ],
)
def test_a_rank_raises(build: Any, culprit: int, error: str, world_size: int, tier: str, disk: Path) -> None:
    outcomes = watch_ranks(fail_together, world_size, Training(build, "bf16-mixed"), world_size, disk, tier)
    for outcome in outcomes:
        assert outcome.end is End.RETURNED, outcome
        text, _, seconds, threads = outcome.value
        assert seconds < PROMPT_S, outcome
        assert threads == []
        if outcome.rank == culprit:
            assert text.startswith(error)
        else:
            assert text.startswith("RankError: ")
            # The rank that keeps the bulletin board may be gone before the others look.
            assert f"rank {culprit} failed with " in text or culprit == 0, text
            assert f"rank {outcome.rank}" in text
            assert "stops" in text


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("build", "code"),
    [
        pytest.param(DiesInForward, -9, marks=pytest.mark.slow),
        pytest.param(DiesInBackward, -9, marks=pytest.mark.slow),
        (RankZeroDies, -9),
        (ExitsInBackward, 5),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_dies(build: Any, code: int, world_size: int, disk: Path) -> None:
    outcomes = watch_ranks(fail_together, world_size, Training(build), world_size, disk, "masters_on_disk")
    for outcome in outcomes:
        if outcome.rank == build.culprit:
            assert outcome.end is End.EXITED
            assert outcome.exit_code == code
            continue
        assert outcome.end is End.RETURNED, outcome
        text, cause, seconds, threads = outcome.value
        assert text.startswith(("RankError: a collective of rank", "RankError: rank")), text
        assert "RankError" in cause or "onnection" in cause, cause
        assert seconds < PROMPT_S
        assert threads == []


# -- a rank that hangs ------------------------------------------------------------------------------------------------


class Hangs(Tower):
    """At step 1 rank 1 waits until the other has given up (it opens the pipe then)."""

    pipe = ""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        if rank == 1 and step == 1:
            Path(self.pipe).read_bytes()
        return super().loss(batch, rank, step)


def hang(pipe: str) -> str:
    training = Training(Hangs)
    strategy = AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, timeout=timedelta(seconds=5))
    module = training.build()
    module.pipe = pipe  # type: ignore[attr-defined]
    try:
        make_trainer(training, strategy, 2).fit(module, loader(tokens(training, 2), 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if os.environ["RANK"] == "0":
            Path(pipe).write_bytes(b"")
    raise AssertionError("fit ended without an error")


def test_a_rank_hangs_longer_than_the_timeout(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    outcomes = watch_ranks(hang, 2, str(pipe))
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    assert outcomes[0].value.startswith("RankError: a collective of rank 0 failed (")
    assert "another rank has probably died or hangs" in outcomes[0].value
    assert outcomes[1].value.startswith("RankError: ")


def fits_again_alone() -> str:
    """Rank 1 is gone between two runs, as after Ctrl-C, at which Lightning ends what it has started."""
    training = Training(Tower, batches=1)
    for run in range(2):
        if run and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        strategy = AngelPTMStrategy(page_size="64KiB", debug={"poison": True})
        try:
            make_trainer(training, strategy, 2).fit(training.build(), loader(tokens(training, 2), 2))
        except Exception as error:
            return f"{run}: {type(error).__name__}: {error}"
    raise AssertionError("fit ended without an error")


def test_a_rank_that_is_gone_before_the_next_run_is_told_of() -> None:
    outcomes = watch_ranks(fits_again_alone, 2)
    assert outcomes[0].end is End.RETURNED, outcomes
    assert outcomes[0].value.startswith(
        "1: RankError: rank 0 waited for the other ranks at the start of a run, and one did not arrive ("
    )
    assert outcomes[0].value.endswith("start the script again")


# -- a disk that fails on one rank ------------------------------------------------------------------------------------


class FailsOnRankOne(FileOps):
    """From the training's first step on, reads of rank 1 fail."""

    broken = False

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


class BreakTheDisk(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 1 and trainer.global_rank == 1:
            trainer.strategy.file_ops.broken = True  # type: ignore[attr-defined]


def lose_the_disk(folder: Path) -> str:
    training = Training(Tower)
    strategy = make_strategy(folder, "all_on_disk")
    strategy.file_ops = FailsOnRankOne()
    try:
        make_trainer(training, strategy, 2, callbacks=[BreakTheDisk()]).fit(
            training.build(), loader(tokens(training, 2), 2)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("fit ended without an error")


def test_a_disk_fails_on_one_rank(disk: Path) -> None:
    outcomes = watch_ranks(lose_the_disk, 2, disk)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    assert outcomes[1].value.startswith("PageIOError: reading page")
    assert outcomes[0].value.startswith("RankError: rank 1 failed with PageIOError: reading page")


# -- Lightning's own launcher -----------------------------------------------------------------------------------------

SCRIPT = """
import os, pathlib, sys
import lightning as L, torch
import lightning_ptm
from torch.utils.data import DataLoader

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
    def training_step(self, batch, index):
        pathlib.Path(sys.argv[1], str(self.trainer.global_rank)).write_text(str(os.getpid()))
        if index == 1 and self.trainer.global_rank == 1:
            raise ValueError("this rank has had enough")
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

L.Trainer(accelerator="cpu", devices=2, strategy="angel_ptm", max_epochs=1, logger=False, enable_checkpointing=False,
          enable_progress_bar=False, enable_model_summary=False).fit(Module(), DataLoader(torch.randn(64, 64), 4))
"""


def ends(pid: int, within_s: float = PROMPT_S) -> bool:
    """Whether a process, which need not be a child, has ended or does so in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def test_ranks_of_lightnings_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    pids = tmp_path / "pids"
    pids.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "LOCAL_", "MASTER_"))
    }
    ended = subprocess.run(
        [sys.executable, str(script), str(pids)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert "ValueError: this rank has had enough" in ended.stderr
    ranks = {path.name: int(path.read_text()) for path in pids.iterdir()}
    assert ranks.keys() == {"0", "1"}
    assert all(ends(pid) for pid in ranks.values())
