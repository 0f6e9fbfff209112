"""A long run, and many short ones after each other, take as much of the machine at their end as at their beginning.

What grows is found by a line that is fitted to many samples, not by the first and the last of them. `SOAK_SECONDS` says how
long a run is soaked (60 by itself).
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy
import pytest
import torch
from kit.plain_loop import TrainModule, make_trainer, vectors
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.malloc import malloc_in_use_bytes
from lightning_ptm.storage.writer import SaveOps

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
EVERY = 20
"""Steps between two samples, and between two validations."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("masters_on_disk", {}),
    "sharded": ("three_tiers", {"checkpoints": {"state_dict_type": "sharded"}, "recompute": "all"}),
    "async": ("all_on_disk", {"checkpoints": {"state_dict_type": "sharded", "async_save": True}}),
    "lock-free": (
        "lock_free",
        {"checkpoints": {"state_dict_type": "sharded", "async_save": True}, "lock_free": {"max_staleness": 3}},
    ),
}


class Delays:
    """A disk that now and then takes some milliseconds longer."""

    def __init__(self) -> None:
        self._chance = random.Random(0)

    def wait(self) -> None:
        if self._chance.random() < 0.02:
            time.sleep(self._chance.random() * 0.01)


class SlowNowAndThen(FileOps):
    """The disk of the pages."""

    def __init__(self) -> None:
        self._delays = Delays()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._delays.wait()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._delays.wait()
        return super().pwritev(fd, buffers, offset)


class SavesSlowNowAndThen(SaveOps):
    """The disk of the checkpoints."""

    def __init__(self) -> None:
        self._delays = Delays()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._delays.wait()
        return super().pwritev(fd, buffers, offset)


