"""Lightning's small print: arguments of hooks, plugins' options, what resumes, what is counted; as with a plain Trainer."""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from lightning.pytorch import callbacks as cb
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import CheckpointError, ConfigError

HOMES = ["ram", "all_on_disk", "lock_free"]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        loss = self.blocks(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.blocks(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(12, 16, generator=torch.Generator().manual_seed(1)), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(4, 16, generator=torch.Generator().manual_seed(2)), batch_size=2)


def net(kind: type[L.LightningModule] = Net, *arguments: Any) -> Any:
    torch.manual_seed(0)
    return kind(*arguments)


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    chosen = {
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": any(isinstance(each, cb.Checkpoint) for each in options.get("callbacks", ())),
        **options,
    }
    return quiet_trainer(strategy, **chosen)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# -- hooks ----------------------------------------------------------------------------------------------------------------

_HOOKS = sorted(
    {name for owner in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(owner) if not name.startswith("_")}
    - {"configure_sharded_model"}  # deprecated; may not be overridden together with configure_model
    | {"configure_optimizers", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward"}
    | {
        "configure_gradient_clipping",
        "zero_grad",
        "load_state_dict",
        "training_step",
        "validation_step",
        "train",
        "eval",
    }
    | {"configure_callbacks", "toggle_optimizer", "untoggle_optimizer", "manual_backward"}
)


def _told(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"_LightningOptimizer": "LightningOptimizer"}.get(type(value).__name__, type(value).__name__)


def recording(base: type[L.LightningModule], calls: list[Any]) -> type[L.LightningModule]:
    """`base`, each of whose hooks notes its own arguments."""

    def noting(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, tuple(map(_told, args)), {key: _told(value) for key, value in kwargs.items()}))
            return getattr(super(kind, self), name)(*args, **kwargs)

        return hook

    kind = type("Recording", (base,), {name: noting(name) for name in _HOOKS if hasattr(base, name)})
    return kind


def hooks_of(strategy: Any, folder: Path, **options: Any) -> list[Any]:
    calls: list[Any] = []
    kind = recording(Net, calls)
    saves = cb.ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1)
    first = trainer(strategy(), callbacks=[saves], **options)
    first.fit(net(kind))
    first.validate(net(kind), verbose=False)
    trainer(strategy(), callbacks=[saves], **options).fit(net(kind), ckpt_path=folder / "epoch=0-step=3.ckpt")
    return calls


@pytest.mark.diagonal
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["plainly", "clipped_sums"]
)
def test_hooks_get_exactly_lightnings_arguments(strategy_at: Any, home: str, options: Any, tmp_path: Path) -> None:
    ours = hooks_of(lambda: strategy_at(home), tmp_path / "ours", **options)
    theirs = hooks_of(lambda: "auto", tmp_path / "theirs", **options)
    # What moves a module to its device, and the weights' own business: pages do it, so a user's override is not asked.
    quiet = {"load_state_dict"}
    assert [call for call in ours if call[0] not in quiet] == [call for call in theirs if call[0] not in quiet]
    assert [call[0] for call in ours].count("load_state_dict") == [call[0] for call in theirs].count("load_state_dict")


class Strictly(Net):
    """Overrides what Lightning calls, with no more arguments than Lightning gives."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()

    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["again"] = {name: value.clone() for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize("home", HOMES)
def test_overrides_without_optional_arguments_work(strategy_at: Any, home: str, tmp_path: Path) -> None:
    module, plain = net(Strictly), net(Strictly)
    run = trainer(strategy_at(home), callbacks=[cb.ModelCheckpoint(dirpath=tmp_path / "ours")])
    run.fit(module)
    trainer("auto", callbacks=[cb.ModelCheckpoint(dirpath=tmp_path / "theirs")]).fit(plain)
    same(weights(module), weights(plain))
    (ours,), (theirs,) = ((tmp_path / name).glob("*.ckpt") for name in ("ours", "theirs"))
    states = [torch.load(path, weights_only=False)["state_dict"] for path in (ours, theirs)]
    same(dict(states[0]), dict(states[1]))


# -- checkpoint plugins ---------------------------------------------------------------------------------------------------


class Noting(TorchCheckpointIO):
    """A user's own; writes folders if asked to."""

    def __init__(self, folders: bool = False) -> None:
        super().__init__()
        self.folders = folders
        self.calls: list[Any] = []

    def _file(self, path: Any) -> Path:
        return Path(path) / "everything.pt" if self.folders else Path(path)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", Path(path).name, storage_options))
        super().save_checkpoint(checkpoint, self._file(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("load", Path(path).name, args, kwargs))
        return super().load_checkpoint(self._file(path), *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name))
        super().remove_checkpoint(path)


