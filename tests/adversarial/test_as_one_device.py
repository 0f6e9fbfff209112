"""Programs that Lightning's users write, run with one device and with ours: everything that they could see is the same.

Hooks with their arguments, logged values, checkpoints on disk, weights, gradients, random numbers: see kit/side_by_side.py.
Optimizers are fused, as ours are where the user leaves it open (README); where a run is resumed, nothing random is drawn,
since ours goes on with the checkpoint's random numbers and Lightning with other ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import little_ram
from kit.side_by_side import WIDTH, Desk, Program, Small, data, first_difference, journal_of
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import callbacks as cb
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_ptm.errors import ConfigError, UsageError

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic=True sets for good
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Lightning would set the number of threads unless it found it
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)


@cache
def plainly(name: str) -> list[Any]:
    with TemporaryDirectory() as folder:
        return journal_of(PROGRAMS[name], lambda: "auto", Path(folder) / "desk")


class Certain(Small):
    """Model without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def saves(desk: Desk, **options: Any) -> cb.ModelCheckpoint:
    return cb.ModelCheckpoint(desk.folder, **{"filename": "{epoch}-{step}", **options})


# -- hooks --------------------------------------------------------------------------------------------------------------


@program
def every_hook_of_all_entry_points(desk: Desk) -> None:
    module = desk.watched(Small)()
    trainer = desk.trainer(callbacks=[desk.watched(L.Callback)(), saves(desk)], limit_train_batches=2, max_epochs=1)
    trainer.fit(module)
    desk.weights(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)


@program
def every_hook_of_a_resume(desk: Desk) -> None:
    desk.goes_on = True
    desk.trainer(max_epochs=1, callbacks=[saves(desk, filename="a")]).fit(Certain())
    module = desk.watched(Certain)()
    desk.trainer(callbacks=[desk.watched(L.Callback)(), saves(desk)]).fit(module, ckpt_path=desk.folder / "a.ckpt")
    desk.weights(module)
    desk.trainer().test(desk.watched(Certain)(), ckpt_path=desk.folder / "a.ckpt", verbose=False)


@program
def every_hook_of_manual_optimization(desk: Desk) -> None:
    class Model(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.score(batch))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

    module = desk.watched(Model)()
    desk.trainer(limit_train_batches=2).fit(module)
    desk.weights(module)


@program
def every_hook_of_a_data_module(desk: Desk) -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return data(16, shuffle=True)

        def val_dataloader(self) -> Any:
            return [data(8, seed=5), data(8, seed=6)]

        def predict_dataloader(self) -> Any:
            return data(8, seed=8)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            desk.note("data", state)

    trainer = desk.trainer(callbacks=[saves(desk, filename="a")], reload_dataloaders_every_n_epochs=1)
    source, module = desk.watched(Data)(), Small()
    trainer.fit(module, datamodule=source)
    trainer.predict(module, datamodule=source)
    trainer.validate(module, datamodule=source, ckpt_path=desk.folder / "a.ckpt", verbose=False)


@program
def hooks_that_raise(desk: Desk) -> None:
    class Model(Small):
        def on_train_start(self) -> None:
            raise ValueError("train")

        def on_validation_start(self) -> None:
            raise ValueError("validation")

        def on_test_start(self) -> None:
            raise ValueError("test")

        def on_predict_start(self) -> None:
            raise ValueError("predict")

    module = Model()
    trainer = desk.trainer(fast_dev_run=True, callbacks=[desk.watched(L.Callback)()])
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        with contextlib.suppress(ValueError):
            run(module)
        desk.note("status", str(trainer.state.status), trainer.interrupted)
    desk.weights(module)


