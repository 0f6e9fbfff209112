"""What Lightning promises of any Trainer, in places where a strategy could get in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from judged import MakeStrategy, little_ram
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage

from lightning_ptm.errors import UsageError
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


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_without_an_optimizer_is_saved_and_goes_on(
    strategy_at: MakeStrategy, tier: str, tmp_path: Path, kind: str
) -> None:
    class Untrained(BoringModel):
        def configure_optimizers(self) -> None:
            return None

    trainer = trainer_of(strategy_at(tier, state_dict_type=kind), tmp_path)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        trainer.fit(Untrained())
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert trainer.strategy.load_checkpoint(path, weights_only=False)["optimizer_states"] == [{}]
    again = trainer_of(strategy_at(tier), tmp_path / "again", max_epochs=2)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        again.fit(Untrained(), ckpt_path=path)
    assert again.current_epoch == 2


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


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"precision": "bf16-mixed"}])
def test_loops_by_hand_after_a_run_train_on(
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


def test_loops_by_hand_after_a_run_need_what_the_optimizer_has_learnt(
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
    with pytest.raises(UsageError, match="have ended with an earlier run"):
        trainer.fit_loop.epoch_loop.automatic_optimization.run(trainer.optimizers[0], 0, kwargs)  # type: ignore[arg-type]
