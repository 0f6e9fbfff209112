"""GPTs on grids of ranks: on threads of this process, and trained by processes through GridStrategy."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from kit.fits import quiet_trainer
from kit.memory import LEAST, LeastMemoryStrategy, strategy_with
from kit.ranks.tensor_models import VOCABULARY, Losses
from kit.ranks.training import PLACES
from kit.settings import merged
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.models import GPT
from lightning_ptm.parallel.grid import Grid, whole
from lightning_ptm.planning.mesh import GridShape
from lightning_ptm.trainer.grid import GridStrategy

STEPS, LENGTH = 8, 16

FILE = Path(__file__).parents[3] / "examples" / "grid_gpt.py"


def example() -> Any:
    """Returns the module of the example."""
    spec = importlib.util.spec_from_file_location("grid_gpt_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class GridRun:
    """How ranks train a GPT.

    Attributes:
        mode: of GridStrategy; "": one rank trains lightning_ptm.models.GPT.
        saved_at: the step after which to save half.ckpt, and to stop.
        resumes: whether to resume from that.
    """

    mode: str = ""
    ranks: int = 1
    tier: str = "ram"
    precision: str = "64-true"
    steps: int = STEPS
    batch: int = 8
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: bool = False
    saved_at: int | None = None
    resumes: bool = False


@dataclasses.dataclass(frozen=True)
class GridOutcome:
    """Result of a training on one rank.

    Attributes:
        weights: blocks of this rank.
        state_bytes: of all model states at home on this rank.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    state_bytes: int


class LeastGridStrategy(GridStrategy, LeastMemoryStrategy):
    """GridStrategy with as many pages of device memory as the plan needs."""


class _States(L.Callback):
    """Counts bytes of model states."""

    bytes = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.bytes = sum(each.bytes for each in trainer.strategy.states_at_home())  # type: ignore[attr-defined]


class _SaveAndStop(L.Callback):
    """Saves a checkpoint after a step, and ends training."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def strategy_of(how: GridRun, disk: Path) -> AngelPTMStrategy:
    """Returns the strategy of a run."""
    base = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": str(disk), "timeout": timedelta(seconds=60)}
    chosen = merged(base, PLACES[how.tier], how.settings)
    if not how.mode:
        return strategy_with(**chosen)
    if chosen.get("device_memory") == LEAST:
        return LeastGridStrategy(how.mode, **{**chosen, "device_memory": "64MiB"})  # type: ignore[arg-type]
    return GridStrategy(how.mode, **chosen)  # type: ignore[arg-type]


def train(how: GridRun, disk: Path) -> GridOutcome:
    """One rank's part."""
    os.environ.setdefault("RANK", "0")
    torch.manual_seed(0)
    kind = type("Model", (Losses, example().GridGPT if how.mode else GPT), {})
    module = kind(
        vocab_size=VOCABULARY, width=32, layers=2, heads=4, sequence_length=LENGTH, warmup_steps=2, meta=how.meta
    )
    texts = torch.randint(
        0, VOCABULARY, (how.steps // 2 * how.batch, LENGTH + 1), generator=torch.Generator().manual_seed(5)
    )
    data: Any = [(text[:-1], text[1:]) for text in texts]
    strategy, states = strategy_of(how, disk), _States()
    trainer = quiet_trainer(
        strategy,
        devices=how.ranks,
        precision=how.precision,
        use_distributed_sampler=False,  # it would shuffle
        callbacks=[states, *([] if how.saved_at is None else [_SaveAndStop(how.saved_at, disk / "half.ckpt")])],
        **{"max_steps": how.steps, "gradient_clip_val": 0.3, **how.trainer},
    )
    grids = how.ranks // strategy.settings.tensor_parallel_size
    place = int(os.environ["RANK"]) // strategy.settings.tensor_parallel_size
    sampler: Any = DistributedSampler(data, grids, place, shuffle=False)
    loader: Any = DataLoader(data, how.batch // grids, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=disk / "half.ckpt" if how.resumes else None)
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    return GridOutcome(vars(module)["losses"], weights, states.bytes)


def wholes(shape: GridShape, of_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns whole tensors of the ranks' blocks."""
    kind = type("Model", (example().GridGPT,), {"grid": Grid(shape, 0, {})})
    module = kind(vocab_size=VOCABULARY, width=32, layers=2, heads=4, sequence_length=LENGTH, meta=True)
    module.configure_model()
    return whole(module, {name: torch.cat([each[name] for each in of_ranks]) for name in of_ranks[0]})
