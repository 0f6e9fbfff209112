"""Lightning's other front ends, `pytorch_lightning` and Fabric, answer with what to use, whoever is imported first."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import lightning.fabric
import lightning.pytorch
import lightning.pytorch.cli
import pytest
from lightning.pytorch import strategies

from lightning_ptm import AngelPTMStrategy, ConfigError
from lightning_ptm.trainer.registered import _AfterImport, register

pl = pytest.importorskip("pytorch_lightning")
fabric = pytest.importorskip("lightning_fabric")

NAMES = ["angel_ptm", "angel_ptm_host", "angel_ptm_disk", "angel_ptm_lock_free"]
TWIN = r"is of the package pytorch_lightning, and angel_ptm\w* works .*: write `import lightning.pytorch as pl`"
FABRIC = r"Fabric leaves the loop to you, .*: use it with lightning.pytorch.Trainer\(strategy='angel_ptm"


@pytest.mark.parametrize("name", NAMES)
def test_the_twin_says_what_to_import(name: str) -> None:
    with pytest.raises(ConfigError, match=TWIN):
        pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_the_twin_says_so_for_an_object_and_before_anything_is_set_up(accelerator: str) -> None:
    with pytest.raises(ConfigError, match=TWIN):
        pl.Trainer(strategy=AngelPTMStrategy(), accelerator=accelerator, devices=1, logger=False)


@pytest.mark.parametrize("front", [lightning.fabric, fabric], ids=["lightning.fabric", "lightning_fabric"])
@pytest.mark.parametrize("given", [*NAMES, "object"])
def test_fabric_says_what_to_use(front: object, given: str) -> None:
    strategy = AngelPTMStrategy() if given == "object" else given
    with pytest.raises(ConfigError, match=FABRIC):
        front.Fabric(strategy=strategy, accelerator="cpu", devices=1)  # type: ignore[attr-defined]


def test_a_module_of_the_twins_in_our_trainer_is_refused_by_lightning() -> None:
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
