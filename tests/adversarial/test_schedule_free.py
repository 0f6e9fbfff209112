"""Schedule-free classes, whose `train()` and `eval()` move parameters between steps: by Lightning's hooks with everything in
RAM, as with a plain Trainer; where states are in pages they are refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import Judged, MakeStrategy, assert_alike, batches, judge, run, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm.errors import ConfigError

CLASSES = ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"]


def built(name: str) -> type[Judged]:
    cls = getattr(pytest.importorskip("schedulefree"), name)

    class ScheduleFree(Judged):
        """Averages where it is evaluated and saved, its steps' own weights where it is trained."""

        def configure_optimizers(self) -> Any:
            return cls(self.parameters(), lr=1e-2)

        def mode(self, train: bool) -> None:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.train() if train else optimizer.eval()

        def on_train_epoch_start(self) -> None:
            self.mode(True)

        def on_validation_epoch_start(self) -> None:
            self.mode(False)

        def on_validation_epoch_end(self) -> None:
            self.note(self.first.weight)
            self.mode(True)
            self.note(self.first.weight)

        def on_train_end(self) -> None:
            self.mode(False)

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.loss(batch)

        def val_dataloader(self) -> DataLoader[Any]:
            return batches(2)

    return ScheduleFree


OPTIONS: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 1, "num_sanity_val_steps": 1}


@pytest.mark.parametrize("name", CLASSES)
def test_their_modes_follow_the_hooks_where_everything_is_in_ram(strategy_at: MakeStrategy, name: str) -> None:
    build = built(name)
    judge(build, strategy_at("ram"), **OPTIONS)
    moved = run(build, None, **OPTIONS).notes
    tensors = [each for each in moved if isinstance(each, Tensor) and each.dim() == 2]
    assert any(not torch.equal(average, own) for average, own in zip(tensors[::2], tensors[1::2], strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_where_states_are_in_pages_they_are_refused(strategy_at: MakeStrategy, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} changes parameters in its train\(\) and eval\(\), between steps"):
        run(built(name), strategy_at("masters_on_disk"))


def test_a_run_goes_on_from_a_checkpoint(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    """Saved behind an evaluation, in the mode of training."""
    build = built("AdamWScheduleFree")

    def went_on(folder: Path, first: Any, second: Any) -> Judged:
        options: dict[str, Any] = {**OPTIONS, "enable_checkpointing": True, "default_root_dir": folder}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            ran = trainer(first, **options | {"max_epochs": 1})
            ran.fit(build(), batches())
            module = build()
            path = ran.checkpoint_callback.best_model_path  # type: ignore[union-attr]
            trainer(second, **options).fit(module, batches(), ckpt_path=path)
        return module

    plain = went_on(tmp_path / "plain", None, None)
    assert_alike(went_on(tmp_path / "ours", strategy_at("ram"), strategy_at("ram")), plain)
    assert_alike(went_on(tmp_path / "from plain", None, strategy_at("ram")), plain)
