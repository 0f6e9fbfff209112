"""Comparison of a program with Lightning's own strategy and with this one, in everything that a user can see.

A program is a function of a `Desk`: it makes Trainers with `desk.trainer`, watches modules with `desk.watch`, and notes
whatever else it wants compared. The desk's journal then holds, in order: every hook of watched modules, callbacks and
data modules with its arguments, what was logged, what entry points returned, warnings of Lightning that the program asked
for, and at the end the checkpoints on disk and the states of the random generators.

I1: a tensor is compared to the last bit, dtype and shape included; an object of Lightning or torch by its class only.
I2: what ours adds to a checkpoint (random states, the precision plugin's name) is the only thing left out of it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Program = Callable[["Desk"], Any]
_NOT_HOOKS = {
    "optimizers",
    "log",
    "log_dict",
    "lr_schedulers",
    "all_gather",
    "print",
    "load_from_checkpoint",
    "zero_grad",
}
_NOT_HOOKS |= {"configure_sharded_model"}  # the old name of configure_model, which Lightning refuses beside it
_OURS = {"random_states", "AngelPTMPrecision"}


@dataclasses.dataclass(frozen=True)
class Bits:
    """A tensor's type, shape and bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        flat = torch.frombuffer(bytearray(self.data), dtype=self.dtype) if self.data else torch.empty(0)
        return f"Bits({self.dtype}, {self.shape}, {flat[:4].tolist()}...)"


def frozen(value: Any, folder: str = "\0") -> Any:
    """Returns the comparable part of a value; later changes to the value do not reach it."""
    if isinstance(value, nn.Parameter):
        return f"<Parameter {tuple(value.shape)}>"
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return Bits(plain.dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    if value is None or isinstance(value, bool | int | float | bytes):
        return repr(value)
    if isinstance(value, str | Path):
        return str(value).replace(folder, "<folder>")
    if isinstance(value, LightningOptimizer):
        return f"<Lightning {type(value.optimizer).__name__}>"
    if isinstance(value, Mapping):
        return {frozen(key, folder): frozen(item, folder) for key, item in value.items() if key not in _OURS}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(frozen(item, folder) for item in value)]
    if isinstance(value, set | frozenset):
        return sorted(str(frozen(item, folder)) for item in value)
    return f"<{type(value).__name__}>"


