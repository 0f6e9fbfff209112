"""The resume matrix: a sharded checkpoint of every tier is loaded by another number of ranks, bit for bit, into the same
tier or another, and training goes on from it as a plain loop would that starts with the same states.

Ranks are started once for all tiers, since starting them takes longer than what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import TIERS, PlainRanks, Training, loader, make_strategy, make_trainer, outcome_of, tokens
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR

from lightning_ptm.sharded import load


class Scheduled(Tower):
    """AdamW, with a learning rate that changes at every step, also over the end of an epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay(optimizer), "interval": "step"}}


def decay(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (step + 1))


PLACES: dict[str, dict[str, Any]] = {**TIERS, "masters_on_host": {**TIERS["three_tiers"], "offload_optimizer": "host"}}
THIRDS = [tuple(PLACES)[third::3] for third in range(3)]
EPOCH = Training(Scheduled, "bf16-mixed", batches=2)
SAVED, AFTERWARDS = "epoch=0.ckpt", "afterwards.ckpt"
GIVEN_BACK = ("ram", "masters_on_host")
"""Where optimizer states outlive the run."""


def save_in_tiers(world_size: int, folder: Path, root: Path, tiers: Sequence[str]) -> dict[str, Outcome]:
    """One epoch in each of these tiers, with a checkpoint at its end; lock-free updates are late by then, and brought in."""
    outcomes = {}
    for tier in tiers:
        torch.manual_seed(0)
        module = EPOCH.build()
        late = {"lock_free": {"max_staleness": 1}} if tier == "lock_free" else {}
        keep = ModelCheckpoint(root / tier, filename="{epoch}")
        strategy = make_strategy(folder, checkpoints={"state_dict_type": "sharded"}, **{**PLACES[tier], **late})
        trainer = make_trainer(EPOCH, strategy, world_size, enable_checkpointing=True, callbacks=[keep])
        trainer.fit(module, loader(tokens(EPOCH, world_size), world_size))
        outcomes[tier] = outcome_of(module)
        if tier in GIVEN_BACK:
            trainer.save_checkpoint(root / tier / AFTERWARDS)
    return outcomes


class SavesAgain(L.Callback):
    """Before anything is trained."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self._path)


def go_on_in_tiers(
    world_size: int, folder: Path, root: Path, again: Path, further: int, tiers: Sequence[str]
) -> dict[str, Outcome]:
    """Loads each tier's checkpoint into the tier that is `further` places on, saves it again, and trains another epoch."""
    outcomes = {}
    places = list(PLACES)
    for tier in tiers:
        torch.manual_seed(5)
        module = EPOCH.build()
        settings = PLACES[places[(places.index(tier) + further) % len(places)]]
        strategy = make_strategy(folder, checkpoints={"state_dict_type": "sharded"}, **settings)
        saves = SavesAgain(again / f"{tier}.ckpt")
        trainer = make_trainer(EPOCH, strategy, world_size, max_epochs=2, callbacks=[saves])
        rows = loader(tokens(EPOCH, world_size), world_size)
        trainer.fit(module, rows, ckpt_path=str(root / tier / SAVED))
        assert trainer.global_step == 2 * EPOCH.batches
        outcomes[tier] = outcome_of(module)
    return outcomes


def plainly(world_size: int, path: Path) -> list[Outcome]:
    """Trains the same epoch from the same states, by the plain loop."""
    checkpoint = load(path)  # its own: the loop changes these tensors in place
    ranks = PlainRanks(Training(Tower, EPOCH.precision, EPOCH.batches), world_size)
    scheduler = decay(ranks.optimizer)
    with torch.no_grad():
        for name, master in ranks.masters.items():
            master.copy_(checkpoint["state_dict"][name])
    ranks.publish()
    ranks.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    scheduler.load_state_dict(checkpoint["lr_schedulers"][0])

    def before_step(step: int, _: PlainRanks) -> None:
        if step:
            scheduler.step()

    return ranks.run(tokens(EPOCH, world_size), before_step=before_step)


def assert_same_states(ours: Any, theirs: Any, where: str = "") -> None:
    """Weights, optimizer states, schedulers, counts: the same, bit for bit."""
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            assert_same_states(ours[key], value, f"{where}/{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for place, value in enumerate(theirs):
            assert_same_states(ours[place], value, f"{where}/{place}")
    else:
        assert ours == theirs, where


COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")


@pytest.mark.parametrize("third", [0, *(pytest.param(third, marks=pytest.mark.slow) for third in (1, 2))])
@pytest.mark.parametrize(
    ("saves", "loads"),
    [(2, {3: 1}), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, {1: 0}), (1, {2: 0})))],
)
def test_another_number_of_ranks_goes_on(
    saves: int, loads: dict[int, int], third: int, disk: Path, tmp_path: Path
) -> None:
    tiers = THIRDS[third]
    before = run_ranks(save_in_tiers, saves, saves, disk, tmp_path, tiers)[0]
    saved = {tier: load(tmp_path / tier / SAVED) for tier in tiers}
    for tier, checkpoint in saved.items():
        assert checkpoint["global_step"] == checkpoint["lr_schedulers"][0]["last_epoch"] == EPOCH.batches
        steps = [state["step"] for state in checkpoint["optimizer_states"][0]["state"].values()]
        assert len(steps) == len(before[tier].weights) and set(map(float, steps)) == {EPOCH.batches}, tier
        assert_same_states(checkpoint["state_dict"], before[tier].weights, tier)
        if tier in GIVEN_BACK:
            afterwards = load(tmp_path / tier / AFTERWARDS)
            assert_same_states({key: afterwards[key] for key in COMPARED}, {key: checkpoint[key] for key in COMPARED})
    for world_size, further in loads.items():
        again = tmp_path / f"on{world_size}"
        by_rank = run_ranks(go_on_in_tiers, world_size, world_size, disk, tmp_path, again, further, tiers)
        for tier, checkpoint in saved.items():
            resaved = load(again / f"{tier}.ckpt")
            for key in COMPARED:
                assert_same_states(resaved[key], checkpoint[key], f"{tier}/{key}")
            assert len(list((again / f"{tier}.ckpt").glob("ranges-*.json"))) == world_size
            for rank, theirs in enumerate(plainly(world_size, tmp_path / tier / SAVED)):
                by_rank[rank][tier].assert_equal(theirs)