def with_own_io(strategy: Any, folder: Path, folders: bool) -> Any:
    plugin = Noting(folders)
    saves = cb.ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=1, filename="{step}")
    run = trainer(strategy, plugins=[plugin], callbacks=[saves])
    run.fit(module := net())
    run.save_checkpoint(folder / "after.ckpt", weights_only=True, storage_options={"speed": 3})
    run.validate(module, ckpt_path=folder / "after.ckpt", verbose=False, weights_only=False)
    run.fit(net(), ckpt_path=folder / "step=12.ckpt", weights_only=False)
    return plugin.calls, weights(module)


@pytest.mark.diagonal
@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
@pytest.mark.parametrize("home", HOMES)
def test_a_users_checkpoint_io_is_asked_as_lightning_asks_it(
    strategy_at: Any, home: str, folders: bool, tmp_path: Path
) -> None:
    ours = with_own_io(strategy_at(home), tmp_path / "ours", folders)
    theirs = with_own_io("auto", tmp_path / "theirs", folders)
    assert ours[0] == theirs[0]
    same(ours[1], theirs[1])


def test_storage_options_without_a_plugin_that_knows_them_are_refused_as_lightning_does(
    strategy_at: Any, tmp_path: Path
) -> None:
    for strategy, expected in (
        ("auto", (TypeError, "storage_options")),
        (strategy_at("ram"), (TypeError, "storage_options")),
        (strategy_at("ram", checkpoints={"state_dict_type": "sharded"}), (ConfigError, "storage_options")),
    ):
        run = trainer(strategy, max_steps=1)
        run.fit(net())
        with pytest.raises(expected[0], match=expected[1]):
            run.save_checkpoint(tmp_path / "x.ckpt", storage_options={"a": 1})


# -- what resumes ---------------------------------------------------------------------------------------------------------