class _Log(Logger):
    """Notes what it is told to log."""

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__()
        self._note = note

    @property
    def name(self) -> str:
        return "log"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._note("logged", metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._note("hyperparameters", args, kwargs)

    def finalize(self, status: str) -> None:
        self._note("finalized", status)


class Desk:
    """Tools of a program; see the file's contract.

    Args:
        strategy: makes what each Trainer gets.
        folder: of its own; the default root of its Trainers.
    """

    def __init__(self, strategy: Callable[[], Strategy | str], folder: Path) -> None:
        self.folder = folder
        self.journal: list[Any] = []
        self.goes_on = False
        """Set by a program that resumes: our run then has the checkpoint's random numbers, Lightning's others."""
        self._strategy = strategy

    def note(self, name: str, *values: Any) -> None:
        """Adds a line to the journal."""
        self.journal.append((name, *(frozen(value, str(self.folder)) for value in values)))

    def trainer(self, **options: Any) -> L.Trainer:
        """A quiet Trainer on one CPU whose logger is the journal."""
        chosen = {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": self._strategy(),
            "default_root_dir": self.folder,
            "logger": _Log(self.note),
            "log_every_n_steps": 1,
            "max_epochs": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(
                isinstance(each, L.pytorch.callbacks.Checkpoint) for each in options.get("callbacks", ())
            ),
        }
        return L.Trainer(**{**chosen, **options})

    def weights(self, module: nn.Module, name: str = "weights") -> None:
        """Notes all weights and buffers."""
        self.note(name, {key: value.detach().clone() for key, value in module.state_dict().items()})

    def watched(self, kind: type, **fixed: Any) -> type:
        """A subclass of a LightningModule, DataModule or Callback that overrides every hook: notes it and goes on."""
        base = next(b for b in (L.LightningModule, L.LightningDataModule, L.Callback) if issubclass(kind, b))
        names = {name for name, _ in getmembers(base, isfunction) if not name.startswith("_")} - _NOT_HOOKS
        if base is L.LightningModule:
            names -= {name for name, _ in getmembers(nn.Module, isfunction)} - {"forward", "zero_grad", "train"}

        def noting(name: str) -> Callable[..., Any]:
            original = getattr(kind, name)

            def hook(this: Any, *args: Any, **kwargs: Any) -> Any:
                self.note(f"{base.__name__}.{name}", args, kwargs)
                result = original(this, *args, **kwargs)
                if not isinstance(result, type(this)):
                    self.note(f"{base.__name__}.{name} returns", result)
                return result

            hook.__name__ = name
            return hook

        return type(kind.__name__, (kind,), {**{name: noting(name) for name in sorted(names)}, **fixed})

    def finish(self) -> list[Any]:
        """The journal with what is left on disk, and the random generators."""
        for path in sorted(self.folder.rglob("*")):
            if path.suffix == ".ckpt" and path.is_file():
                self.note("checkpoint", path, torch.load(path, weights_only=False))
            elif path.is_file():
                self.note("file", path)
        if not self.goes_on:
            self.note("random numbers", torch.rand(2), random.random())
        return self.journal


def journal_of(program: Program, strategy: Callable[[], Strategy | str], folder: Path) -> list[Any]:
    """Runs a program; an exception that it lets out is its journal's last line."""
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    random.seed(1)
    desk = Desk(strategy, folder)
    try:
        result = program(desk)
        if result is not None:
            desk.note("result", result)
    except Exception as error:
        desk.note("raised", type(error).__name__, str(error))
        desk.journal.append(error)
    return desk.finish()


def first_difference(ours: list[Any], theirs: list[Any]) -> str:
    """Where two journals part, with the lines before; empty if they do not."""
    ours, theirs = (
        [e for e in ours if not isinstance(e, Exception)],
        [e for e in theirs if not isinstance(e, Exception)],
    )
    for index in range(max(len(ours), len(theirs))):
        mine = ours[index] if index < len(ours) else "nothing more"
        plain = theirs[index] if index < len(theirs) else "nothing more"
        if mine != plain:
            before = "\n".join(f"    {line}"[:300] for line in theirs[max(0, index - 4) : index])
            return f"line {index}\n{before}\nours:  {_where(mine, plain)}\nplain: {_where(plain, mine)}"
    return ""


def _where(mine: Any, other: Any, path: str = "") -> str:
    if isinstance(mine, dict) and isinstance(other, dict):
        for key in mine.keys() | other.keys():
            if key not in mine:
                return f"{path}: no {key}"
            if key not in other:
                return f"{path}.{key}: {mine[key]!r}"[:1500]
            if mine[key] != other[key]:
                return _where(mine[key], other[key], f"{path}.{key}")
        return f"{path}: keys in another order: {list(mine)}"
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple) and len(mine) == len(other):
        for place, (a, b) in enumerate(zip(mine, other, strict=True)):
            if a != b:
                return _where(a, b, f"{path}[{place}]" if path or place else f"{mine[0]}")
    return f"{path} {mine!r}"[:1500]


# -- a small model ----------------------------------------------------------------------------------------------------

WIDTH = 8


class Small(L.LightningModule):
    """Linear, dropout, BatchNorm, linear; logs; SGD with momentum and a schedule of steps."""

    optimizer: Callable[..., torch.optim.Optimizer] = staticmethod(
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)
    )

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.drop(torch.relu(self.stem(x)))))

    def score(self, batch: Any) -> Tensor:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        return self(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.score(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.score(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.score(batch)
        self.log("test_loss", loss)
        return {"y": loss}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = type(self).optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return data(24)

    def val_dataloader(self) -> Any:
        return data(8, seed=2)

    def test_dataloader(self) -> Any:
        return data(8, seed=3)

    def predict_dataloader(self) -> Any:
        return data(8, seed=4)


def data(count: int, *, seed: int = 1, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """A loader of `count` vectors."""
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x), batch_size=batch_size, **options)
