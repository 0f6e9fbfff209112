"""The Trainers of both packages take the strategy by its names; what is of the other package, and Fabric, is answered with
what to use, whatever is imported first."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch
import lightning.pytorch.callbacks
import lightning.pytorch.cli
import lightning_fabric as fabric
import pytest
import pytorch_lightning as pl
import pytorch_lightning.callbacks
import pytorch_lightning.cli
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from lightning.pytorch import strategies

import lightning_ptm.callbacks
import lightning_ptm.pytorch_lightning.callbacks
from lightning_ptm import AngelPTMStrategy, ConfigError
from lightning_ptm.pytorch_lightning import AngelPTMStrategy as OfTheOther
from lightning_ptm.trainer.registered import NAMES, _AfterImport, register

FABRIC = r"Fabric has a strategy class of its own, .*: write Fabric\(strategy='angel_ptm'\)"
ONE_CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_the_strategy_of_the_trainer_s_package(name: str) -> None:
    ours, theirs = (front.Trainer(strategy=name, **ONE_CPU).strategy for front in (lightning.pytorch, pl))
    assert (type(ours), type(theirs)) == (AngelPTMStrategy, OfTheOther)
    assert isinstance(theirs, pl.strategies.ParallelStrategy) and ours.settings == theirs.settings


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
@pytest.mark.parametrize(
    ("trainer", "strategy", "message"),
    [
        (
            pl.Trainer,
            AngelPTMStrategy,
            "of the package pytorch_lightning, and this AngelPTMStrategy is for that of lightning.pytorch, .*: write "
            "`from lightning_ptm.pytorch_lightning import AngelPTMStrategy`, or strategy='angel_ptm', which works with both",
        ),
        (
            lightning.pytorch.Trainer,
            OfTheOther,
            "of the package lightning.pytorch, and this AngelPTMStrategy is for that of pytorch_lightning, .*: write "
            "`from lightning_ptm import AngelPTMStrategy`, or strategy='angel_ptm', which works with both",
        ),
    ],
)
def test_a_strategy_of_the_other_package_is_refused_before_anything_is_set_up(
    trainer: Any, strategy: Any, message: str, accelerator: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**{**ONE_CPU, "accelerator": accelerator}, strategy=strategy())


class Users(pytorch_lightning.callbacks.Callback):
    """A user's own callback."""


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            lightning_ptm.pytorch_lightning.callbacks.GradNormMonitor(),
            r"of the package lightning.pytorch, and its callback GradNormMonitor \(lightning_ptm.pytorch_lightning.callbacks."
            r"grad_norm\) .* class of pytorch_lightning, .*: write `from lightning_ptm.callbacks import GradNormMonitor`",
        ),
        (
            pytorch_lightning.callbacks.StochasticWeightAveraging(1e-2),
            r"callback StochasticWeightAveraging .*: write `from lightning.pytorch.callbacks import ...` instead",
        ),
        (Users(), r"callback Users .*: write `from lightning.pytorch.callbacks import ...` instead"),
    ],
)
def test_a_callback_of_the_other_package_is_refused(callback: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet_trainer("angel_ptm", max_steps=1, callbacks=[callback]).fit(Linears(), [torch.randn(2, 64)])


def test_a_callback_of_lightning_in_a_trainer_of_pytorch_lightning_is_refused() -> None:
    class Module(pl.LightningModule):
        def validation_step(self, batch: Any, index: int) -> None:
            """Never called."""

    trainer = pl.Trainer(strategy="angel_ptm", callbacks=[lightning_ptm.callbacks.PlanPrinter()], **ONE_CPU)
    with pytest.raises(ConfigError, match=r"from lightning_ptm\.pytorch_lightning\.callbacks import PlanPrinter`"):
        trainer.validate(Module(), [torch.randn(2, 64)])


@pytest.mark.parametrize("front", [lightning.fabric, fabric], ids=["lightning.fabric", "lightning_fabric"])
@pytest.mark.parametrize("given", [AngelPTMStrategy, OfTheOther])
def test_fabric_says_what_to_use(front: object, given: Any) -> None:
    with pytest.raises(ConfigError, match=FABRIC):
        front.Fabric(strategy=given(), accelerator="cpu", devices=1)  # type: ignore[attr-defined]


def test_a_module_of_the_other_package_is_refused_by_lightning() -> None:
    trainer = lightning.pytorch.Trainer(strategy="angel_ptm", accelerator="cpu", devices=1, logger=False)
    with pytest.raises(TypeError, match="single import style"):
        trainer.fit(pl.LightningModule())


def test_other_strategies_are_as_they_were() -> None:
    """Passing as one of theirs has to change nothing for anybody else."""
    assert not isinstance(strategies.DDPStrategy(), pl.strategies.Strategy)
    assert isinstance(pl.Trainer(strategy="ddp", accelerator="cpu", devices=1).strategy, pl.strategies.DDPStrategy)
    assert lightning.fabric.Fabric(strategy="ddp", accelerator="cpu", devices=1).strategy is not None
    with pytest.raises(ValueError, match="invalid strategy name"):
        pl.Trainer(strategy="angel", accelerator="cpu")


def test_what_is_imported_later_is_met_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "front_end_of_later.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, met = list(sys.meta_path), []
    sys.meta_path.insert(0, _AfterImport("front_end_of_later", lambda module: met.append(module.VALUE)))
    importlib.import_module("json.tool")
    assert importlib.util.find_spec("front_end_of_later") is not None  # somebody looks whether it is there
    assert met == []
    importlib.import_module("front_end_of_later")
    assert met == [1] and sys.meta_path == before
    del sys.modules["front_end_of_later"]
    importlib.import_module("front_end_of_later")
    assert met == [1]


def test_what_is_not_installed_is_missing_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = [_AfterImport("front_end_of_nobody", lambda module: None), *sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", watching)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="No module named 'front_end_of_nobody'"):
            importlib.import_module("front_end_of_nobody")


def test_registering_twice_changes_nothing() -> None:
    watching = list(sys.meta_path)
    register()
    assert sys.meta_path == watching
    assert strategies.StrategyRegistry.get("angel_ptm_disk").settings.offload_optimizer == "disk"
