"""Weights from and to `torch.distributed.checkpoint`, equal to the bit."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.fits import fit, quiet_trainer
from kit.models import Linears
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import sharded
from lightning_ptm.config import Weights
from lightning_ptm.errors import CheckpointError, ConfigError
from lightning_ptm.storage.index import DCP_METADATA

Data = DataLoader[Any]


def _data() -> Data:
    return DataLoader(torch.randn(4, 64), batch_size=2)


class First(L.Callback):
    """The weights with which training starts."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = {name: value.clone() for name, value in module.state_dict().items()}


def _saved_by_dcp(folder: Path, *, wrapped: bool) -> Linears:
    """A DCP checkpoint as Lightning's ModelParallelStrategy writes it (`wrapped`), or of a state dict alone."""
    module = fit(Linears(seed=3), _data(), max_steps=2).lightning_module
    weights = module.state_dict()
    states = {str(key): state for key, state in enumerate(module.trainer.optimizers[0].state.values())}
    dcp.save({"state_dict": weights, "optimizer_0": {"state": states}} if wrapped else weights, checkpoint_id=folder)
    return module


@pytest.mark.parametrize("tier", ["ram", "all_on_disk", "tight"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_first_weights_are_those_of_a_dcp_checkpoint(
    strategy_at: Any, tmp_path: Path, tier: str, wrapped: bool
) -> None:
    theirs = _saved_by_dcp(tmp_path / "dcp", wrapped=wrapped)
    first = First()
    strategy = strategy_at(tier, weights=Weights(path=tmp_path / "dcp"))
    fit(Linears(seed=4), _data(), strategy, max_steps=1, callbacks=[first])
    expected = theirs.state_dict()
    assert first.weights.keys() == expected.keys()
    for name, value in first.weights.items():
        assert torch.equal(value, expected[name]), name


def test_dcp_loads_a_sharded_checkpoint(strategy_at: Any, tmp_path: Path) -> None:
    strategy = strategy_at("all_on_disk", checkpoints={"state_dict_type": "sharded"})
    trainer = fit(Linears(seed=1), _data(), strategy, max_steps=2)
    trainer.save_checkpoint(tmp_path / "ours")
    into = Linears(seed=2).state_dict()
    dcp.load(into, storage_reader=sharded.DCPReader(tmp_path / "ours"), no_dist=True)
    expected = trainer.lightning_module.state_dict()
    assert into.keys() == expected.keys()
    for name, value in into.items():
        assert torch.equal(value, expected[name]), name


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("touch was_run",)


def test_metadata_that_would_run_code_is_refused(strategy_at: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DCP_METADATA).write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(CheckpointError, match="system, which could run code"):
        fit(Linears(), _data(), strategy_at("ram", weights=Weights(path=tmp_path)), max_steps=1)
    assert not (tmp_path / "was_run").exists()


def test_a_damaged_checkpoint_is_refused(strategy_at: Any, tmp_path: Path) -> None:
    _saved_by_dcp(tmp_path / "dcp", wrapped=False)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:4096])
    with pytest.raises(CheckpointError, match="cannot be read"):
        fit(Linears(), _data(), strategy_at("ram", weights=Weights(path=tmp_path / "dcp")), max_steps=1)


def test_names_that_differ_are_refused(strategy_at: Any, tmp_path: Path) -> None:
    _saved_by_dcp(tmp_path / "dcp", wrapped=False)
    with pytest.raises(ConfigError, match=r"stem\.weight"):
        fit(Linears(stem=64), _data(), strategy_at("ram", weights=Weights(path=tmp_path / "dcp")), max_steps=1)


def test_a_run_does_not_continue_from_it(strategy_at: Any, tmp_path: Path) -> None:
    _saved_by_dcp(tmp_path / "dcp", wrapped=True)
    trainer = quiet_trainer(strategy_at("ram"), max_steps=1)
    with pytest.raises(CheckpointError, match=r"only its weights can be loaded, .* AngelPTMStrategy\(weights="):
        trainer.fit(Linears(), _data(), ckpt_path=tmp_path / "dcp")
