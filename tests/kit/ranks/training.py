"""Comparison of a data-parallel training by the strategy on several ranks with a plain PyTorch loop in one process.

The plain side goes through the ranks' batches one after the other and averages their gradients as the communicator
promises: in rank order, in fp32, rounded once, zeros for a rank that has none. It knows nothing of the strategy.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from kit.fits import quiet_trainer
from kit.memory import LEAST, strategy_with
from kit.outcomes import Outcome
from kit.products import products_of
from kit.ranks.models import VOCABULARY, Tower
from kit.settings import merged
from lightning_ptm import AngelPTMStrategy

BATCH = 4
TIMEOUT_S = 60

TIERS: dict[str, dict[str, Any]] = {
    "ram": {},
    "masters_on_disk": {"offload_optimizer": "disk"},
    "all_on_disk": {"offload_optimizer": "disk", "offload_parameters": "disk"},
    "three_tiers": {
        "device_memory": "2MiB",
        "host_memory": "64MiB",
        "offload_parameters": "host",
        "offload_optimizer": "disk",
    },
    "lock_free": {"lock_free": {"max_staleness": 0}},
}
"""Where model states live, as settings of the strategy."""
PLACES = {**TIERS, "tight": {"device_memory": LEAST, "offload_parameters": "disk", "offload_optimizer": "disk"}}
"""Settings of all tiers, and of everything on disk with the least device memory that the plan takes."""


def tiers_together(*quick: str) -> pytest.MarkDecorator:
    """Each tier once, some in one start of ranks; those that are not named are slow."""
    together = [["ram", "all_on_disk"], ["masters_on_disk", "lock_free"], ["three_tiers", "tight"]]
    marks = [() if "+".join(tiers) in quick else pytest.mark.slow for tiers in together]
    cases = [pytest.param(tiers, marks=mark) for tiers, mark in zip(together, marks, strict=True)]
    return pytest.mark.parametrize("tiers", cases, ids=lambda tiers: "+".join(tiers))


TIERS_TOGETHER = tiers_together("ram+all_on_disk", "masters_on_disk+lock_free", "three_tiers+tight")
"""All of them are quick."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A training, run in both ways.

    Attributes:
        batches: micro-batches of each rank.
        reduce_once: each rank adds its micro-batches' gradients up before they are averaged.
    """

    build: Callable[[], Tower]
    precision: str = "32-true"
    batches: int = 4
    accumulate: int = 1
    clip: float | None = None
    reduce_once: bool = False


def tokens(training: Training, world_size: int, seed: int = 1) -> Tensor:
    """Rows of token ids: `batches` batches of BATCH rows for each of `world_size` ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (training.batches * world_size * BATCH, 17), generator=generator)


