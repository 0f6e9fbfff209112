"""`resume="auto"`: what a fit that is started again goes on from, and what it says."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy, CheckpointError, ConfigError, PageIOError
from lightning_ptm.storage.index import INDEX, PARTIAL


class Module(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.lr = 1e-2
        self.began_at = -1

    def on_train_start(self) -> None:
        self.began_at = self.trainer.global_step

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.layers(torch.ones(2, self.layers[0].in_features)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def trainer_of(
    folder: Path, steps: int, kind: str = "sharded", *callbacks: Any, saves: dict[str, Any] | None = None, **given: Any
) -> L.Trainer:
    settings = {"checkpoints": {"resume": "auto", "state_dict_type": kind}, **given.pop("settings", {})}
    keep = ModelCheckpoint(
        folder, **{"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1, **(saves or {})}
    )
    return L.Trainer(
        strategy=AngelPTMStrategy(**settings),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[keep, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"default_root_dir": folder, **given},
    )


def fit(trainer: L.Trainer, module: Module | None = None, **given: Any) -> Module:
    module = module or Module()
    trainer.fit(module, DataLoader(range(4), batch_size=None), **given)  # type: ignore[arg-type]
    return module


def damage(path: Path) -> None:
    file = path if path.is_file() else max(path.glob("*.parameters.safetensors"))
    content = bytearray(file.read_bytes())
    if path.is_file():
        content = content[:-200]  # cut short
    else:
        content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_fit_begins_anew_says_so_and_goes_on_the_next_time(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert fit(trainer_of(tmp_path, 3, kind)).began_at == 0
    said = [line for line in caplog.messages if "resume=" in line]
    assert said == [f"Checkpoints(resume='auto') starts from scratch: there is no checkpoint in {tmp_path}"]
    caplog.clear()
    with caplog.at_level("INFO"):
        ours = fit(trainer_of(tmp_path, 5, kind))
    assert ours.began_at == 3
    assert any(
        f"Restoring states from the checkpoint path at {tmp_path / 'step=3.ckpt'}" in line for line in caplog.messages
    )
    by_hand = fit(trainer_of(tmp_path / "other", 5, kind), ckpt_path=tmp_path / "step=3.ckpt")
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in by_hand.state_dict().items())


def test_the_other_format_is_gone_on_from_too(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 2, "full"))
    assert fit(trainer_of(tmp_path, 3, "sharded")).began_at == 2
    assert fit(trainer_of(tmp_path, 4, "full")).began_at == 3


def test_a_path_that_is_given_counts_and_never_is_never(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 3))
    assert fit(trainer_of(tmp_path, 4), ckpt_path=tmp_path / "step=1.ckpt").began_at == 1
    assert fit(trainer_of(tmp_path, 4, settings={"checkpoints": {"resume": "never"}})).began_at == 0


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_damaged_one_is_passed_over_with_a_warning(kind: str, tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 3, kind))
    damage(tmp_path / "step=3.ckpt")
    with pytest.warns(UserWarning, match=r"resume='auto'\) passes over .*step=3.ckpt: .*step=3.ckpt"):
        assert fit(trainer_of(tmp_path, 4, kind)).began_at == 2


def test_a_bit_of_a_weight_that_is_another_one_is_found_in_either_kind(tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        weights = fit(trainer_of(tmp_path / kind, 3, kind)).layers[1].weight.detach().numpy().tobytes()
        path = tmp_path / kind / "step=3.ckpt"
        file = next(each for each in [path, *path.rglob("*")] if each.is_file() and weights in each.read_bytes())
        content = bytearray(file.read_bytes())
        content[content.index(weights)] ^= 1
        file.write_bytes(content)
        with pytest.warns(
            UserWarning, match=r"resume='auto'\) passes over .*step=3.ckpt: .*are not those that were written"
        ):
            assert fit(trainer_of(tmp_path / kind, 4, kind)).began_at == 2


def test_a_file_of_tensors_beside_the_checkpoints_is_passed_over(tmp_path: Path) -> None:
    module = fit(trainer_of(tmp_path, 2))
    torch.save({"state_dict": module.state_dict()}, tmp_path / "weights.ckpt")
    with pytest.warns(
        UserWarning, match=r"passes over .*weights.ckpt: .* is not a Lightning checkpoint: it has the keys state_dict"
    ):
        assert fit(trainer_of(tmp_path, 3)).began_at == 2
    with pytest.raises(CheckpointError, match="give a file that a Trainer has saved"):
        fit(trainer_of(tmp_path, 3), ckpt_path=tmp_path / "weights.ckpt")


def test_checkpoints_are_found_whatever_their_names_end_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelCheckpoint, "FILE_EXTENSION", ".pt")
    fit(trainer_of(tmp_path, 2))
    assert (tmp_path / "step=2.pt").is_dir()
    assert fit(trainer_of(tmp_path, 3)).began_at == 2


def test_nothing_begins_anew_beside_checkpoints_that_cannot_be_read(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 2))
    for path in tmp_path.glob("*.ckpt"):
        damage(path)
    there = sorted(tmp_path.rglob("*"))
    with (
        pytest.warns(UserWarning, match="passes over"),
        pytest.raises(CheckpointError, match=r"found 2 checkpoints in .* and could read none of them, .*step=2"),
    ):
        fit(trainer_of(tmp_path, 3))
    assert sorted(tmp_path.rglob("*")) == there


def test_the_folder_of_another_model_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 2))
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"chose {tmp_path}/step=2.ckpt, .* size mismatch .* settings"):
        fit(trainer_of(tmp_path, 3), Module(width=12))
    assert sorted(tmp_path.rglob("*")) == there


def test_a_full_one_of_another_model_is_named(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 2, "full"))
    with pytest.raises(CheckpointError, match=rf"resume='auto'\) chose {tmp_path}/step=2.ckpt, .* size mismatch"):
        fit(trainer_of(tmp_path, 3, "full"), Module(width=12))


def test_a_file_in_the_place_of_the_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    module = Module()
    with pytest.raises(
        CheckpointError, match=r"looks for checkpoints in .*/file, which is a file; give ModelCheckpoint the"
    ):
        fit(trainer_of(tmp_path / "file", 1, default_root_dir=tmp_path), module)
    assert module.began_at == -1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PageIOError("the disk tier is full", path="/disk", page=None, errno=errno.ENOSPC), "^the disk tier is full"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/my/vocabulary.txt"), r"/my/vocabulary\.txt"),
        (PermissionError(errno.EACCES, "Permission denied", "/my/vocabulary.txt"), r"/my/vocabulary\.txt"),
    ],
)
@pytest.mark.filterwarnings("error:.*resume='auto'. passes over")
def test_what_is_not_the_checkpoints_fault_is_not_said_of_it(
    error: OSError, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that are not the checkpoint's fault are raised as they are. Once, the checkpoint was passed over for an
    earlier one, and in the end the folder was blamed."""
    fit(trainer_of(tmp_path, 2, "full"))

    def failing(*given: Any) -> None:
        raise error

    monkeypatch.setattr("lightning_ptm.checkpoints.file_io.FileCheckpointIO.check", failing)
    with pytest.raises(type(error), match=message):
        fit(trainer_of(tmp_path, 3, "full"))


