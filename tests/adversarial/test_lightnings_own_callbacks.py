"""Expectations of Lightning's own callbacks, connectors and plugins of a strategy beyond its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.judged import Judged, MakeStrategy, assert_alike, batches, judge, run, trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning
from lightning.pytorch.loggers import CSVLogger
from test_laid_out_anew import Adding, Unfreezing

from lightning_ptm.callbacks import GradNormMonitor, MemoryTimeline, PageMonitor, PageTracer, PlanPrinter
from lightning_ptm.errors import UsageError


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
    """Checkpoints of other programs, which have an empty dictionary of optimizer states, can be resumed from."""

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


class Replacing(Judged):
    """Gives a parameter other data behind a step, as pruning does where it is made permanent."""

    def replace(self) -> None:
        self.head.weight.data = self.head.weight.data * (self.head.weight.data > 0)


def test_data_that_is_replaced_at_the_end_stays(strategy_at: MakeStrategy) -> None:
    class AtTheEnd(Replacing):
        def on_train_end(self) -> None:
            self.replace()
            self.note(self.trainer.strategy.lightning_module_state_dict()["head.weight"])

    judge(AtTheEnd, strategy_at("ram"))


def test_replaced_data_is_what_is_saved(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    class Saving(Replacing):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 3:
                self.replace()
                self.trainer.save_checkpoint(tmp_path / "some.ckpt")
                self.note(torch.load(tmp_path / "some.ckpt", weights_only=True)["state_dict"]["head.weight"])

    judge(Saving, strategy_at("ram"))


@pytest.mark.parametrize("lottery", [False, True])
@pytest.mark.parametrize("permanent", [False, True])
def test_pruning_at_the_end_of_training(strategy_at: MakeStrategy, permanent: bool, lottery: bool) -> None:
    def weights(strategy: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = Judged()
        pruning = ModelPruning(
            "l1_unstructured",
            [(module.head, "weight")],
            use_lottery_ticket_hypothesis=lottery,
            make_pruning_permanent=permanent,
        )
        trainer(strategy, callbacks=[pruning]).fit(module, batches())
        return dict(module.state_dict())

    ours, theirs = weights(strategy_at("ram")), weights(None)
    assert ours.keys() == theirs.keys() and ("head.weight" in ours) is permanent
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_pruning_in_mid_run(strategy_at: MakeStrategy) -> None:
    """The masks stay with the weights, and a rewound parameter shares its storage with what it was rewound to."""

    def weights(strategy: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = Judged()
        names = ["weight", "bias"]
        pruning = ModelPruning(
            "l1_unstructured", parameter_names=names, amount=0.2, use_lottery_ticket_hypothesis=lambda e: e == 1
        )
        trainer(strategy, callbacks=[pruning], max_epochs=5).fit(module, batches())
        return dict(module.state_dict())

    ours, theirs = weights(strategy_at("ram")), weights(None)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


class ByHandAdding(Adding):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class Exchanging(Judged):
    """Gives parameters an average's data for a while, and then their own again."""

    def on_train_epoch_start(self) -> None:
        self.own = self.head.weight.data
        self.head.weight.data = self.own * 0.5
        self.note(self.trainer.strategy.lightning_module_state_dict()["head.weight"])

    def on_train_epoch_end(self) -> None:
        self.note(self.head.weight)
        self.head.weight.data = self.own


class Validating(Judged):
    """Evaluates with an average's data in the place of its own."""

    def val_dataloader(self) -> Any:
        return batches(2)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.loss(batch)

    def on_validation_start(self) -> None:
        self.own = [each.data for each in self.parameters()]
        for each in self.parameters():
            each.data = each.data * 0.5

    def on_validation_end(self) -> None:
        self.note(self.trainer.strategy.lightning_module_state_dict()["head.weight"])
        for each, own in zip(self.parameters(), self.own, strict=True):
            each.data = own


@pytest.mark.diagonal
@pytest.mark.parametrize("build", [Unfreezing, Adding, ByHandAdding, Exchanging, Validating])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_what_is_trained_changes_between_batches(
    strategy_at: MakeStrategy, build: type[Judged], options: dict[str, Any]
) -> None:
    if build is ByHandAdding and options:
        pytest.skip("is not for manual optimization")
    judge(build, strategy_at("ram"), max_epochs=3, **options)


@pytest.mark.parametrize(
    "home",
    [
        "ram",
        *(pytest.param(home, marks=pytest.mark.slow) for home in ("masters_on_disk", "lock_free")),
        "all_on_disk",
    ],
)
def test_finetuning_goes_on_from_a_checkpoint(strategy_at: MakeStrategy, tmp_path: Path, home: str) -> None:
    class Backbone(Judged):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.blocks

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam((each for each in self.parameters() if each.requires_grad), lr=1e-2, fused=True)

        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "some.ckpt")

    def weights(strategy: MakeStrategy | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        for epochs in (2, 4):
            module = Backbone()
            of = trainer(
                None if strategy is None else strategy(home),
                max_epochs=epochs,
                callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)],
            )
            of.fit(module, batches(), ckpt_path=tmp_path / "some.ckpt" if epochs == 4 else None)
        return dict(module.state_dict())

    ours, theirs = weights(strategy_at), weights(None)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk"])
def test_unfreezing_in_the_middle_of_a_step_is_refused(strategy_at: MakeStrategy, home: str) -> None:
    class Late(Unfreezing):
        def on_train_epoch_start(self) -> None:
            pass

        def training_step(self, batch: list[torch.Tensor], index: int) -> Any:
            self.unfreeze()
            return self.loss(batch)

    with pytest.raises(UsageError, match=r"parameter blocks.1.* was frozen when .* unfreeze it between two batches"):
        run(Late, strategy_at(home))


class ReplacingInTheStep(Replacing):
    def training_step(self, batch: list[torch.Tensor], index: int) -> Any:
        self.replace()
        return self.loss(batch)


def test_data_that_is_replaced_in_the_middle_of_a_step(strategy_at: MakeStrategy) -> None:
    judge(ReplacingInTheStep, strategy_at("ram"))


def test_data_that_is_replaced_in_the_middle_of_a_step_is_refused(strategy_at: MakeStrategy) -> None:
    with pytest.raises(UsageError, match=r"the data of parameter head.weight was replaced|head.weight was written to"):
        run(ReplacingInTheStep, strategy_at("masters_on_disk"))


def test_an_override_of_load_state_dict_may_return_nothing(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    class Silent(Judged):
        def load_state_dict(self, state: Any, strict: bool = True) -> None:  # type: ignore[override]
            self.note(strict)
            super().load_state_dict(state, strict)

    def weights(strategy: MakeStrategy | None) -> Judged:
        torch.manual_seed(0)
        for epochs in (1, 2):
            of, module = trainer(None if strategy is None else strategy("ram"), max_epochs=epochs), Silent()
            of.fit(module, batches(), ckpt_path=tmp_path / "some.ckpt" if epochs == 2 else None)
            of.save_checkpoint(tmp_path / "some.ckpt")
        return module

    assert_alike(weights(strategy_at), weights(None))


def test_monitors_of_pages_meet_a_run_without(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    class Backbone(Judged):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.blocks

    monitors = [each() for each in (GradNormMonitor, MemoryTimeline, PageMonitor, PageTracer, PlanPrinter)]
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    options = {"default_root_dir": tmp_path, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    of = trainer(strategy_at("ram"), callbacks=[*monitors, finetuning], max_epochs=2, **options)
    of.fit(Backbone(), batches())
    assert of.state.finished
