"""Promises of Lightning for any Trainer, in places where a strategy could get in the way."""

from __future__ import annotations

import copy
import gc
import multiprocessing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import MakeStrategy, little_ram
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.trainer.randomness import KEY


def trainer_of(strategy: Any, folder: Path, **wanted: Any) -> L.Trainer:
    options: dict[str, Any] = {
        "default_root_dir": folder,
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **{**options, **wanted})


class KeysSeen(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []
        self.saved: list[dict[str, Any]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved.append(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(sorted(checkpoint))


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_hooks_are_shown_the_keys_of_lightning(strategy_at: MakeStrategy, tier: str, tmp_path: Path) -> None:
    def keys(strategy: Any, folder: Path) -> list[list[str]]:
        model = KeysSeen()
        trainer = trainer_of(strategy, folder)
        trainer.fit(model)
        path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        trainer_of("auto" if strategy == "auto" else strategy_at(tier), folder / "2", max_epochs=2).fit(
            model, ckpt_path=path
        )
        unused = trainer_of(strategy, folder) if strategy == "auto" else trainer_of(strategy_at(tier), folder)
        unused.strategy.connect(model)
        unused.save_checkpoint(folder / "unused.ckpt")
        KeysSeen.load_from_checkpoint(folder / "unused.ckpt")
        in_file = torch.load(path, weights_only=False)
        return [*map(sorted, model.saved), *model.seen, sorted({*in_file} - {KEY}), sorted(in_file["loops"])]

    assert keys(strategy_at(tier), tmp_path / "ours") == keys("auto", tmp_path / "plain")


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_without_an_optimizer_is_saved_and_goes_on(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path, kind: str
) -> None:
    class Untrained(BoringModel):
        def configure_optimizers(self) -> None:
            return None

    trainer = trainer_of(strategy_at(tier, checkpoints={"state_dict_type": kind}), tmp_path)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        trainer.fit(Untrained())
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert trainer.strategy.load_checkpoint(path, weights_only=False)["optimizer_states"] == [{}]
    again = trainer_of(strategy_at(tier), tmp_path / "again", max_epochs=2)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        again.fit(Untrained(), ckpt_path=path)
    assert again.current_epoch == 2


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_an_exception_is_told_to_every_base_of_the_strategy(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(BoringModel):
        def on_train_start(self) -> None:
            raise ValueError("as asked")

    told: list[BaseException] = []
    monkeypatch.setattr(Strategy, "on_exception", lambda self, exception: told.append(exception))
    with pytest.raises(ValueError, match="as asked") as caught:
        trainer_of(strategy_at(tier), tmp_path).fit(Fails())
    assert told == [caught.value]


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"precision": "bf16-mixed"}])
def test_loops_of_the_user_after_a_run_train_on(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    class Learns(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1, fused=True)

    def trained(strategy: Any, folder: Path) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Learns()
        trainer = trainer_of(strategy, folder, **{"precision": "32-true", **options})
        trainer.fit(model)
        trainer.state.stage = RunningStage.TRAINING
        batch = next(iter(model.train_dataloader()))
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        outputs = [
            loop.run(trainer.optimizers[0], at, {"batch": batch, "batch_idx": at})["loss"]  # type: ignore[call-overload]
            for at in range(3)
        ]
        return [*outputs, *(value.detach() for value in model.parameters())]

    ours, theirs = trained(strategy_at(tier), tmp_path / "ours"), trained("auto", tmp_path / "plain")
    assert all(map(torch.equal, ours, theirs))


def test_loops_of_the_user_after_a_run_need_what_the_optimizer_has_learnt(
    strategy_at: MakeStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Learns(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    little_ram(monkeypatch, Learns())
    model = Learns()
    trainer = trainer_of(strategy_at("masters_on_disk"), tmp_path)
    trainer.fit(model)
    trainer.state.stage = RunningStage.TRAINING
    kwargs = {"batch": next(iter(model.train_dataloader())), "batch_idx": 0}
    with pytest.raises(UsageError, match="were lost at the end of an earlier run"):
        trainer.fit_loop.epoch_loop.automatic_optimization.run(trainer.optimizers[0], 0, kwargs)  # type: ignore[arg-type]


class Backbone(BoringModel):
    """All of it is in its optimizer from the start."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ThawsAtOnce(BackboneFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.layer)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        BaseFinetuning.on_fit_start(self, trainer, module)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 0:
            self.unfreeze_and_add_param_group(module.layer, optimizer, 0.1)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_lightning_says_itself_that_parameters_are_in_the_optimizer_already(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path
) -> None:
    def said(strategy: Any, folder: Path) -> tuple[list[str], list[torch.Tensor]]:
        torch.manual_seed(0)
        module = Backbone()
        with pytest.warns(UserWarning, match="Did you init your optimizer in") as warned:
            trainer_of(strategy, folder, callbacks=[ThawsAtOnce(3)], precision="32-true").fit(module)
        found = [str(each.message) for each in warned if "already exist within another group" in str(each.message)]
        return found, [each.detach() for each in module.parameters()]

    (ours, weights), (theirs, expected) = (
        said(strategy_at(tier), tmp_path / "ours"),
        said("auto", tmp_path / "plain"),
    )
    assert ours == theirs and len(ours) == 1
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_one_optimizer_with_a_schedule_in_the_fits_of_two_trainers(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path
) -> None:
    """The schedule waits for a metric that nobody logs, which is an error, or with strict=False a warning."""

    def trained(make: Any, folder: Path) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = BoringModel()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

        def configured(strict: bool) -> Any:
            config = {"scheduler": schedule, "monitor": "giraffe", "strict": strict}
            return lambda: {"optimizer": optimizer, "lr_scheduler": config}

        model.configure_optimizers = configured(True)  # type: ignore[method-assign]
        with pytest.raises(MisconfigurationException, match="conditioned on metric giraffe which is not available"):
            trainer_of(make(), folder, precision="32-true").fit(model)
        model.configure_optimizers = configured(False)  # type: ignore[method-assign]
        with pytest.warns(RuntimeWarning, match="giraffe which is not available but strict"):
            trainer_of(make(), folder, precision="32-true").fit(model)
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [*moments, *(each.detach() for each in model.parameters())]

    ours, theirs = trained(lambda: strategy_at(tier), tmp_path / "a"), trained(lambda: "auto", tmp_path / "b")
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_a_class_that_evaluates_its_closure_often_forgets_gradients_as_often(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Searching(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=7)

    forgotten: list[int] = []
    original = torch.optim.LBFGS.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        forgotten.append(1)
        original(self, set_to_none)

    monkeypatch.setattr(torch.optim.LBFGS, "zero_grad", zero_grad)

    def counted(strategy: Any, folder: Path) -> int:
        forgotten.clear()
        torch.manual_seed(0)
        module = Searching()
        trainer_of(strategy, folder, limit_train_batches=1).fit(module)
        assert module.optimizers().param_groups[0]["max_iter"] == 7  # type: ignore[union-attr]
        return len(forgotten)

    if tier == "ram":
        assert counted(strategy_at(tier), tmp_path / "ours") == counted("auto", tmp_path / "plain") > 1
        return
    with pytest.raises(ConfigError, match=r"LBFGS.step needs a closure that evaluates the model again"):
        counted(strategy_at(tier), tmp_path)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_a_checkpoint_before_the_step_of_a_manual_optimization(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path
) -> None:
    """A copy of the layer before the step is what ModelCheckpoint saves of that step's best loss in weights before."""

    class Copies(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.copies: list[dict[str, torch.Tensor]] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.step(batch)
            self.copies.append(copy.deepcopy(self.layer).cpu().state_dict())
            self.log("loss", float(index != 2))
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def trained(strategy: Any, folder: Path) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = Copies()
        saving = ModelCheckpoint(folder, monitor="loss", mode="min", every_n_train_steps=1, save_weights_only=True)
        trainer_of(strategy, folder, callbacks=[saving], limit_train_batches=4, limit_val_batches=0).fit(model)
        return model.copies, torch.load(saving.best_model_path, weights_only=True)["state_dict"]

    (copies, saved), (theirs, expected) = trained(strategy_at(tier), tmp_path / "a"), trained("auto", tmp_path / "b")
    assert len(copies) == len(theirs) == 4
    for mine, other in zip([*copies, saved], [*theirs, expected], strict=True):
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in other)


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_callbacks_are_copied_when_a_run_begins_and_a_resumed_one_has_them(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path
) -> None:
    class Looks(Callback):
        seen: list[Any]

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.seen = copy.deepcopy(trainer.callbacks)

    def looking(folder: Path, **options: Any) -> tuple[L.Trainer, Looks]:
        looks, saving = Looks(), ModelCheckpoint(folder, save_last=True)
        return trainer_of(strategy_at(tier), folder, callbacks=[saving, looks], **options), looks

    first, _ = looking(tmp_path)
    first.fit(BoringModel())
    before = copy.deepcopy(first.callbacks)  # type: ignore[attr-defined]
    second, looks = looking(tmp_path, max_epochs=2)
    second.fit(BoringModel(), ckpt_path=tmp_path / "last.ckpt")
    for mine, other in zip(before, looks.seen, strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, ModelCheckpoint):
            assert mine.best_model_path == other.best_model_path and mine.last_model_path == other.last_model_path


class Stops(BoringModel):
    """Module whose loaders have workers; an error of its own ends a run in the middle of an epoch."""

    when = ""

    def training_step(self, batch: Any, index: int) -> Any:
        if self.when == "training" and index == 1:
            raise ValueError("enough")
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> Any:
        if self.when == "validation":
            raise ValueError("enough")
        return super().validation_step(batch, index)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 16), num_workers=1)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("when", ["", "training", "validation", "max_steps"])
def test_no_worker_of_a_loader_is_left_behind(strategy_at: MakeStrategy, when: str, tmp_path: Path) -> None:
    model = Stops()
    model.when = when
    chosen = trainer_of(strategy_at("all_on_disk"), tmp_path, max_steps=1 if when == "max_steps" else -1)
    before = {each.pid for each in multiprocessing.active_children()}
    if when in ("training", "validation"):
        with pytest.raises(ValueError, match="enough"):
            chosen.fit(model)
    else:
        chosen.fit(model)
    left = [each.name for each in multiprocessing.active_children() if each.pid not in before]
    assert left == []
    del chosen, model
    gc.collect()  # an error that was caught has the batch in its frames, with a plain Trainer, too