class Opaque:
    """Object that torch.load takes for code."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


class Stateful(cb.Callback):
    def __init__(self) -> None:
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"thing": Opaque()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["thing"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_callbacks_states_load_with_weights_only_as_asked(strategy_at: Any, kind: str, tmp_path: Path) -> None:
    saves = cb.ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer(strategy_at("ram", checkpoints={"state_dict_type": kind}), callbacks=[saves, Stateful()]).fit(net())
    for weights_only in (None, True):
        with pytest.raises(CheckpointError, match="weights_only=False"):
            trainer(strategy_at("ram"), callbacks=[Stateful()]).fit(
                net(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=weights_only
            )
    callback = Stateful()
    trainer(strategy_at("ram"), callbacks=[callback]).fit(net(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=False)
    assert callback.loaded == Opaque()


class Looks(Net):
    """Looks at its optimizer's state when training starts."""

    def on_train_start(self) -> None:
        self.found = copy.deepcopy(self.trainer.optimizers[0].state_dict())
        self.by_parameter = copy.deepcopy([self.trainer.optimizers[0].state[p] for p in self.parameters()])


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("home", HOMES)
def test_optimizer_state_is_visible_after_a_resume(strategy_at: Any, home: str, kind: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    saves = cb.ModelCheckpoint(dirpath=plain, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer("auto", callbacks=[saves]).fit(net())
    ours = cb.ModelCheckpoint(dirpath=tmp_path / "ours", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer(strategy_at(home, checkpoints={"state_dict_type": kind}), callbacks=[ours]).fit(net())
    judge, module = net(Looks), net(Looks)
    trainer("auto").fit(judge, ckpt_path=plain / "step=6.ckpt")
    run = trainer(strategy_at(home))
    run.fit(module, ckpt_path=tmp_path / "ours" / "step=6.ckpt")
    same(module.found["state"], judge.found["state"])
    same(module.by_parameter, judge.by_parameter)
    assert module.found["param_groups"] == judge.found["param_groups"]
    same(weights(module), weights(judge))
    assert run.global_step == 12


class Schedule:
    """A scheduler of one's own, of no class of torch's, with a state of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self, metric: Any = None) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Loader:
    """A loader that knows where it stood."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        batches = [torch.randn(2, 16, generator=generator) for _ in range(6)]
        while self.place < 6:
            self.place += 1
            yield batches[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Resuming(Net):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.told.append((self.global_step, batch_idx, self.trainer.current_epoch, float(loss)))
        return loss

    def train_dataloader(self) -> Any:
        return Loader()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Schedule(optimizer), "interval": "step"}}


RESUMED = {
    "a timer": lambda: [cb.Timer(timedelta(hours=1))],
    "stochastic averaging": lambda: [cb.StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
    "early stopping": lambda: [cb.EarlyStopping("val_loss", patience=1)],
    "accumulation that changes": lambda: [cb.GradientAccumulationScheduler({0: 1, 1: 3})],
}


def resumed(strategy: Callable[[], Any], folder: Path, callbacks: str) -> Any:
    def saves() -> cb.ModelCheckpoint:
        return cb.ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)

    first = trainer(strategy(), callbacks=[saves(), *RESUMED[callbacks]()], max_epochs=3)
    first.fit(net(Resuming))
    module = net(Resuming)
    second = trainer(strategy(), callbacks=[saves(), *RESUMED[callbacks]()], max_epochs=3)
    second.fit(module, ckpt_path=folder / "step=4.ckpt", weights_only=False)
    timers = [each.time_elapsed() > 0 for each in second.callbacks if isinstance(each, cb.Timer)]  # type: ignore[attr-defined]
    loops = second.fit_loop.state_dict()
    return first.global_step, second.global_step, module.told, weights(module), timers, loops


@pytest.mark.diagonal
@pytest.mark.parametrize("callbacks", RESUMED)
@pytest.mark.parametrize("home", HOMES)
def test_runs_resume_in_mid_epoch_to_the_same_step(strategy_at: Any, home: str, callbacks: str, tmp_path: Path) -> None:
    ours = resumed(lambda: strategy_at(home), tmp_path / "ours", callbacks)
    theirs = resumed(lambda: "auto", tmp_path / "theirs", callbacks)
    assert ours[:3] == theirs[:3]
    same(ours[3], theirs[3])
    assert ours[4:] == theirs[4:]


# -- closures -------------------------------------------------------------------------------------------------------------


class NoStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class NoClosure(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step()


@pytest.mark.parametrize("kind", [NoStep, NoClosure])
@pytest.mark.parametrize("home", HOMES)
def test_a_closure_that_is_never_called_raises_as_lightning_does(strategy_at: Any, home: str, kind: Any) -> None:
    for strategy in ("auto", strategy_at(home)):
        with pytest.raises(MisconfigurationException, match="The closure hasn't been executed"):
            trainer(strategy).fit(net(kind))


class CallsItFirst(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


@pytest.mark.parametrize("home", HOMES)
def test_a_closure_may_be_called_by_the_user(strategy_at: Any, home: str) -> None:
    module, plain = net(CallsItFirst), net(CallsItFirst)
    trainer(strategy_at(home)).fit(module)
    trainer("auto").fit(plain)
    same(weights(module), weights(plain))


# -- what is counted ------------------------------------------------------------------------------------------------------


def counted(strategy: Any, folder: Path) -> Counter[str]:
    profiler = SimpleProfiler(dirpath=folder, filename="profile")
    trainer(strategy, profiler=profiler, max_epochs=1).fit(net())
    names = (name.replace("AngelPTMStrategy", "Strategy") for name in profiler.recorded_durations)
    counts = [len(durations) for durations in profiler.recorded_durations.values()]
    found = Counter(dict(zip(names, counts, strict=True)))
    return Counter({name.replace("SingleDeviceStrategy", "Strategy"): count for name, count in found.items()})


@pytest.mark.parametrize("home", HOMES)
def test_a_profiler_counts_what_it_counts_plainly(strategy_at: Any, home: str, tmp_path: Path) -> None:
    assert counted(strategy_at(home), tmp_path) == counted("auto", tmp_path)


def throughput(strategy: Any) -> list[Any]:
    """Returns what the monitor logs, with a clock that ticks each time that Lightning reads it."""
    monitor = cb.ThroughputMonitor(batch_size_fn=len, length_fn=lambda batch: 16 * len(batch), window_size=2)
    logger = mock.Mock(save_dir=None, log_dir=None)
    run = trainer(strategy, callbacks=[monitor], logger=[logger], log_every_n_steps=1, max_epochs=1)
    ticks = iter(range(10_000))
    with mock.patch("time.perf_counter", lambda: float(next(ticks))):
        run.fit(net())
    rows = [call.kwargs["metrics"] for call in logger.log_metrics.mock_calls]
    return [row for row in rows if any(name.startswith("train/") for name in row)]


@pytest.mark.parametrize("home", HOMES)
def test_a_patched_clock_is_lightnings_alone_and_throughput_is_counted(strategy_at: Any, home: str) -> None:
    ours, theirs = throughput(strategy_at(home)), throughput("auto")
    assert ours == theirs and len(ours) == 6
    assert [row["train/samples"] for row in ours] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("name", ["perf_counter", "monotonic", "time", "time_ns", "perf_counter_ns", "monotonic_ns"])
def test_nothing_of_ours_reads_a_patched_clock(strategy_at: Any, name: str) -> None:
    ours, clock = [], getattr(time, name)

    def watched() -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("lightning_ptm"):
            ours.append(caller)
        return clock()

    with mock.patch(f"time.{name}", watched):
        trainer(strategy_at("lock_free"), max_epochs=1).fit(net())
    assert ours == []
