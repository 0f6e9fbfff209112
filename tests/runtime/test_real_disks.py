"""Disks that are full, break down or are of another kind, as the system itself has them (`kit/real_disks.py`): a run works,
or ends with one sentence; the last checkpoint is whole, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.checkpoint_runs import BATCHES, names_in, same
from kit.plain_loop import make_trainer
from kit.real_disks import break_down, fill, mounted
from kit.settings import merged
from kit.stacks import ScheduledStack

from lightning_ptm import AngelPTMStrategy, CheckpointError, PageIOError
from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.sharded import load

SIZE = 64 << 20
SAVES: dict[str, dict[str, Any]] = {
    "full": {},
    "sharded": {"checkpoints": {"state_dict_type": "sharded"}},
    "async": {"checkpoints": {"state_dict_type": "sharded", "async_save": True}},
    "lock-free": {"checkpoints": {"state_dict_type": "sharded", "async_save": True}, "lock_free": {"max_staleness": 0}},
}


def make(disk: Path, **settings: Any) -> AngelPTMStrategy:
    homes = {} if settings.get("lock_free") else {"offload_optimizer": "disk", "offload_parameters": "disk"}
    return AngelPTMStrategy(disk_path=disk, page_size="64KiB", **{**homes, **settings})


class SavesAfterSteps(L.Callback):
    """Saves after each of these steps; `before` is called before the second time."""

    def __init__(self, folder: Path, before: Callable[[], object], steps: tuple[int, ...] = (2, 4)) -> None:
        self.folder = folder
        self.steps = steps
        self.before = before

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            if trainer.global_step == self.steps[1]:
                trainer.strategy.wait_for_checkpoint()  # type: ignore[attr-defined]
                self.before()
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def trained(strategy: AngelPTMStrategy, *callbacks: L.Callback, **given: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = ScheduledStack()
    trainer = make_trainer(strategy, max_epochs=1, callbacks=list(callbacks))
    trainer.fit(module, BATCHES.loader(), **given)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow_unless("ext4")
@pytest.mark.parametrize("kind", ["ext4", "tmpfs", pytest.param("overlay", marks=pytest.mark.slow)])
def test_kinds_of_file_systems_work(kind: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", kind, SIZE) as disk:
        before = SavesAfterSteps(disk / "kept", lambda: None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = trained(make(disk, **SAVES["async"]), before)
        said = [str(each.message) for each in caught if str(disk) in str(each.message)]
        assert len(said) == (kind == "tmpfs") and all("which is memory" in each for each in said)
        assert load(disk / "kept" / "4.ckpt")["global_step"] == 4
        assert names_in(disk / "kept") == ["2.ckpt", "4.ckpt"]
        assert sorted(path.name for path in disk.iterdir() if path.name != "lost+found") == ["kept"]
    assert equal(ours, trained(AngelPTMStrategy()))


def read(path: Path) -> Any:
    return load(path) if path.is_dir() else FileCheckpointIO().load_checkpoint(path)


def check_kept(kept: Path, expected: Path) -> None:
    """Checks that the kept checkpoints are those of an undisturbed run at that step, bit for bit, and nothing else
    exists."""
    names = names_in(kept)
    assert names == ["2.ckpt"] or names == ["2.ckpt", "4.ckpt"]
    assert all(same(read(kept / name), read(expected / name)) for name in names)


@pytest.fixture
def expected(tmp_path: Path) -> Path:
    """Checkpoints of a run in RAM."""
    trained(
        AngelPTMStrategy(checkpoints={"state_dict_type": "full"}), SavesAfterSteps(tmp_path / "expected", lambda: None)
    )
    return tmp_path / "expected"


@pytest.mark.slow_unless("full-True", "sharded-True")
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("kind", ["full", "sharded", "async", "lock-free"])
def test_a_save_finds_the_disk_full_that_has_the_pages(
    kind: str, goes_on: bool, expected: Path, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "ext4", SIZE) as disk:
        saves = SavesAfterSteps(disk / "kept", lambda: fill(disk))
        strategy = make(disk, **merged(SAVES[kind], checkpoints={"on_failure": "warn" if goes_on else "stop"}))
        if goes_on:
            with pytest.warns(UserWarning, match=f"the run goes on.*{os.strerror(errno.ENOSPC)}"):
                ours = trained(strategy, saves)
            assert equal(ours, trained(AngelPTMStrategy()))
        else:
            with pytest.raises(CheckpointError, match=f"{os.strerror(errno.ENOSPC)}; free space on that disk"):
                trained(strategy, saves)
        check_kept(disk / "kept", expected)
        assert names_in(disk / "kept") == ["2.ckpt"]
        (disk / "of_others").unlink()
        assert sorted(path.name for path in disk.iterdir() if path.name != "lost+found") == ["kept"]


@pytest.mark.slow_unless("async")
@pytest.mark.parametrize("kind", [pytest.param("sharded", marks=pytest.mark.slow), "async", "lock-free"])
def test_the_disk_of_the_pages_breaks_down(kind: str, expected: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with mounted(tmp_path / "disk", "ext4", SIZE) as disk:
        # Whichever reads first behind the breakdown: a step, or the next save.
        with pytest.raises((PageIOError, CheckpointError), match=re.escape(str(disk))) as caught:
            trained(make(disk, **SAVES[kind]), SavesAfterSteps(kept, lambda: break_down(disk)))
        assert os.strerror(errno.EIO) in str(caught.value) and "resume from a checkpoint" in str(caught.value)
    check_kept(kept, expected)


@pytest.mark.slow_unless("async", "lock-free")
@pytest.mark.parametrize("kind", list(SAVES))
def test_the_disk_of_the_checkpoints_breaks_down(kind: str, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    with mounted(tmp_path / "disk", "ext4", SIZE) as disk:
        saves = SavesAfterSteps(disk / "kept", lambda: break_down(disk))
        with pytest.raises(CheckpointError, match=re.escape(str(disk))):
            trained(make(pages, **SAVES[kind]), saves)
    assert names_in(pages) == []
