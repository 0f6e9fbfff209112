"""Workers of loaders end with a run of two ranks, however it ends."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.training import make_strategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset


class Ends(BoringModel):
    """An error on one rank, or on both, in some hook."""

    def __init__(self, hook: str, who: tuple[int, ...]) -> None:
        super().__init__()
        self.who = who
        if hook:
            setattr(self, hook, self._raise_)

    def _raise_(self, *args: Any) -> Any:
        if self.trainer.global_rank in self.who:
            raise ValueError("enough")
        return None

    def loader(self) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 16), num_workers=1)

    train_dataloader = val_dataloader = loader


class Fewer(Ends):
    """Module whose ranks have different numbers of batches."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 4 + 4 * self.trainer.global_rank), num_workers=1)


class Persistent(Ends):
    def loader(self) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 16), num_workers=1, persistent_workers=True)

    train_dataloader = val_dataloader = loader


HOOKS = ["training_step", "validation_step", "on_train_epoch_end", "on_validation_end", "on_train_end"]
CASES: list[tuple[type[Ends], str, tuple[int, ...], dict[str, Any]]] = [
    (Ends, "", (), {}),
    (Ends, "", (), {"max_steps": 1}),
    (Fewer, "", (), {"use_distributed_sampler": False}),
    (Persistent, "", (), {}),
    (Persistent, "training_step", (1,), {}),
    (Ends, "validation_step", (0, 1), {}),
    (Ends, "on_validation_end", (1,), {}),
]
MORE: list[tuple[type[Ends], str, tuple[int, ...], dict[str, Any]]] = [
    (Ends, hook, who, {}) for hook in HOOKS for who in ((1,), (0, 1))
]


def left_behind(folder: Path, home: str, more: bool) -> list[list[str]]:
    """Names of the processes that each case leaves behind on this rank."""
    found = []
    # Ranks of tests are daemons, so that none outlives the tests, and daemons may have no children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for build, hook, who, options in CASES + (MORE if more else []):
        module = build(hook, who)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=make_strategy(folder, home),
            logger=False,
            callbacks=[ModelCheckpoint(folder / "saved", save_top_k=0)],
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=2,
            num_sanity_val_steps=0,
            **{"max_epochs": 1, **options},
        )
        try:
            trainer.fit(module)
        except Exception as error:
            assert who or build is Fewer, error
        if who:
            assert build is Persistent or hook in HOOKS
        found.append([f"{hook} {who} {options}: {each.name}" for each in multiprocessing.active_children()])
        for each in multiprocessing.active_children():
            each.terminate()
            each.join()
        del trainer, module
        gc.collect()
    multiprocessing.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("home", "more"), [("all_on_disk", False), pytest.param("ram", True, marks=pytest.mark.slow)])
def test_no_worker_is_left_behind(home: str, more: bool, disk: Path) -> None:
    for found in run_ranks(left_behind, 2, disk, home, more, limit_s=200):
        assert not any(found), [each for each in found if each]