def test_a_save_that_was_killed_is_never_chosen_and_its_rest_is_removed(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 2))
    rest = tmp_path / f"{PARTIAL}{'0' * 12}"
    shutil.copytree(tmp_path / "step=1.ckpt", rest)
    (rest / "writer.lock").touch()
    (rest / INDEX).touch()  # the newest of all
    assert fit(trainer_of(tmp_path, 3)).began_at == 2
    assert not rest.exists()


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_stays_the_name_of_the_last_one(save_last: Any, tmp_path: Path) -> None:
    saves = {"save_last": save_last, "save_top_k": 2, "monitor": "step", "mode": "max"}
    fit(trainer_of(tmp_path, 1, saves=saves))
    # Killed behind its first save: that one does not know of last.ckpt, which was written after it.
    if save_last is True:
        shutil.rmtree(tmp_path / "last.ckpt")
        shutil.copytree(tmp_path / "step=1.ckpt", tmp_path / "last.ckpt")
    for steps in (3, 5):
        fit(trainer_of(tmp_path, steps, saves=saves))
        # What a run has gone on from is removed in its turn, too: it is the run's own.
        assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == ["last", f"step={steps - 1}", f"step={steps}"]


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(trainer_of(tmp_path, 2, saves={"save_weights_only": True}))
    with caplog.at_level("INFO"):
        assert fit(trainer_of(tmp_path, 3)).began_at == 0
    said = [line.partition(" passes over ")[0] for line in caplog.messages if "weights only" in line]
    assert said == ["Checkpoints(resume='auto')"] * 2
    assert f"Checkpoints(resume='auto') starts from scratch: there is no checkpoint in {tmp_path}" in caplog.messages


