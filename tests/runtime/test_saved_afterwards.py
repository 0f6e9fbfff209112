"""`trainer.save_checkpoint` after `fit` has returned: what a run's last checkpoint would have been, or an error that says
what to do."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.checkpoint_runs import BATCHES, HALF, Full, FullDisk, fit, names_in, same, sharded
from kit.outcomes import Outcome
from kit.plain_loop import make_trainer
from torch import Tensor, nn

from lightning_ptm.checkpoints import restore
from lightning_ptm.errors import CheckpointError, UsageError
from lightning_ptm.sharded import load
from lightning_ptm.storage.index import read_index


class Odd(Full):
    """Model with a parameter that is a number, and two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.again = self.frozen

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().loss(batch, index)
        return None if loss is None else loss * self.gain


class SavesAtTheEnd(L.Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self._path)


IN_RAM = {"ram": {}, "masters_on_host": {"device_memory": "2MiB", "host_memory": "64MiB", "offload_optimizer": "host"}}


@pytest.mark.slow_unless("full-ram")
@pytest.mark.parametrize("settings", IN_RAM.values(), ids=IN_RAM)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_it_is_what_the_run_would_have_saved(strategy_at, kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    def strategy() -> Any:
        return strategy_at("ram", checkpoints={"state_dict_type": kind}, **settings)

    inside, after = tmp_path / "inside.ckpt", tmp_path / "after.ckpt"
    never, _ = fit(strategy(), tmp_path / "never", build=Odd)
    _, trainer = fit(strategy(), tmp_path / "first", build=Odd, max_epochs=1, callbacks=[SavesAtTheEnd(inside)])
    trainer.save_checkpoint(after)
    if kind == "sharded":
        assert same(load(inside), load(after))
        ours, theirs = read_index(after), read_index(inside)
        assert (ours.parameters, ours.state, ours.optimizers) == (theirs.parameters, theirs.state, theirs.optimizers)
        assert {(file.unit, file.kind) for file in ours.files} == {(file.unit, file.kind) for file in theirs.files}
    else:
        assert same(torch.load(inside, weights_only=False), torch.load(after, weights_only=False))
    again, _ = fit(strategy(), tmp_path / "again", after, build=Odd, seed=3)
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))


def room_for_weights_alone() -> int:
    """Free RAM as the end of a run sees it: none when states are to be given back."""
    return 0 if sys._getframe(2).f_code.co_name == restore.optimizer_states.__name__ else 1 << 40


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_states_that_ram_has_no_room_for_have_ended(
    strategy_at, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "free_host_bytes", room_for_weights_alone)
    outcome, trainer = fit(
        strategy_at("masters_on_disk", checkpoints={"state_dict_type": kind}), tmp_path / "run", max_epochs=1
    )
    with pytest.raises(UsageError, match=r"save inside the run, as ModelCheckpoint does, or give .*weights_only=True"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    saved = (load(tmp_path / "x.ckpt") if kind == "sharded" else torch.load(tmp_path / "x.ckpt"))["state_dict"]
    assert saved.keys() == outcome.weights.keys()
    assert all(torch.equal(value, outcome.weights[name]) for name, value in saved.items())


def test_weights_that_were_not_given_back_have_ended(strategy_at, tmp_path: Path) -> None:
    trainer = make_trainer(sharded(strategy_at, "ram", tuning={"restore_weights": False}), max_epochs=1)
    trainer.fit(Full(), BATCHES.loader())
    with pytest.raises(UsageError, match=r"not restored to the module.*save inside the run"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert names_in(tmp_path) == ["disk"]


def test_a_disk_that_fails_leaves_the_earlier_checkpoint(strategy_at, tmp_path: Path) -> None:
    trainer = make_trainer(sharded(strategy_at, "ram"), max_epochs=1)
    trainer.fit(Full(), BATCHES.loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer.strategy.save_ops = FullDisk(3, errno.ENOSPC)
    with pytest.raises(CheckpointError, match=f"{os.strerror(errno.ENOSPC)}.*earlier checkpoints are untouched"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert load(tmp_path / "x.ckpt")["global_step"] == 2 * HALF
    assert names_in(tmp_path) == ["disk", "x.ckpt"]
