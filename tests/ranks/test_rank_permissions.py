"""Places without permission: an error on every rank that names the path and says what to do.

Root may do everything, so the ranks become somebody else first; another user's ranks stay who they are. All cases share one
start of the ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.utils.serialization
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from kit.settings import merged
from safetensors.torch import save_file

NOBODY = 65534
SHORT = Training(Tower, batches=1)
WRITE = "Permission denied; save where you may write; earlier checkpoints are untouched"
READ = "cannot be read: Permission denied; give the user of this process the right to read it and to enter its folders"
FILES = ("lightning.pt", "0001.exp_avg.safetensors", "ranges-00001.json")
"""Files of a sharded checkpoint, one of each kind but the index."""


def become_nobody(own: Path) -> None:
    """For the rest of this process's life, with what is in `own`. Collective."""
    if os.getuid() == 0:
        for path in own.rglob("*"):
            os.chown(path, NOBODY, NOBODY)
        torch.distributed.barrier()
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


class Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self._path)


def fit(disk: Path, *, save: Path | None = None, resume: Path | None = None, **settings: Any) -> None:
    callbacks = [] if save is None else [Saves(save)]
    trainer = make_trainer(SHORT, make_strategy(disk, **settings), 2, callbacks=callbacks)
    trainer.fit(SHORT.build(), loader(tokens(SHORT, 2), 2), ckpt_path=None if resume is None else str(resume))


def fit_and_save(disk: Path, path: Path, **settings: Any) -> None:
    trainer = make_trainer(SHORT, make_strategy(disk, **settings), 2)
    trainer.fit(SHORT.build(), loader(tokens(SHORT, 2), 2))
    trainer.save_checkpoint(path)


def error_of(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Inside, nobody but root may read it. Collective."""
    mode = path.stat().st_mode
    torch.distributed.barrier()
    path.chmod(0)
    yield
    torch.distributed.barrier()
    path.chmod(mode)


def try_everything(root: Path) -> dict[str, str]:
    """Returns the errors of all attempts on this rank."""
    own, closed, hidden = root / "own", root / "closed", root / "hidden"
    sharded = {"checkpoints": {"state_dict_type": "sharded"}}
    full_path, sharded_path, weights = own / "full.ckpt", own / "sharded.ckpt", own / "weights.safetensors"
    fit(own, save=full_path)
    fit(own, save=sharded_path, **sharded)
    become_nobody(own)  # now that all modules have been imported, which nobody may be unable to
    attempts: dict[str, Callable[[], None]] = {
        "full save": partial(fit, own, save=closed / "x.ckpt"),
        "full save, new folder": partial(fit, own, save=closed / "new" / "x.ckpt"),
        "sharded save": partial(fit, own, save=closed / "x.ckpt", **sharded),
        "sharded save behind training": partial(
            fit, own, save=closed / "x.ckpt", **merged(sharded, checkpoints={"async_save": True})
        ),
        "full save after fit": partial(fit_and_save, own, closed / "x.ckpt"),
        "sharded save after fit": partial(fit_and_save, own, closed / "x.ckpt", **sharded),
        "disk_path": partial(fit, closed, offload_optimizer="disk"),
        "full load, hidden folder": partial(fit, own, resume=hidden / "x.ckpt"),
        "weights, hidden folder": partial(fit, own, weights=hidden / "model.safetensors"),
    }
    errors = {name: error_of(act) for name, act in attempts.items()}
    for path in (full_path, sharded_path, *(sharded_path / name for name in FILES)):
        with unreadable(path):
            errors[f"load {path.name}"] = error_of(
                partial(fit, own, resume=full_path if path == full_path else sharded_path)
            )
    with unreadable(weights):
        errors["weights"] = error_of(partial(fit, own, weights=weights))
    fit(own, resume=sharded_path)  # nothing is wrong with it
    return errors


@pytest.fixture
def root() -> Iterator[Path]:
    """Folders that others than their owner can reach, which pytest's cannot be."""
    with tempfile.TemporaryDirectory() as name:
        for folder, mode in (("", 0o755), ("own", 0o777), ("closed", 0o555), ("hidden", 0o000)):
            (Path(name) / folder).mkdir(exist_ok=True)
            (Path(name) / folder).chmod(mode)
        save_file(Tower().state_dict(), Path(name) / "own" / "weights.safetensors")
        yield Path(name)


def test_each_path_without_permission_is_named(root: Path) -> None:
    own, closed, hidden = root / "own", root / "closed", root / "hidden"
    expected = {
        "full save": f"CheckpointError: writing {closed / 'x.ckpt'} failed: {WRITE}",
        "full save, new folder": f"CheckpointError: writing {closed / 'new' / 'x.ckpt'} failed: {WRITE}",
        "sharded save": f"CheckpointError: writing {closed / 'x.ckpt'} failed: {WRITE}",
        "sharded save behind training": f"CheckpointError: writing {closed / 'x.ckpt'} failed: {WRITE}",
        "full save after fit": f"CheckpointError: writing {closed / 'x.ckpt'} failed: {WRITE}",
        "sharded save after fit": f"CheckpointError: writing {closed / 'x.ckpt'} failed: {WRITE}",
        "disk_path": f"ConfigError: disk_path {closed} cannot be written (Permission denied), so there is no disk tier; "
        "give a folder that this user",
        "full load, hidden folder": f"CheckpointError: {hidden / 'x.ckpt'} {READ}",
        "weights, hidden folder": f"CheckpointError: {hidden / 'model.safetensors'} {READ}",
        "load full.ckpt": f"CheckpointError: {own / 'full.ckpt'} {READ}",
        "load sharded.ckpt": f"CheckpointError: {own / 'sharded.ckpt' / 'index.json'} {READ}",
        **{f"load {name}": f"CheckpointError: {own / 'sharded.ckpt' / name} {READ}" for name in FILES},
        "weights": f"CheckpointError: {own / 'weights.safetensors'} {READ}",
    }
    for errors in run_ranks(try_everything, 2, root):
        assert errors.keys() == expected.keys()
        for name, text in errors.items():
            assert text.replace("rank 0: ", "").startswith(expected[name]), (name, text)
    assert not list(closed.iterdir())
