"""Lightning's own features, with model states in each tier: the numbers are those of `strategy="auto"`, to the last bit.

Both sides train at 32-true with torch's fused AdamW. What an averaging callback leaves under mixed precision has no twin
there (masters are averaged, not their 16-bit copies): it is compared with the callback's own average.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Block
from lightning.pytorch import callbacks as cb
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError, UsageError

WIDTH = 32


@pytest.fixture(autouse=True)
def one_thread_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Lightning would set the number of threads unless it found the variable; BatchSizeFinder writes where it stands."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Classifier(L.LightningModule):
    """Model with BatchNorm and other buffers, a metric whose state is saved, a schedule, and hyperparameters."""

    def __init__(self, lr: float = 1e-2, batch_size: int = 8, meta: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.batch_size = batch_size
        self.meta = meta
        self.accuracy = MulticlassAccuracy(num_classes=5)
        self.accuracy.persistent(True)
        self.register_buffer("steps", torch.zeros(()))
        self.losses: list[float] = []
        self.blocks: nn.ModuleList | None = None
        if not meta:
            self.configure_model()

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        with torch.device("meta" if self.meta else "cpu"):
            self.stem = nn.Linear(8, WIDTH)
            self.blocks = nn.ModuleList(Block(WIDTH, 4 * WIDTH, functional.gelu, norm=True) for _ in range(3))
            self.norm = nn.BatchNorm1d(WIDTH)
            self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        assert self.blocks is not None
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.steps += 1
        self.losses.append(float(loss))
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        scores = self(batch[0])
        self.accuracy(scores, batch[1])
        self.log("val_loss", functional.cross_entropy(scores, batch[1]), sync_dist=True)
        self.log("accuracy", self.accuracy)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(64, 0, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(32, 1, self.batch_size)


def loader(count: int, seed: int, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :5].argmax(1)), batch_size=batch_size)


def trainer(strategy: Strategy | str, **options: Any) -> L.Trainer:
    saves = any(isinstance(each, cb.Checkpoint) for each in options.get("callbacks", ()))
    chosen = {
        "precision": "32-true",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": saves,
        **options,
    }
    return quiet_trainer(strategy, **chosen)


def model(kind: type[Classifier] = Classifier, **options: Any) -> Classifier:
    torch.manual_seed(0)
    return kind(**options)


def result(module: Classifier, **more: Any) -> dict[str, Any]:
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {"losses": module.losses, "state": state, **more}


def fitted(strategy: Strategy | str, kind: type[Classifier] = Classifier, **options: Any) -> dict[str, Any]:
    module = model(kind)
    run = trainer(strategy, **options)
    run.fit(module)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return result(module, metrics=metrics, steps=run.global_step)


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "early stopping": lambda: {
        "callbacks": [cb.EarlyStopping("val_loss", patience=1, min_delta=0.3)],
        "max_epochs": 8,
    },
    "accumulation that changes": lambda: {"callbacks": [cb.GradientAccumulationScheduler({0: 1, 1: 4})]},
    "weight averaging": lambda: {"callbacks": [cb.WeightAveraging()]},
    "moving average": lambda: {"callbacks": [cb.EMAWeightAveraging(decay=0.9)]},
    "stochastic averaging": lambda: {"callbacks": [cb.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]},
    "stochastic averaging without validation": lambda: {
        "callbacks": [cb.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)],
        "limit_val_batches": 0,
    },
    "learning rate finder": lambda: {"callbacks": [cb.LearningRateFinder(num_training_steps=12)]},
    "overfitting": lambda: {"overfit_batches": 2, "max_epochs": 3},
    "validation in between": lambda: {"limit_val_batches": 0.5, "val_check_interval": 3, "limit_train_batches": 7},
    "a quick run": lambda: {"fast_dev_run": 2},
    "anomaly detection": lambda: {"detect_anomaly": True, "max_epochs": 1},
    "profiler": lambda: {"profiler": "simple", "max_epochs": 1},
}


def with_options(strategy: Strategy | str, name: str) -> dict[str, Any]:
    try:
        with TemporaryDirectory() as folder:
            return fitted(strategy, default_root_dir=folder, **OPTIONS[name]())
    finally:
        torch.autograd.set_detect_anomaly(False)


@cache
def with_options_plainly(name: str) -> dict[str, Any]:
    """Returns the outcome with Lightning's own strategy, which all tiers are compared with."""
    return with_options("auto", name)


@pytest.mark.slow_unless(
    "ram-learning rate finder",
    "ram-validation in between",
    "three_tiers-stochastic averaging",
    "three_tiers-overfitting",
    "lock_free_three_tiers-stochastic averaging without validation",
    "lock_free_three_tiers-profiler",
)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_callbacks(strategy_at, tier, name) -> None:
    assert_same(with_options(strategy_at(tier), name), with_options_plainly(name))


