"""Checkpoints of a run that is cut short (OnExceptionCheckpoint, ModelCheckpoint(save_on_exception=True)) on several ranks:
where all of them fail in the same place there is one; otherwise none, not half of one, and nobody waits."""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from test_rank_resume import assert_same_states
from torch import Tensor

from lightning_ptm.sharded import load
from lightning_ptm.trainer import strategy as strategies

PROMPT_S = 20.0


class Forward(Tower):
    """Rank 1 fails in the forward of step 2, the other waits for it in a collective."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        loss = super().loss(batch, rank, step)
        if rank == 1 and step == 2:
            raise ValueError("enough")
        return loss


class Backward(Tower):
    """Raises in the middle of a backward pass, when units have been updated."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        loss = super().loss(batch, rank, step)
        if rank == 1 and step == 2:
            self.blocks[0].bonus.register_hook(self.fail)
        return loss

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("enough")


class BetweenSteps(Tower):
    """Raises between two steps."""

    ranks = (1,)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.step == 2 and self.trainer.global_rank in self.ranks:
            raise ValueError("enough")


class AllBetweenSteps(BetweenSteps):
    ranks = (0, 1)


class AllInForward(Tower):
    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        loss = super().loss(batch, rank, step)
        if step == 2:
            raise ValueError("enough")
        return loss


class AllInBackward(Backward):
    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        return super().loss(batch, 1, step)


KINDS = ("full", "sharded", "behind")


class SavesAtTwo(L.Callback):
    """Saves the checkpoint with the expected values."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)


def saver(name: str, root: Path) -> Checkpoint:
    if name == "OnExceptionCheckpoint":
        return OnExceptionCheckpoint(root, "x")
    return ModelCheckpoint(root, "x", save_on_exception=True, every_n_epochs=100, save_last="link")


def fail(build: Any, kind: str, callback: str, folder: Path, root: Path, *others: L.Callback) -> tuple[str, str, float]:
    strategies._MEET_S = 1.0  # of this rank's process
    training = Training(build, "bf16-mixed")
    settings = (
        {"checkpoints": {"state_dict_type": kind}}
        if kind != "behind"
        else {"checkpoints": {"state_dict_type": "sharded", "async_save": True}}
    )
    strategy = make_strategy(folder, "masters_on_disk", **settings)
    callbacks = [*others, saver(callback, root)]
    trainer = make_trainer(training, strategy, 2, enable_checkpointing=True, callbacks=callbacks)
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(training.build(), loader(tokens(training, 2), 2))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    told = " ".join(str(each.message) for each in caught if "no checkpoint" in str(each.message))
    return text, told, time.monotonic() - started


@pytest.mark.slow_unless(
    "Forward-full-ModelCheckpoint-ranks were not all interrupted",
    "BetweenSteps-sharded-OnExceptionCheckpoint-ranks were not all interrupted",
    "AllInBackward-full-OnExceptionCheckpoint-some units had been updated",
)
@pytest.mark.parametrize(
    ("build", "kind", "callback", "why"),
    [
        (Forward, "full", "ModelCheckpoint", "ranks were not all interrupted"),
        (Forward, "behind", "OnExceptionCheckpoint", "ranks were not all interrupted"),
        (Backward, "sharded", "ModelCheckpoint", "some units had been updated"),
        (BetweenSteps, "sharded", "OnExceptionCheckpoint", "ranks were not all interrupted"),
        (AllInBackward, "full", "OnExceptionCheckpoint", "some units had been updated"),
    ],
)
def test_ranks_that_have_no_common_state_save_nothing(
    build: Any, kind: str, callback: str, why: str, disk: Path, tmp_path: Path
) -> None:
    root = tmp_path / "saved"
    root.mkdir()
    for rank, (error, told, seconds) in enumerate(run_ranks(fail, 2, build, kind, callback, disk, root)):
        if rank == 1 or build is AllInBackward:
            assert error == "ValueError: enough"
        else:
            assert error.startswith("RankError: rank 1 failed with ValueError: enough")
        assert (why in told) == (rank == 0)  # Lightning's way: rank 0 tells
        assert seconds < PROMPT_S
    assert list(root.iterdir()) == []


def fail_together(folder: Path, root: Path) -> list[str]:
    """Cases in turn."""
    errors = []
    for build in (AllBetweenSteps, AllInForward):
        for place, kind in enumerate(KINDS):
            callback = ("OnExceptionCheckpoint", "ModelCheckpoint")[place % 2]
            path = root / build.__name__ / kind
            saves = SavesAtTwo(path / "expected.ckpt")
            error, told, _ = fail(build, kind, callback, folder, path, saves)
            errors.append(error + told)
    return errors


def test_ranks_that_fail_together_save_what_they_have(disk: Path, tmp_path: Path) -> None:
    for errors in run_ranks(fail_together, 2, disk, tmp_path):
        assert errors == ["ValueError: enough"] * 6
    for build in ("AllBetweenSteps", "AllInForward"):
        for kind in KINDS:
            folder = tmp_path / build / kind
            read = partial(torch.load, weights_only=False) if kind == "full" else load
            ours, theirs = read(folder / "x.ckpt"), read(folder / "expected.ckpt")
            for key in ("state_dict", "optimizer_states", "global_step"):
                assert_same_states(ours[key], theirs[key], f"{build}/{kind}/{key}")