@program
def an_exception_in_mid_epoch_and_going_on(desk: Desk) -> None:
    desk.goes_on = True

    class Model(Certain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ValueError
            return super().training_step(batch, batch_idx)

    module = desk.watched(Model)()
    with contextlib.suppress(ValueError):
        desk.trainer(callbacks=[desk.watched(L.Callback)(), cb.OnExceptionCheckpoint(desk.folder)]).fit(module)
    desk.weights(module)
    module = Certain()
    desk.trainer().fit(module, ckpt_path=desk.folder / "on_exception.ckpt")
    desk.weights(module)


# -- steps --------------------------------------------------------------------------------------------------------------


@program
def accumulation_and_clipping(desk: Desk) -> None:
    module = desk.watched(Small)()
    desk.trainer(accumulate_grad_batches=4, gradient_clip_val=0.05).fit(module)
    desk.weights(module)


@program
def accumulation_that_changes(desk: Desk) -> None:
    module = Small()
    desk.trainer(max_epochs=3, callbacks=[cb.GradientAccumulationScheduler({0: 2, 1: 1, 2: 4})]).fit(module)
    desk.weights(module)


@program
def skipped_batches(desk: Desk) -> None:
    class Model(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    module = desk.watched(Model)()
    desk.trainer().fit(module)
    desk.weights(module)


@program
def epochs_that_end_early(desk: Desk) -> None:
    class Model(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 2 - self.current_epoch else None

    module = Model()
    trainer = desk.trainer(max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(module)
    desk.note("steps", trainer.global_step)
    desk.weights(module)


@program
def outputs_that_are_dictionaries(desk: Desk) -> None:
    class Model(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.score(batch)
            return {"loss": loss, "twice": loss.detach() * 2, "text": "x"}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("twice", outputs["twice"])

    module = desk.watched(Model)()
    desk.trainer(accumulate_grad_batches=2).fit(module)
    desk.weights(module)


@program
def a_step_that_is_skipped_by_hand(desk: Desk) -> None:
    class Model(Small):
        optimizer = staticmethod(lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True))

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2 == 0:
                desk.note("loss", optimizer.step(closure=optimizer_closure))
            else:
                optimizer_closure()

    module = Model()
    trainer = desk.trainer()
    trainer.fit(module)
    desk.note("steps", trainer.global_step)
    desk.weights(module)


@program
def two_optimizers_by_turns(desk: Desk) -> None:
    class Model(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                self.toggle_optimizer(optimizer)
                self.manual_backward(self.score(batch))
                desk.note("toggled", [parameter.requires_grad for parameter in self.parameters()])
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                schedule.step()

        def configure_optimizers(self) -> Any:
            first = torch.optim.Adam(self.stem.parameters(), lr=0.01, fused=True)
            second = torch.optim.SGD([*self.head.parameters(), *self.norm.parameters()], lr=0.1, fused=True)
            return [first, second], [lr_scheduler.StepLR(first, 1), lr_scheduler.ExponentialLR(second, 0.9)]

    module = desk.watched(Model)()
    desk.trainer(max_epochs=1, callbacks=[saves(desk, every_n_train_steps=4, save_top_k=-1)]).fit(module)
    desk.weights(module)


@program
def a_closure_by_hand(desk: Desk) -> None:
    class Model(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.score(batch)
                self.manual_backward(loss, retain_graph=True)
                self.manual_backward(loss)
                return loss

            desk.note("loss", optimizer.step(closure=closure))
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

    module = Model()
    desk.trainer().fit(module)
    desk.weights(module)


@program
def the_same_optimizer_in_two_fits(desk: Desk) -> None:
    """Lightning asks for it again, and it goes on with its moments."""
    module = Small()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    module.configure_optimizers = lambda: optimizer
    module.on_train_start = lambda: desk.note("states", optimizer.state_dict())
    trainer = desk.trainer()
    trainer.fit(module)
    desk.note("between", optimizer.state_dict())
    for epochs in (2, 4):  # a fit of no step first
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, val_dataloaders=None)
        desk.weights(module)


@program
def the_same_optimizer_with_another_trainer_and_others_frozen(desk: Desk) -> None:
    """A parameter that is frozen for a while keeps its moments."""
    module = Certain()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, fused=True)
    module.configure_optimizers = lambda: optimizer
    for trains in (True, False, True):
        module.stem.requires_grad_(trains)
        desk.trainer(max_epochs=1, callbacks=[saves(desk, filename=f"{trains}-{{step}}")]).fit(module)
        desk.note("states", optimizer.state_dict())
        desk.weights(module)


@program
def states_that_training_starts_with(desk: Desk) -> None:
    """Loaded by the user in a hook, where pages are there already."""
    desk.trainer(max_epochs=1, callbacks=[saves(desk, filename="a")]).fit(Certain())

    class Model(Certain):
        def on_train_start(self) -> None:
            states = torch.load(desk.folder / "a.ckpt", weights_only=False)["optimizer_states"][0]
            self.optimizers().optimizer.load_state_dict(states)

    module = Model()
    desk.trainer(callbacks=[saves(desk, filename="b")]).fit(module)
    desk.weights(module)


@program
def an_optimizer_of_a_loop_by_hand(desk: Desk) -> None:
    """The user's own steps come first."""
    module = Small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, fused=True)
    module.configure_optimizers = lambda: optimizer
    for batch in data(8):
        optimizer.zero_grad()
        module(batch[0]).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    desk.trainer(max_epochs=1, callbacks=[saves(desk, every_n_train_steps=2, save_top_k=-1)]).fit(module)
    desk.weights(module)


@program
def optimizer_states_loaded_by_hand(desk: Desk) -> None:
    desk.trainer(max_epochs=1, callbacks=[saves(desk, filename="a")]).fit(Certain())

    class Model(Certain):
        def configure_optimizers(self) -> Any:
            optimizer = type(self).optimizer(self.parameters())
            optimizer.load_state_dict(torch.load(desk.folder / "a.ckpt", weights_only=False)["optimizer_states"][0])
            return optimizer

    module = Model()
    desk.trainer(callbacks=[saves(desk, filename="b")]).fit(module)
    desk.weights(module)
    desk.goes_on = True
    module = Model()  # the checkpoint's count, not those loaded by hand
    desk.trainer(max_epochs=3).fit(module, ckpt_path=desk.folder / "b.ckpt")
    desk.weights(module)


@program
def the_same_optimizer_and_a_checkpoint(desk: Desk) -> None:
    """The optimizer's own states do not count where a checkpoint gives others."""
    desk.goes_on = True
    module = Certain()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    module.configure_optimizers = lambda: optimizer
    desk.trainer(max_epochs=1, callbacks=[saves(desk, filename="a")]).fit(module)
    desk.trainer(max_epochs=3).fit(module, ckpt_path=desk.folder / "a.ckpt")
    desk.weights(module)


# -- schedules, stopping, logging ---------------------------------------------------------------------------------------


@program
def a_plateau(desk: Desk) -> None:
    class Model(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)
            schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", "name": "lr"},
            }

    module = Model()
    monitor = cb.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    desk.trainer(max_epochs=4, callbacks=[monitor]).fit(module)
    desk.weights(module)


@program
def one_cycle_with_momentum(desk: Desk) -> None:
    class Model(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Model()
    monitor = cb.LearningRateMonitor("step", log_momentum=True)
    desk.trainer(callbacks=[monitor, saves(desk, every_n_train_steps=5, save_top_k=-1)]).fit(module)
    desk.weights(module)


@program
def a_schedule_of_every_other_step(desk: Desk) -> None:
    class Model(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
            schedule = lr_scheduler.LinearLR(optimizer, total_iters=4)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2},
            }

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            desk.note("lr", scheduler.get_last_lr())
            scheduler.step()

    module = Model()
    desk.trainer(accumulate_grad_batches=2).fit(module)
    desk.weights(module)


@program
def stopping_by_a_training_metric(desk: Desk) -> None:
    stopping = cb.EarlyStopping("train_loss_epoch", patience=0, min_delta=0.2, check_on_train_epoch_end=True)
    module = Small()
    trainer = desk.trainer(max_epochs=10, callbacks=[stopping])
    trainer.fit(module)
    desk.note("stopped", trainer.current_epoch, trainer.global_step, stopping.state_dict())
    desk.weights(module)


@program
def stopping_before_the_least_steps(desk: Desk) -> None:
    class Model(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    module = Model()
    trainer = desk.trainer(min_steps=8, max_epochs=5, max_time="00:01:00:00")
    trainer.fit(module)
    desk.note("steps", trainer.global_step)
    desk.weights(module)


@program
def all_ways_of_logging(desk: Desk) -> None:
    class Model(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.score(batch)
            for reduce in ("mean", "min", "max", "sum"):
                self.log(reduce, loss, reduce_fx=reduce, on_step=False, on_epoch=True, prog_bar=True)
            self.log_dict({"both": loss, "number": 2}, on_step=True, on_epoch=True, batch_size=3)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("epochs", float(self.current_epoch))
            trainer = self.trainer
            desk.note("seen", trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)

    desk.trainer().fit(Model())


# -- loaders ------------------------------------------------------------------------------------------------------------


@program
def combined_loaders(desk: Desk) -> None:
    class Model(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.stack([self.score(part) for part in batch.values() if part is not None]).sum()
            self.log("loss", loss)
            return loss

    for mode in ("min_size", "max_size_cycle", "max_size"):
        module = Model()
        loaders = CombinedLoader({"a": data(8), "b": data(20, seed=9)}, mode)
        desk.trainer(max_epochs=1).fit(module, train_dataloaders=loaders)
        desk.weights(module)


@program
def overfitting_and_shuffling(desk: Desk) -> None:
    module = Small()
    desk.trainer(overfit_batches=0.5).fit(module, data(24, shuffle=True))
    desk.weights(module)
    desk.trainer(max_epochs=3).fit(module, data(24, shuffle=True))
    desk.weights(module)


@program
def limits_as_fractions(desk: Desk) -> None:
    module = Small()
    limits = {f"limit_{kind}_batches": 0.5 for kind in ("train", "val", "test", "predict")}
    trainer = desk.trainer(**limits, val_check_interval=0.34)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    desk.weights(module)


@program
def an_endless_loader(desk: Desk) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Tensor]:
            generator = torch.Generator().manual_seed(3)
            while True:
                yield torch.randn(4, WIDTH, generator=generator)

    loader = torch.utils.data.DataLoader(Endless(), batch_size=None)
    module = Small()
    desk.trainer(max_steps=5, max_epochs=-1, val_check_interval=2).fit(module, loader, data(16))
    desk.weights(module)


@program
def validation_across_epochs(desk: Desk) -> None:
    module = desk.watched(Small)()
    desk.trainer(max_epochs=4, limit_train_batches=3, check_val_every_n_epoch=None, val_check_interval=4).fit(module)
    desk.weights(module)


# -- modules ------------------------------------------------------------------------------------------------------------


@program
def modes_and_frozen_parts(desk: Desk) -> None:
    class Model(Small):
        def __init__(self) -> None:
            super().__init__()
            self.stem.requires_grad_(False)
            self.norm.eval()

        def configure_optimizers(self) -> Any:
            return type(self).optimizer([each for each in self.parameters() if each.requires_grad])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            desk.note("modes", [each.training for each in self.modules()])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            desk.note("modes", [each.training for each in self.modules()])

    module = Model()
    trainer = desk.trainer(val_check_interval=2)
    trainer.fit(module)
    desk.weights(module)
    desk.note("after", [each.training for each in module.modules()], [p.requires_grad for p in module.parameters()])
    module.stem.requires_grad_(True)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    desk.weights(module)


@program
def layers_that_setup_makes(desk: Desk) -> None:
    class Model(Small):
        def setup(self, stage: str) -> None:
            if not hasattr(self, "last"):
                self.last = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(super().forward(x))

    module = Model()
    trainer = desk.trainer()
    trainer.fit(module)
    trainer.test(module, verbose=False)
    desk.weights(module)


@program
def gradients_of_inputs_in_validation(desk: Desk) -> None:
    class Model(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                desk.note("gradient", torch.autograd.grad(self.score(x), x)[0])

    module = Model()
    desk.trainer(inference_mode=False).fit(module)
    desk.weights(module)


@program
def own_backward_and_clipping(desk: Desk) -> None:
    class Model(Small):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            desk.note("loss", loss)
            loss.backward(*args, **kwargs)

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")

    module = Model()
    desk.trainer().fit(module)
    desk.weights(module)


@program
def true_double_precision(desk: Desk) -> None:
    module = Small()
    trainer = desk.trainer(precision="64-true")
    trainer.fit(module)
    desk.weights(module)
    desk.note("dtypes", str(torch.get_default_dtype()), [str(p.dtype) for p in module.parameters()])
    desk.note("predictions", trainer.predict(module))


@program
def several_modules_and_fits(desk: Desk) -> None:
    trainer = desk.trainer(max_epochs=1)
    first, second = Small(), Small()
    trainer.fit(first)
    trainer.fit(second)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(first)
    trainer.validate(second, verbose=False)
    desk.note("steps", trainer.global_step)
    desk.weights(first)
    desk.weights(second)


@program
def runs_without_a_step(desk: Desk) -> None:
    module = Small()
    for options in ({"limit_train_batches": 0}, {"max_steps": 0}, {"max_epochs": 0}):
        desk.trainer(**options).fit(module)
    desk.weights(module)


# -- checkpoints --------------------------------------------------------------------------------------------------------


@program
def going_on_in_mid_epoch(desk: Desk) -> None:
    desk.goes_on = True
    desk.trainer(callbacks=[saves(desk, filename="{step}", every_n_train_steps=4, save_top_k=-1)]).fit(Certain())
    module = Certain()
    trainer = desk.trainer()
    trainer.fit(module, ckpt_path=desk.folder / "step=4.ckpt")
    desk.note("steps", trainer.global_step, trainer.current_epoch)
    desk.weights(module)


@program
def what_is_loaded_decides_the_optimizer(desk: Desk) -> None:
    """on_load_checkpoint comes before configure_optimizers, and may change parameters."""
    desk.goes_on = True

    class Model(Certain):
        lr = 0.1

        def __init__(self, words: int) -> None:
            super().__init__()
            self.words = nn.Embedding(words, WIDTH)

        def score(self, batch: Any) -> Tensor:
            return super().score(batch) + self.words.weight[0].sum() * 0.01

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.lr = 0.3
            self.words = nn.Embedding(*checkpoint["state_dict"]["words.weight"].shape)

        def configure_optimizers(self) -> Any:
            desk.note("lr", self.lr)
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, fused=True)

    desk.trainer(max_epochs=1, callbacks=[saves(desk, filename="a")]).fit(Model(7))
    module = Model(4)
    desk.trainer().fit(module, ckpt_path=desk.folder / "a.ckpt")
    desk.weights(module)
    desk.trainer().validate(Model(5), ckpt_path=desk.folder / "a.ckpt", verbose=False)


@program
def best_and_last(desk: Desk) -> None:
    best = saves(desk, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = desk.trainer(max_epochs=4, callbacks=[best])
    trainer.fit(Small())
    desk.note("best", best.best_model_path, best.best_model_score, best.best_k_models, best.last_model_path)
    desk.note(
        "measured", trainer.validate(ckpt_path="best", verbose=False), trainer.test(ckpt_path="last", verbose=False)
    )
    desk.note("predicted", trainer.predict(ckpt_path="best"))


@program
def callbacks_of_the_module_and_their_states(desk: Desk) -> None:
    desk.goes_on = True

    class Model(Certain):
        def configure_callbacks(self) -> Any:
            return [cb.EarlyStopping("val_loss", patience=5), saves(desk, monitor="val_loss", save_top_k=-1)]

    desk.trainer(enable_checkpointing=True).fit(Model())
    module = Model()
    trainer = desk.trainer(enable_checkpointing=True, max_epochs=4)
    trainer.fit(module, ckpt_path=desk.folder / "epoch=0-step=6.ckpt")
    desk.note("states", [each.state_dict() for each in trainer.callbacks])
    desk.weights(module)


@program
def plugins_that_write(desk: Desk) -> None:
    class Noting(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            desk.note("saving", path, storage_options)
            super().save_checkpoint(checkpoint, path, storage_options)

    module = Small()
    trainer = desk.trainer(plugins=[Noting()], max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(desk.folder / "a.ckpt")
    trainer.validate(module, ckpt_path=desk.folder / "a.ckpt", verbose=False)
    callback = saves(desk, every_n_train_steps=4, save_top_k=-1)
    desk.trainer(plugins=[AsyncCheckpointIO()], callbacks=[callback]).fit(module)


@program
def remote_files(desk: Desk) -> None:
    desk.goes_on = True
    trainer = desk.trainer(max_epochs=1)
    trainer.fit(Certain())
    trainer.save_checkpoint(f"memory://{desk.folder.parent.name}.ckpt")
    module = Certain()
    desk.trainer().fit(module, ckpt_path=f"memory://{desk.folder.parent.name}.ckpt")
    desk.weights(module)


@program
def restoring_between_runs(desk: Desk) -> None:
    module = Small()
    trainer = desk.trainer(max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(desk.folder / "a.ckpt")
    with torch.no_grad():
        module.stem.weight.zero_()
    trainer._checkpoint_connector.restore(desk.folder / "a.ckpt")
    desk.weights(module)
    desk.note("optimizer", trainer.optimizers[0].state_dict())


# -- callbacks and the tuner --------------------------------------------------------------------------------------------


@program
def averages(desk: Desk) -> None:
    for average in (cb.EMAWeightAveraging(decay=0.5), cb.StochasticWeightAveraging(0.01, swa_epoch_start=2)):
        module = Small()
        desk.trainer(max_epochs=3, callbacks=[average]).fit(module)
        desk.weights(module)


@program
def predictions_that_are_written(desk: Desk) -> None:
    class Writer(cb.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
            desk.note("batch", prediction, indices, *rest)

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            desk.note("epoch", predictions, indices)

    desk.note("returned", desk.trainer(callbacks=[Writer("batch_and_epoch")]).predict(Small()))


@program
def debugging_flags(desk: Desk) -> None:
    module = Small()
    trainer = desk.trainer(deterministic=True, detect_anomaly=True, profiler="simple", callbacks=[cb.ModelSummary(2)])
    trainer.fit(module)
    desk.trainer(fast_dev_run=2).fit(module)
    desk.weights(module)


@program
def found_batch_size_and_learning_rate(desk: Desk) -> None:
    desk.goes_on = True

    class Model(Certain):
        lr, batch_size = 0.1, 2

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, fused=True)

        def train_dataloader(self) -> Any:
            return data(64, batch_size=self.batch_size, drop_last=True)

    module = Model()
    trainer = desk.trainer(max_epochs=1)
    desk.note("size", Tuner(trainer).scale_batch_size(module, max_trials=2, mode="binsearch", steps_per_trial=1))
    found = Tuner(trainer).lr_find(module, num_training=8)
    desk.note("lr", found.results, module.lr)
    trainer.fit(module)
    desk.weights(module)


# Optimizer states outlive a run in RAM only.
@pytest.mark.diagonal
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("tier", ["ram", "lock_free_three_tiers"])
def test_everything_is_as_with_one_device(
    strategy_at: Callable[..., Any], tier: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "desk"
    here = os.getcwd()
    os.chdir(tmp_path)  # the tuner's files lie where it stands on some versions
    try:
        ours, theirs = journal_of(PROGRAMS[name], lambda: strategy_at(tier), folder), plainly(name)
    finally:
        os.chdir(here)
    difference = first_difference(ours, theirs)
    assert not difference, difference


def test_an_optimizer_whose_states_have_ended_is_refused(
    strategy_at: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer is refused: its moments were on disk, RAM had no room for them, and they are lost. With one device
    it would continue with them."""
    module = Small()
    little_ram(monkeypatch, module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    desk = Desk(lambda: strategy_at("masters_on_disk"), tmp_path)
    trainer = desk.trainer(max_epochs=1)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(UsageError, match="states of this AdamW were lost at the end of an earlier run"):
        trainer.fit(module)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.01)  # type: ignore[method-assign]
    trainer.fit(module)
    assert trainer.global_step == 12


def test_states_that_settings_have_no_pages_for_are_refused(strategy_at: Callable[..., Any], tmp_path: Path) -> None:
    module = Small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    trainer = Desk(lambda: strategy_at("ram"), tmp_path).trainer(max_epochs=1)
    trainer.fit(module)
    optimizer.param_groups[0]["momentum"] = 0
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(
        ConfigError, match="the SGD was given the states momentum_buffer, for which this run has no pages"
    ):
        trainer.fit(module)