class Noting(cb.Callback):
    """Notes whether gradients are kept behind the backward pass."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.kept = strategy.engine.blueprint.outlive_backward


@pytest.mark.parametrize("averages", [False, True])
def test_gradients_are_kept_for_the_step_with_which_stochastic_averaging_ends(averages: bool, tmp_path: Path) -> None:
    strategy = AngelPTMStrategy(offload_optimizer="disk", disk_path=str(tmp_path), page_size="64KiB")
    noting = Noting()
    averaging = [cb.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)] if averages else []
    fitted(strategy, callbacks=[noting, *averaging])
    assert noting.kept is averages


@cache
def not_averaged() -> dict[str, Tensor]:
    """Returns the state after training without such a callback under mixed precision."""
    return fitted(AngelPTMStrategy(page_size="64KiB", debug={"poison": True}), precision="bf16-mixed")["state"]  # type: ignore[no-any-return]


@pytest.mark.slow_unless("ram-WeightAveraging", "three_tiers-WeightAveraging", "lock_free_three_tiers-<lambda>")
@pytest.mark.parametrize("averaging", [cb.WeightAveraging, lambda: cb.EMAWeightAveraging(decay=0.9)])
def test_masters_are_averaged_under_mixed_precision(strategy_at, tier, averaging) -> None:
    callback = averaging()
    module = model()
    trainer(strategy_at(tier), precision="bf16-mixed", callbacks=[callback]).fit(module)
    plain = not_averaged()
    averages = callback._average_model.module.parameters()
    for (name, weight), average in zip(module.named_parameters(), averages, strict=True):
        assert torch.equal(weight, average), name
        assert not torch.equal(weight, plain[name]), name
    assert any((p.bfloat16().float() != p).any() for p in callback._average_model.parameters())


@pytest.mark.slow_unless("ram", "three_tiers", "all_on_disk")
def test_an_evaluation_after_a_fit_uses_its_average(strategy_at, tier) -> None:
    def evaluated(strategy: Strategy | str) -> tuple[Any, dict[str, Tensor]]:
        module = model()
        fits = trainer(strategy, callbacks=[cb.EMAWeightAveraging(decay=0.9)])
        fits.fit(module)
        with torch.no_grad():
            module.head.weight.mul_(2)
        return fits.validate(module, verbose=False), {
            name: value.clone() for name, value in module.state_dict().items()
        }

    (found, weights), (expected, plain) = evaluated(strategy_at(tier)), evaluated("auto")
    assert found == expected
    assert_same(weights, plain)


def test_sharded_checkpoints_have_no_place_for_averages(strategy_at) -> None:
    with pytest.raises(
        ConfigError,
        match=r"EMAWeightAveraging saves two sets of weights.*use checkpoints=Checkpoints\(state_dict_type='full'\)",
    ):
        trainer(
            strategy_at("ram", checkpoints={"state_dict_type": "sharded"}), callbacks=[cb.EMAWeightAveraging()]
        ).fit(model())


@pytest.mark.slow_unless("three_tiers-32-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_moving_average_is_resumed(strategy_at, tier, precision, tmp_path) -> None:
    def run(checkpoint: Path | None = None) -> dict[str, Any]:
        saves = cb.ModelCheckpoint(dirpath=tmp_path / "saved", filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        averaging = cb.EMAWeightAveraging(decay=0.9)
        chosen = [averaging] if checkpoint else [averaging, saves]
        module = model()
        trainer(strategy_at(tier), precision=precision, callbacks=chosen).fit(
            module, ckpt_path=checkpoint, weights_only=False
        )
        return result(module)

    whole = run()
    resumed = run(tmp_path / "saved" / "epoch=0.ckpt")
    assert len(whole["losses"]) == 2 * len(resumed["losses"]) > 0
    assert_same(resumed["losses"], whole["losses"][-len(resumed["losses"]) :])
    assert_same(resumed["state"], whole["state"])


def saved_and_resumed(saving: Strategy | str, resuming: Strategy | str, folder: Path) -> Any:
    saves = cb.ModelCheckpoint(dirpath=folder, every_n_train_steps=5, save_top_k=-1, save_last=True)
    first = fitted(saving, callbacks=[saves])
    (path,) = folder.glob("*step=5.ckpt")
    module = model()
    trainer(resuming, callbacks=[saves]).fit(module, ckpt_path=path, weights_only=False)
    return first, result(module), torch.load(path, weights_only=False), path


@cache
def saved_and_resumed_plainly() -> Any:
    with TemporaryDirectory() as folder:
        return saved_and_resumed("auto", "auto", Path(folder))[:-1]


@pytest.mark.slow_unless("ram-False-True", "three_tiers-True-True", "lock_free_three_tiers-True-False")
@pytest.mark.parametrize(("saved_here", "resumed_here"), [(True, True), (True, False), (False, True)])
def test_checkpoints_move_between_strategies(strategy_at, tier, tmp_path, saved_here, resumed_here) -> None:
    here = [strategy_at(tier) if ours else "auto" for ours in (saved_here, resumed_here)]
    *ours, path = saved_and_resumed(here[0], here[1], tmp_path / "ours")
    theirs = saved_and_resumed_plainly()
    assert_same(tuple(ours[:2]), theirs[:2])
    assert_same(dict(ours[2]["state_dict"]), dict(theirs[2]["state_dict"]))
    assert ours[2]["state_dict"]._metadata == theirs[2]["state_dict"]._metadata  # load_state_dict asks for versions
    for key in ("optimizer_states", "lr_schedulers"):
        assert_same(ours[2][key], theirs[2][key])
    loaded = Classifier.load_from_checkpoint(path, weights_only=False)
    assert_same(dict(loaded.state_dict()), dict(ours[2]["state_dict"]))


@cache
def saved_after_the_run_plainly() -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        run = trainer("auto")
        run.fit(model())
        run.save_checkpoint(Path(folder, "x.ckpt"))
        return torch.load(Path(folder, "x.ckpt"), weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_a_checkpoint_after_the_run(strategy_at, tier, tmp_path) -> None:
    path = tmp_path / "ours.ckpt"
    run = trainer(strategy_at(tier))
    run.fit(model())
    run.save_checkpoint(path)
    ours, theirs = torch.load(path, weights_only=False), saved_after_the_run_plainly()
    assert_same(dict(ours["state_dict"]), dict(theirs["state_dict"]))
    assert_same(ours["optimizer_states"], theirs["optimizer_states"])


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_weights_that_were_not_put_back_are_not_saved(strategy_at, tier, tmp_path) -> None:
    run = trainer(strategy_at(tier, tuning={"restore_weights": False}), max_epochs=1)
    run.fit(model())
    with pytest.raises(UsageError, match="not restored to the module"):
        run.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def validated_and_predicted(strategy: Strategy | str) -> Any:
    with TemporaryDirectory() as folder:
        saves = cb.ModelCheckpoint(dirpath=folder, monitor="val_loss", save_weights_only=True)
        same = trainer(strategy, callbacks=[saves])
        same.fit(model())
        measured = same.validate(ckpt_path="best", verbose=False, weights_only=False)
        return measured, torch.cat(same.predict(model(), loader(16, 3)))  # type: ignore[arg-type]


@cache
def validated_and_predicted_plainly() -> Any:
    return validated_and_predicted("auto")


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_validate_a_checkpoint_and_predict(strategy_at, tier) -> None:
    assert_same(validated_and_predicted(strategy_at(tier)), validated_and_predicted_plainly())


def tuned(strategy: Strategy | str) -> Any:
    module = model()
    same = trainer(strategy, max_epochs=1)
    found = Tuner(same).lr_find(module, num_training=12)
    size = Tuner(same).scale_batch_size(module, steps_per_trial=1, max_trials=2)
    same.fit(module)
    assert found is not None
    return found.results, size, result(module)


@cache
def tuned_plainly() -> Any:
    return tuned("auto")


@pytest.mark.slow_unless("lock_free_three_tiers")
def test_tuner(strategy_at, tier) -> None:
    assert_same(tuned(strategy_at(tier)), tuned_plainly())


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
@pytest.mark.parametrize("meta", [False, True])
def test_summary_has_true_sizes(strategy_at, tier, meta) -> None:
    class Look(cb.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
            seen.append(summarize(module))

    seen: list[Any] = []
    trainer(strategy_at(tier), fast_dev_run=1, callbacks=[Look()]).fit(model(meta=meta))
    true = summarize(model())
    assert (seen[0].total_parameters, seen[0].model_size) == (true.total_parameters, true.model_size)
    layers = [dict(zip(each.layer_names, each.param_nums, strict=True)) for each in (seen[0], true)]
    assert layers[0] == layers[1]


class NormReader(Classifier):
    """Records the norm of all gradients before clipping and step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.strategy.strategy_name == "angel_ptm":  # type: ignore[attr-defined]
            norm = self.trainer.strategy.engine.stepping.gradient_norm(optimizer)  # type: ignore[attr-defined]
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.losses.append(float(norm))


@cache
def norms_plainly() -> dict[str, Any]:
    return fitted("auto", NormReader, max_epochs=1)


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_gradient_norm(strategy_at, tier) -> None:
    """Not bitwise: the order of the sum is another one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = fitted(strategy_at(tier), NormReader, max_epochs=1)
    by_callback: list[float] = []
    callback = cb.LambdaCallback(
        on_before_optimizer_step=lambda run, _, used: by_callback.append(
            float(run.strategy.engine.stepping.gradient_norm(used))
        )
    )
    fitted(strategy_at(tier), callbacks=[callback], max_epochs=1)
    assert by_callback == ours["losses"][1::2]
    theirs = norms_plainly()
    assert_same(ours["state"], theirs["state"])
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-5, atol=0)
    assert not any(
        "NormReader" in str(each.message) for each in caught
    )  # only ranks, each with its part, cannot read .grad
