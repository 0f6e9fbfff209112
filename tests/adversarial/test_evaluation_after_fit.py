"""Evaluations after a fit leave its optimizers alone: what is saved behind them, and trained, is as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy, little_ram
from kit.twins import Twin, assert_alike, quietly, trainer, vectors
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_ptm.errors import UsageError


class Evaluated(Twin):
    """Module whose learning rate has a schedule; it keeps its optimizer from one fit to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.validation_step(batch, index)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        if self.kept is None:
            self.kept = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(self.kept, 1, 0.5)
        return [self.kept], [schedule]


def evaluate(chosen: Any, module: Twin, how: str, **options: Any) -> None:
    if how == "predict":
        chosen.predict(module, vectors(), **options)
    elif how:
        getattr(chosen, how)(module, vectors(), verbose=False, **options)


def fitted(strategy: Any, how: str, **options: Any) -> tuple[Any, Twin]:
    torch.manual_seed(0)
    module = Evaluated()
    chosen = trainer(strategy, **options)
    chosen.fit(module, vectors())
    evaluate(chosen, module, how)
    return chosen, module


HOW = ["validate", "test", "predict"]


@pytest.mark.diagonal
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk", "lock_free"])
def test_a_checkpoint_behind_an_evaluation(
    how: str, kind: str, home: str, strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    """The checkpoint resumes where the fit ended, with other strategies too; and the optimizers are those of the
    fit."""
    resumed = []
    for name, make in (
        ("ours", lambda: strategy_at(home, checkpoints={"state_dict_type": kind})),
        ("plain", lambda: None),
    ):
        with quietly():
            chosen, module = fitted(make(), how)
            assert chosen.optimizers == [module.kept]
            assert len(chosen.lr_scheduler_configs) == 1
            chosen.save_checkpoint(tmp_path / name)
            again = Evaluated()
            further = trainer(make(), max_epochs=2)
            further.fit(again, vectors(), ckpt_path=tmp_path / name, weights_only=False)
            resumed.append(again)
            if kind == "full":
                saved = torch.load(tmp_path / name, weights_only=False)
                assert [len(each["state"]) for each in saved["optimizer_states"]] == [10]
                assert len(saved["lr_schedulers"]) == 1
    assert_alike(*resumed)


@pytest.mark.diagonal
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("home", ["masters_on_disk", "all_on_disk"])
def test_states_that_have_ended_are_refused_behind_an_evaluation_too(
    how: str, kind: str, home: str, strategy_at: MakeStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_ram(monkeypatch, Evaluated())
    with quietly():
        chosen, module = fitted(strategy_at(home, checkpoints={"state_dict_type": kind}), how)
        with pytest.raises(UsageError, match="optimizer states ended with their run"):
            chosen.save_checkpoint(tmp_path / "x")
        chosen.save_checkpoint(tmp_path / "x", weights_only=True)
        chosen.fit_loop.max_epochs = 2
        with pytest.raises(UsageError, match="states of this AdamW were lost at the end of an earlier run"):
            chosen.fit(module, vectors())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk", "lock_free"])
def test_another_fit_behind_an_evaluation_goes_on(how: str, home: str, strategy_at: MakeStrategy) -> None:
    modules = []
    for strategy in (strategy_at(home), None):
        with quietly():
            chosen, module = fitted(strategy, how)
            chosen.fit_loop.max_epochs = 2
            chosen.fit(module, vectors())
            modules.append(module)
    assert_alike(*modules)


@pytest.mark.diagonal
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true", "32-true", "bf16-mixed"])
def test_an_evaluation_leaves_weights_in_the_precision_of_the_run(
    precision: str, home: str, how: str, strategy_at: MakeStrategy
) -> None:
    modules = []
    for strategy in (strategy_at(home), None):
        with quietly():
            torch.manual_seed(0)
            module = Evaluated()
            evaluate(trainer(strategy, precision=precision), module, how)
            module.losses.clear()  # of 16-bit products, which may be computed in another way
            modules.append(module)
    assert_alike(*modules)


@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
def test_an_evaluation_of_the_best_checkpoint_and_another_fit_from_it(
    home: str, strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    modules = []
    for name, strategy in (("ours", strategy_at(home)), ("plain", None)):
        with quietly():
            callback = ModelCheckpoint(tmp_path / name, every_n_train_steps=3)
            chosen, module = fitted(strategy, "", enable_checkpointing=True, callbacks=[callback])
            evaluate(chosen, module, "test", ckpt_path="best")
            chosen.fit_loop.max_epochs = 2
            module.kept = None
            chosen.fit(module, vectors(), ckpt_path=callback.best_model_path, weights_only=False)
            modules.append(module)
    assert_alike(*modules)


class SavesInside(Evaluated):
    path: Path | None = None

    def on_validation_epoch_end(self) -> None:
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_inside_of_an_evaluation(home: str, kind: str, strategy_at: MakeStrategy, tmp_path: Path) -> None:
    """The checkpoint has the states of the previous fit, or is refused."""
    resumed: list[Any] = []
    for name, make in (
        ("ours", lambda: strategy_at(home, checkpoints={"state_dict_type": kind})),
        ("plain", lambda: None),
    ):
        with quietly():
            torch.manual_seed(0)
            module = SavesInside()
            chosen = trainer(make())
            chosen.fit(module, vectors())
            module.path = tmp_path / name
            if name == "ours" and kind != "full":
                with pytest.raises(UsageError, match=r"during an evaluation|have ended with their run"):
                    evaluate(chosen, module, "validate")
                return
            evaluate(chosen, module, "validate")
            again = Evaluated()
            trainer(make(), max_epochs=2).fit(again, vectors(), ckpt_path=module.path, weights_only=False)
            resumed.append(again)
    assert_alike(*resumed)


class Sized(Evaluated):
    batch_size = 2

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(vectors().dataset, batch_size=self.batch_size)


@pytest.mark.parametrize("settings", [("ram", "full"), ("ram", "sharded"), ("all_on_disk", "full")], ids="-".join)
def test_batch_sizes_of_an_evaluation_are_looked_for_by_a_trainer_that_has_not_trained(
    settings: tuple[str, str], strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    """Lightning's tuner saves what it goes back to, inside of the evaluation."""

    def searched(chosen: Any) -> int | None:
        module.batch_size = 2
        return Tuner(chosen).scale_batch_size(module, method="validate", max_trials=2, steps_per_trial=1)

    home, kind = settings
    with quietly():
        module = Sized()
        chosen = trainer(strategy_at(home, checkpoints={"state_dict_type": kind}), default_root_dir=tmp_path)
        chosen.fit(module, vectors())
        found = searched(trainer(default_root_dir=tmp_path))
        if kind == "full":
            assert searched(chosen) == found
        else:
            with pytest.raises(UsageError, match=r"from scale_batch_size or lr_find, use a new Trainer"):
                searched(chosen)
        assert (
            searched(trainer(strategy_at(home, checkpoints={"state_dict_type": kind}), default_root_dir=tmp_path))
            == found
        )
