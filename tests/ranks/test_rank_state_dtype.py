"""`optimizer_state_dtype` on several ranks: the same numbers wherever states live, and checkpoints for any number of
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import module_of, rows, trainer_of, weights_of
from kit.ranks.training import TIERS, loader, make_strategy, make_trainer, outcome_of, tokens
from lightning.pytorch.callbacks import ModelCheckpoint
from test_rank_resume import EPOCH, SavesAgain, assert_same_states
from test_tensor_checkpoints import BATCH, STEPS, SaveIn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm.sharded import load

HOMES = ("ram", "masters_on_disk", "three_tiers")
FIRST = "epoch=0.ckpt"


def train(
    world_size: int, folder: Path, word: str, root: Path, tier: str, path: Path | None = None, **options: Any
) -> Outcome:
    torch.manual_seed(0 if path is None else 5)
    module = EPOCH.build()
    keep = ModelCheckpoint(root, filename="{epoch}", save_top_k=-1)
    strategy = make_strategy(
        folder, checkpoints={"state_dict_type": "sharded"}, optimizer_state_dtype=word, **TIERS[tier]
    )
    callbacks = [*options.pop("callbacks", ()), keep]
    trainer = make_trainer(EPOCH, strategy, world_size, enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(module, loader(tokens(EPOCH, world_size), world_size), ckpt_path=None if path is None else str(path))
    return outcome_of(module)


def train_everywhere(world_size: int, folder: Path, word: str, root: Path) -> dict[str, Outcome]:
    """Two epochs in each home; and the second of them again, from the checkpoint of the first."""
    found = {tier: train(world_size, folder, word, root / tier, tier, max_epochs=2) for tier in HOMES}
    path = root / HOMES[0] / FIRST
    found["again"] = train(world_size, folder, word, root / "again", HOMES[1], path, max_epochs=2)
    return found


def save_again(world_size: int, folder: Path, word: str, path: Path, again: Path) -> None:
    saves = SavesAgain(again)
    train(world_size, folder, word, again.parent / "later", HOMES[1], path, max_epochs=2, callbacks=[saves])


@pytest.mark.parametrize("word", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_homes_and_numbers_of_ranks_change_no_bit_of_states(word: str, disk: Path, tmp_path: Path) -> None:
    for found in run_ranks(train_everywhere, 2, 2, disk, word, tmp_path):
        for tier in HOMES[1:]:
            found[tier].assert_equal(found[HOMES[0]])
        for name, value in found[HOMES[0]].weights.items():
            assert torch.equal(found["again"].weights[name], value), name
    saved = load(tmp_path / HOMES[1] / FIRST)
    for state in saved["optimizer_states"][0]["state"].values():
        assert all(value.dtype is torch.float32 for value in state.values())
    for world_size in (1, 3):
        again = tmp_path / f"on {world_size}" / "again.ckpt"
        run_ranks(save_again, world_size, world_size, disk, word, tmp_path / HOMES[1] / FIRST, again)
        for key in ("state_dict", "optimizer_states"):
            assert_same_states(load(again)[key], saved[key], f"{world_size} ranks/{key}")


def in_a_tensor_group(ranks: int, tensor: int, word: str, folder: Path, path: Path | None) -> dict[str, Tensor]:
    module = module_of(seed=0 if path is None else 1)
    saves = SaveIn(folder / "start.ckpt", folder / "later.ckpt")
    given = {
        "optimizer_state_dtype": word,
        "checkpoints": {"state_dict_type": "sharded"},
        "offload_optimizer": "disk",
        "disk_path": str(folder / "disk"),
    }
    callbacks = [saves] if path is None else []
    trainer = trainer_of(ranks, tensor, given, max_epochs=2, callbacks=callbacks, precision="32-true")
    trainer.fit(module.float(), DataLoader(rows(STEPS * BATCH).float(), BATCH), ckpt_path=path)  # type: ignore[arg-type]
    assert len(module.losses) == STEPS * (2 if path is None else 1)
    return weights_of(module)


@pytest.mark.parametrize("word", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_a_tensor_group_goes_on_as_if_it_had_never_stopped(word: str, tmp_path: Path) -> None:
    never = run_ranks(in_a_tensor_group, 2, 2, 2, word, tmp_path, None)
    again = run_ranks(in_a_tensor_group, 2, 2, 2, word, tmp_path, tmp_path / "later.ckpt")
    alone = run_ranks(in_a_tensor_group, 1, 1, 1, word, tmp_path, tmp_path / "later.ckpt")
    for name, value in never[0].items():
        assert torch.equal(again[0][name], value), name
        torch.testing.assert_close(alone[0][name], value, rtol=0.05, atol=0.05)