def test_the_next_fit_of_a_trainer_goes_on_with_what_it_has(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 5))
    trainer = trainer_of(tmp_path / "other", 2)
    module = fit(trainer)
    shutil.copytree(tmp_path / "step=5.ckpt", tmp_path / "other" / "step=5.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 4
    assert fit(trainer, module).began_at == 2


def test_evaluations_and_trials_of_tuners_are_none_of_its_business(tmp_path: Path) -> None:
    fit(trainer_of(tmp_path, 3))
    module = Module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = trainer_of(tmp_path, 5)
    module.predict_step = lambda batch, index=0: torch.zeros(1)  # type: ignore[method-assign,assignment]
    trainer.predict(module, DataLoader(range(1), batch_size=None), return_predictions=False)  # type: ignore[arg-type]
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert fit(trainer_of(tmp_path, 2, fast_dev_run=True)).began_at == 0
    trial = trainer_of(tmp_path, 5, "full")
    module = Module()
    data = DataLoader(range(4), batch_size=None)  # type: ignore[arg-type]
    Tuner(trial).lr_find(module, data, num_training=2, attr_name="lr")
    assert module.began_at == 0


def test_lightnings_method_is_in_its_place_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 2)
    trainer.prepare_data_per_node = False
    module = Module()
    module.setup = lambda stage: (_ for _ in ()).throw(ZeroDivisionError)  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        fit(trainer, module)
    trainer.strategy.teardown()
    assert "resume_start" not in vars(trainer._checkpoint_connector)
    assert fit(trainer).began_at == 0
    assert "resume_start" not in vars(trainer._checkpoint_connector)


def test_a_folder_whose_name_is_new_at_each_start_is_hinted_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        fit(trainer_of(tmp_path / "version_3" / "checkpoints", 1))
    assert caplog.messages[-1] != "" and any("give ModelCheckpoint a dirpath" in line for line in caplog.messages)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume='always'\): use 'never' or 'auto'"):
        AngelPTMStrategy(checkpoints={"resume": "always"})
    trainer = L.Trainer(
        strategy=AngelPTMStrategy(checkpoints={"resume": "auto"}),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        max_steps=1,
    )
    with pytest.raises(ConfigError, match="resume='auto'\\) resumes from what checkpoint callbacks have written"):
        fit(trainer)
    for finder in (LearningRateFinder(), BatchSizeFinder()):
        with pytest.raises(ConfigError, match=f"{type(finder).__name__} cannot be used with Checkpoints"):
            fit(trainer_of(tmp_path, 1, "full", finder))
    trainer = trainer_of(tmp_path, 1)
    trainer.checkpoint_callback.dirpath = "memory://kept"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="looks for checkpoints in local folders, and memory://kept is not one"):
        fit(trainer)