def loader(rows: Tensor, world_size: int, batch_size: int = BATCH) -> DataLoader[Any]:
    """Batches of this rank, which has the rows rank, rank + world_size, ... in order."""
    rank = int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(rows, world_size, rank, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(rows, batch_size=batch_size, sampler=sampler)  # type: ignore[arg-type]


# -- the strategy's side ----------------------------------------------------------------------------------------------


def make_strategy(folder: Path | str, tier: str = "ram", **settings: Any) -> AngelPTMStrategy:
    """Returns a strategy with the smallest pages, poisoned when they are released."""
    base = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": str(folder)}
    chosen = merged(base, PLACES[tier], settings)
    return strategy_with(timeout=timedelta(seconds=TIMEOUT_S), **chosen)


def make_trainer(training: Training, strategy: AngelPTMStrategy, world_size: int, **options: Any) -> L.Trainer:
    """A quiet Trainer."""
    chosen: dict[str, Any] = {
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "use_distributed_sampler": False,  # it would shuffle
        "accumulate_grad_batches": training.accumulate,
        "gradient_clip_val": training.clip,
    }
    return quiet_trainer(strategy, devices=world_size, precision=training.precision, **{**chosen, **options})


def outcome_of(module: Tower) -> Outcome:
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return Outcome(module.losses, weights, module.validation_losses)


def fit(training: Training, world_size: int, folder: Path | str, tier: str = "ram", **settings: Any) -> Outcome:
    """One rank's part of a training; call it on all of them."""
    torch.manual_seed(0)
    module = training.build()
    trainer = make_trainer(training, make_strategy(folder, tier, **settings), world_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*`training_step` returned `None`.*")
        trainer.fit(module, loader(tokens(training, world_size), world_size))
    assert list(Path(folder).iterdir()) == []
    return outcome_of(module)


def fit_in_all_tiers(
    training: Training, world_size: int, folder: Path | str, settings: dict[str, Any], tiers: Sequence[str]
) -> dict[str, Outcome]:
    """One rank's part of the same training with model states in different tiers, one after the other."""
    return {tier: fit(training, world_size, folder, tier, **settings) for tier in tiers}


# -- the plain side ---------------------------------------------------------------------------------------------------


class PlainRanks:
    """Data parallelism over `world_size` imaginary ranks.

    Attributes:
        masters: the precise parameters, by name.
    """

    def __init__(self, training: Training, world_size: int) -> None:
        torch.manual_seed(0)
        self.training = training
        self.world_size = world_size
        self.module = training.build()
        self.mixed = training.precision == "bf16-mixed"
        if training.precision == "64-true":
            self.module.double()
        self.optimizer = self.module.configure_optimizers()
        self.masters = {
            name: parameter.detach().clone().requires_grad_() if self.mixed else parameter
            for name, parameter in self.module.named_parameters()
        }
        if self.mixed:
            self.optimizer.param_groups[0]["params"] = list(self.masters.values())
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        self.losses: list[list[Tensor]] = [[] for _ in range(world_size)]

    def run(self, rows: Tensor, *, before_step: Callable[[int, PlainRanks], None] | None = None) -> list[Outcome]:
        """Trains; returns the outcome of each imaginary rank."""

        def nothing() -> list[list[Tensor | None]]:
            return [[None for _ in self.masters] for _ in range(self.world_size)]

        waiting = nothing()
        so_far: list[Tensor | None] = [None for _ in self.masters]
        for step in range(self.training.batches):
            if before_step is not None:
                before_step(step, self)
            gradients = [self._gradients(rows, rank, step) for rank in range(self.world_size)]
            if self.training.reduce_once:
                waiting = [
                    [self._sum(pair) for pair in zip(*both, strict=True)]
                    for both in zip(waiting, gradients, strict=True)
                ]
                if (step + 1) % self.training.accumulate:
                    continue
                gradients, waiting = [self._rounded(sums) for sums in waiting], nothing()
            means = [self._mean([of_rank[index] for of_rank in gradients]) for index in range(len(self.masters))]
            so_far = [self._sum(pair) for pair in zip(so_far, means, strict=True)]
            if (step + 1) % self.training.accumulate == 0:
                self._update(so_far)
                so_far = [None for _ in self.masters]
        weights = {name: master.detach().clone() for name, master in self.masters.items()}
        return [Outcome(losses, weights) for losses in self.losses]

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def publish(self) -> None:
        """Brings the masters' values to the parameters that compute."""
        with torch.no_grad():
            for parameter, master in zip(self.module.parameters(), self.masters.values(), strict=True):
                if parameter is not master:
                    parameter.copy_(master)

    def _gradients(self, rows: Tensor, rank: int, step: int) -> list[Tensor | None]:
        batch = rows[rank :: self.world_size][step * BATCH : (step + 1) * BATCH]
        with products_of(self.training.precision):
            with torch.autocast("cpu", torch.bfloat16) if self.mixed else nullcontext():
                loss = self.module.loss(batch, rank, step)
            if loss is not None:
                self.losses[rank].append(loss.detach().clone())
                (loss / self.training.accumulate if self.training.accumulate > 1 else loss).backward()
        gradients = [parameter.grad for parameter in self.module.parameters()]
        for parameter in self.module.parameters():
            parameter.grad = None
        return gradients

    def _mean(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        some = next((gradient for gradient in gradients if gradient is not None), None)
        if some is None:
            return None
        total = torch.zeros_like(some, dtype=torch.promote_types(some.dtype, torch.float32))
        for gradient in gradients:
            if gradient is not None:
                total += gradient
        return (total / self.world_size).to(some.dtype)

    def _update(self, gradients: Sequence[Tensor | None]) -> None:
        for master, gradient in zip(self.masters.values(), gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        if self.training.clip is not None:
            self.clip(list(self.masters.values()), self.training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()

    def _sum(self, pair: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
        """Adds two gradients in fp32, as masters' gradients are."""
        before, new = (part.float() if self.mixed and part is not None else part for part in pair)
        return new if before is None else before if new is None else before + new

    def _rounded(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Rounds sums as ranks reduce them."""
        return [part.bfloat16() if self.mixed and part is not None else part for part in sums]


class ClippedInFp64(PlainRanks):
    """Sums the squares of a norm in fp64, as several ranks do (docs/design/gradient_norms.md); torch does in fp32."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        norm = torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt().to(gradients[0].dtype)
        assert norm > max_norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def fit_whole_batches(training: Training, folder: Path, world_size: int) -> Outcome:
    """One rank's training with the batches of `world_size`."""
    rows = loader(tokens(training, world_size), 1, BATCH * world_size)
    torch.manual_seed(0)
    module = training.build()
    make_trainer(training, make_strategy(folder), 1).fit(module, rows)
    return outcome_of(module)


def plain(training: Training, world_size: int) -> list[Outcome]:
    """The outcome on each rank of the plain loop."""
    return PlainRanks(training, world_size).run(tokens(training, world_size))


expected = cache(plain)
"""The plain loop's outcome, computed once for all tests of a process."""
