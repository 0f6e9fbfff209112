"""What Lightning's own callbacks, connectors and plugins expect of a strategy beyond its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from judged import Judged, MakeStrategy, batches, run, trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import SLURMEnvironment


def test_one_rank_asks_the_cluster_nothing(strategy_at: MakeStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node that a cluster gives out, outside of a job step: there are no variables to be read."""
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
    of = trainer(strategy_at("ram"))
    of.fit(Judged(), batches())
    assert (of.global_rank, of.local_rank, of.node_rank, of.world_size) == (0, 0, 0, 1)


def test_a_variable_of_the_users_stays(strategy_at: MakeStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")  # Lightning's environment deletes it when it is torn down
    run(Judged, strategy_at("ram"))
    with monkeypatch.context() as changed:
        changed.delenv("WORLD_SIZE")  # raises where it is gone


def test_a_checkpoint_without_optimizer_states_is_gone_on_with(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    """As those of other programs are, which keep an empty dictionary there."""

    def weights_after(strategy: Any) -> dict[str, torch.Tensor]:
        first = run(Judged, strategy_at("ram"))
        made: dict[str, Any] = {"state_dict": first.state_dict(), "optimizer_states": {}, "lr_schedulers": {}}
        torch.save(
            {**made, "pytorch-lightning_version": "2.0.0", "epoch": 0, "global_step": 0}, tmp_path / "foreign.ckpt"
        )
        module = Judged()
        trainer(strategy).fit(module, batches(), ckpt_path=tmp_path / "foreign.ckpt")
        return module.state_dict()

    ours, theirs = weights_after(strategy_at("ram")), weights_after(None)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_what_others_put_around_lightnings_writer_sees_each_save(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    of = trainer(strategy_at("ram"))
    of.fit(Judged(), batches())
    path = tmp_path / "some.ckpt"
    with mock.patch.object(TorchCheckpointIO, "save_checkpoint") as writer:
        of.save_checkpoint(path)
        writer.assert_called_with(mock.ANY, path, storage_options=None)
        of.save_checkpoint(path, storage_options="theirs")
        writer.assert_called_with(mock.ANY, path, storage_options="theirs")


@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_weights_are_loaded_by_one_call(strategy_at: MakeStrategy, tmp_path: Path, entry: str) -> None:
    of = trainer(strategy_at("ram"))
    of.fit(Judged(), batches())
    of.save_checkpoint(tmp_path / "some.ckpt")

    class Validated(Judged):
        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.loss(batch)

    of = trainer(strategy_at("ram"), max_epochs=2)
    with mock.patch.object(of.strategy, "load_model_state_dict", wraps=of.strategy.load_model_state_dict) as load:
        getattr(of, entry)(Validated(), batches(), ckpt_path=tmp_path / "some.ckpt")
    load.assert_called_once()