class Soaked(TrainModule):
    """Blocks of more than 4096 parameters each, so that each is a unit; remembers no losses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("held_out", self(batch))


class ThingsNow:
    """Resources of the machine that this process uses, and how much may be added in the time that is soaked, noise
    included."""

    MOST: ClassVar[dict[str, float]] = {
        "resident bytes": 1 << 20,
        "bytes of malloc": 256 << 10,
        "objects": 200,
        "mapped regions": 8,
        "open files": 2,
        "threads": 2,
        "paged tensors": 0.5,
        "pages in use": 8,
        "bytes on the disk": 512 << 10,
    }

    MOST_SAMPLES = 1 << 17
    """Number of samples, allocated at the beginning: lists that grow for an hour are found, too."""

    LEAST_SAMPLES = 4
    """For any line; more for one that says much."""

    def __init__(self) -> None:
        self.samples = numpy.full((len(self.MOST), self.MOST_SAMPLES), numpy.nan)
        self.count = 0
        # Python's table of interned strings, to which pathlib adds the parts of each new path, keeps places of those that
        # are gone until it is full, and doubles then: 3.8 MB, once, behind 36,000 steps. Here it does before.
        for number in range(120_000):
            sys.intern(f"a string that is gone {number}")

    def look(self, kept: Path, strategy: Any = None) -> None:
        gc.collect()
        allocator = None if strategy is None else strategy.engine.allocator
        tiers = [] if allocator is None else list(strategy.engine.blueprint.budget)
        now = {
            "resident bytes": _resident_bytes(),
            "bytes of malloc": malloc_in_use_bytes(),
            "objects": len(gc.get_objects()),
            "mapped regions": len(Path("/proc/self/maps").read_text().splitlines()),
            "open files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "paged tensors": 0 if allocator is None else len(allocator.live_tensors()),
            "pages in use": sum(allocator.capacity_bytes(tier) - allocator.free_bytes(tier) for tier in tiers) >> 16,  # type: ignore[union-attr]
            "bytes on the disk": _bytes_below(kept) + _bytes_without_name(),
        }
        self.samples[:, self.count] = [now[name] for name in self.MOST]
        self.count += 1

    def grown(self) -> dict[str, float]:
        """Returns the rise of the fitted line, without the first third, in which everything that is made once is
        made."""
        found = {}
        for name, values in zip(self.MOST, self.samples, strict=True):
            later = values[self.count // 3 : self.count]
            slope, _ = numpy.polyfit(numpy.arange(len(later)), later, 1)
            found[name] = float(slope) * (len(later) - 1)
        return found

    def check(self) -> None:
        grown = self.grown()
        print(self.count, "samples,", {name: round(value, 1) for name, value in grown.items()})
        assert self.count >= 12, "too few samples for a line"
        too_much = {name: self._growth(name) for name, value in grown.items() if value > self.MOST[name]}
        assert too_much == {}, "whether it grew bit by bit or at once is seen in these samples"

    def _growth(self, name: str) -> list[int]:
        """Returns 40 samples of a resource, evenly spaced over the run, relative to the first."""
        values = self.samples[list(self.MOST).index(name)]
        return [int(values[at] - values[0]) for at in numpy.linspace(0, self.count - 1, 40).astype(int)]


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")  # without what files are mapped to


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # a save in progress
    return total


def _bytes_without_name() -> int:
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{number}")
        except OSError:
            continue
        total += status.st_blocks * 512 if status.st_nlink == 0 else 0
    return total


class Looks(L.Callback):
    """Samples after so many steps, and ends the run when its time is over."""

    def __init__(self, kept: Path, seconds: float, leak: Any = None) -> None:
        self.things = ThingsNow()
        self._kept = kept
        self._leak = leak
        self._end = time.monotonic() + seconds

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._leak is not None:
            self._leak()
        if trainer.global_step % EVERY == EVERY // 2:
            trainer.strategy.wait_for_checkpoint()
            self.things.look(self._kept, trainer.strategy)
            trainer.should_stop = time.monotonic() > self._end and self.things.count >= ThingsNow.LEAST_SAMPLES


def soak(strategy: Any, kept: Path, seconds: float, leak: Any = None) -> ThingsNow:
    """A run of short steps with validation, saves and delays of its disks."""
    strategy.file_ops, strategy.save_ops = SlowNowAndThen(), SavesSlowNowAndThen()
    looks = Looks(kept, seconds, leak)
    saves = ModelCheckpoint(
        kept, filename="{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=EVERY, save_last="link"
    )
    trainer = make_trainer(
        strategy,
        max_epochs=-1,
        val_check_interval=EVERY,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        callbacks=[saves, looks],
        gradient_clip_val=1.0,
    )
    torch.manual_seed(0)
    trainer.fit(Soaked(), vectors(200, 4, 96).loader(), vectors(2, 4, 96, seed=2).loader())
    return looks.things


@pytest.mark.slow
@pytest.mark.timeout(int(SECONDS) + 240)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_long_run_takes_no_more_and_no_more(strategy_at: Any, kind: str, tmp_path: Path) -> None:
    tier, settings = KINDS[kind]
    soak(strategy_at(tier, debug={"poison": False}, **settings), tmp_path / "kept", SECONDS).check()


@pytest.mark.slow
@pytest.mark.timeout(int(SECONDS) + 240)
@pytest.mark.parametrize("kind", list(KINDS))
def test_one_run_after_the_other_takes_no_more_and_no_more(strategy_at: Any, kind: str, tmp_path: Path) -> None:
    tier, settings = KINDS[kind]
    things = ThingsNow()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or things.count < 30:
        kept = tmp_path / "kept"
        saves = ModelCheckpoint(
            kept, filename="{step}", every_n_train_steps=2, save_top_k=1, enable_version_counter=False
        )
        trainer = make_trainer(
            strategy_at(tier, debug={"poison": False}, **settings),
            max_steps=4,
            enable_checkpointing=True,
            callbacks=[saves],
            num_sanity_val_steps=0,
        )
        trainer.fit(Soaked(), vectors(4, 4, 96).loader(), vectors(1, 4, 96, seed=2).loader())
        del trainer, saves
        things.look(kept)
    things.check()


LEAKS = {
    "bytes of malloc": lambda kept: kept.append(ctypes.create_string_buffer(1 << 16)),
    "objects": lambda kept: kept.append([[] for _ in range(10)]),
    "open files": lambda kept: kept.append(os.open(sys.executable, os.O_RDONLY)),
}


@pytest.mark.parametrize(
    "what", [what if what == "objects" else pytest.param(what, marks=pytest.mark.slow) for what in LEAKS]
)
def test_what_grows_is_found(strategy_at: Any, what: str, tmp_path: Path) -> None:
    kept: list[Any] = []
    things = soak(strategy_at("ram"), tmp_path / "kept", 3.0, lambda: LEAKS[what](kept))
    for file in kept if what == "open files" else ():
        os.close(file)
    assert things.grown()[what] > ThingsNow.MOST[what]
