"""Checkpoints of optimizers that update whole parameters, saved by some ranks and loaded by others: states and files are the
same, and training goes on from them as a plain loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.training import PlainRanks, Training, loader, make_strategy, make_trainer, outcome_of, tokens
from kit.ranks.whole_parameters import WithAdafactor, WithHybrid
from lightning.pytorch.callbacks import ModelCheckpoint
from test_rank_resume import SavesAgain, assert_same_states

from lightning_ptm.sharded import load

COMPARED = ("state_dict", "optimizer_states", "global_step")


def read(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = load(path) if path.is_dir() else torch.load(path, weights_only=False)
    return {key: checkpoint[key] for key in COMPARED}


def save(training: Training, world_size: int, folder: Path, root: Path, tier: str, kind: str) -> None:
    torch.manual_seed(0)
    keep: list[L.Callback] = [ModelCheckpoint(root, filename="{epoch}")]
    strategy = make_strategy(folder, tier, checkpoints={"state_dict_type": kind})
    trainer = make_trainer(training, strategy, world_size, enable_checkpointing=True, callbacks=keep)
    trainer.fit(training.build(), loader(tokens(training, world_size), world_size))


def go_on(training: Training, world_size: int, folder: Path, root: Path, again: Path, tier: str, kind: str) -> Outcome:
    """Loads, saves what was loaded, and trains another epoch."""
    torch.manual_seed(5)
    module = training.build()
    strategy = make_strategy(folder, tier, checkpoints={"state_dict_type": kind})
    trainer = make_trainer(training, strategy, world_size, max_epochs=2, callbacks=[SavesAgain(again)])
    rows = loader(tokens(training, world_size), world_size)
    trainer.fit(module, rows, ckpt_path=str(root / "epoch=0.ckpt"))
    return outcome_of(module)


def plainly(training: Training, world_size: int, checkpoint: dict[str, Any]) -> list[Outcome]:
    ranks = PlainRanks(training, world_size)
    with torch.no_grad():
        for name, master in ranks.masters.items():
            master.copy_(checkpoint["state_dict"][name])
    ranks.publish()
    ranks.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    return ranks.run(tokens(training, world_size))


CASES = [
    ("sharded", WithHybrid, 2, {1: "ram", 3: "three_tiers"}),
    ("sharded", WithAdafactor, 1, {2: "all_on_disk"}),
    ("full", WithHybrid, 2, {1: "masters_on_disk", 3: "lock_free"}),
    ("full", WithAdafactor, 3, {2: "ram"}),
]


@pytest.mark.parametrize(
    ("kind", "build", "saves", "loads"),
    [pytest.param(*case, marks=[pytest.mark.slow] if at else []) for at, case in enumerate(CASES)],
)
def test_another_number_of_ranks_goes_on(
    kind: str, build: Any, saves: int, loads: dict[int, str], disk: Path, tmp_path: Path
) -> None:
    training = Training(build, "bf16-mixed", batches=2)
    run_ranks(save, saves, training, saves, disk, tmp_path / "saved", "masters_on_disk", kind)
    path = tmp_path / "saved" / "epoch=0.ckpt"
    saved = read(path)
    assert len(saved["optimizer_states"][0]["state"]) == len(saved["state_dict"])
    for world_size, tier in loads.items():
        again = tmp_path / f"on{world_size}.ckpt"
        args = (training, world_size, disk, tmp_path / "saved", again, tier, kind)
        by_rank = run_ranks(go_on, world_size, *args)
        assert_same_states(read(again), saved)
        if kind == "sharded":
            files = [{file.name: file.read_bytes() for file in at.glob("*.safetensors")} for at in (path, again)]
            assert files[0] == files[1]
        for ours, theirs in zip(by_rank, plainly(training, world_size, read(path)), strict=True):
            ours.assert_equal(theirs)
