"""Buffers of modules on two ranks: rank 0's, as under Lightning's own DDP."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.training import TIMEOUT_S, make_strategy
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import RankError


class Normed(L.LightningModule):
    """Ranks register other features, see other data, and turn their codebook towards it.

    Attributes:
        ignored: names of buffers that are each rank's own.
    """

    def __init__(self, rank: int, ignored: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(8, 8)
        self.register_buffer("features", torch.full((8,), rank + 1.0), persistent=False)
        self.register_buffer("codebook", torch.zeros(8))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.int64))
        self.register_buffer("whether", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("seen", torch.zeros(()))
        # What is written in ways that torch does not count as a change.
        self.register_buffer("data_", torch.zeros(8))
        self.register_buffer("assigned", torch.zeros(8))
        self.register_buffer("by_numpy", torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("turned", torch.ones(3, dtype=torch.complex64).conj())
        self.uncounted = nn.BatchNorm1d(8)
        self.uncounted.num_batches_tracked = None
        if ignored:
            self._ddp_params_and_buffers_to_ignore = [*ignored]
        self.rank = rank

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        hidden = self.first(self.norm(batch[0] * self.features)) - self.codebook
        with torch.no_grad():
            self.codebook += 0.1 * hidden.mean(0) if self.training else 0
            self.whether[self.rank] = True
        self.replaced = self.replaced + self.rank + 1
        if self.training:
            mean = hidden.detach().mean(0)
            self.data_.data.lerp_(mean, 0.5)
            self.assigned.data = self.assigned.data + mean
            self.by_numpy.numpy()[:] += mean.numpy()
        hidden = nn.functional.batch_norm(hidden, self.mean, self.var, training=self.training)
        hidden = self.uncounted(hidden) + self.data_ + self.assigned + self.by_numpy + self.turned.real.sum()
        return hidden.square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", self.loss_of(batch), sync_dist=True)
        self.seen += self.rank + 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any, module: Normed, accumulate: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains; returns what the run logged, and its weights and buffers."""
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(2)) + torch.arange(40)[:, None] % 2
    options = {"max_epochs": 2, "val_check_interval": 2, "accumulate_grad_batches": accumulate}
    trainer = quiet_trainer(strategy, devices=2, **options)
    loader = DataLoader(TensorDataset(data), batch_size=4)
    trainer.fit(module, loader, loader)
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return dict(trainer.callback_metrics), {name: value.detach().clone() for name, value in values.items()}


def both(folder: Path, tier: str, ignored: tuple[str, ...] = (), accumulate: int = 1) -> list[Any]:
    ddp = DDPStrategy(timeout=timedelta(seconds=TIMEOUT_S))
    ours = make_strategy(folder, tier)
    return [trained(strategy, Normed(_rank(), ignored), accumulate) for strategy in (ddp, ours)]


def _rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize(
    ("tier", "accumulate"),
    [("ram", 3), *(pytest.param(tier, 1, marks=pytest.mark.slow) for tier in ("ram", "all_on_disk"))],
)
def test_they_are_those_of_ddp(tier: str, accumulate: int, tmp_path: Path) -> None:
    for theirs, ours in run_ranks(both, 2, tmp_path, tier, (), accumulate, limit_s=120.0):
        for expected, values in zip(theirs, ours, strict=True):
            assert expected.keys() == values.keys()
            for name, value in expected.items():
                torch.testing.assert_close(values[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_some_may_be_each_rank_s_own(tmp_path: Path) -> None:
    for rank, (theirs, ours) in enumerate(run_ranks(both, 2, tmp_path, "ram", ("features", "seen"), limit_s=120.0)):
        assert torch.equal(theirs[1]["features"], torch.full((8,), rank + 1.0))
        assert torch.equal(ours[1]["features"], theirs[1]["features"])
        assert torch.equal(ours[1]["seen"], theirs[1]["seen"])
        torch.testing.assert_close(ours[1]["norm.running_mean"], theirs[1]["norm.running_mean"])


class OtherSize(Normed):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("memory", torch.zeros(rank + 1))


def other_sizes(folder: Path) -> str:
    with pytest.raises(RankError) as raised:
        trained(make_strategy(folder, "ram"), OtherSize(_rank()))
    return str(raised.value)


def test_other_sizes_are_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(other_sizes, 2, tmp_path, limit_s=120.0)
    assert first.startswith("ranks have different buffers of modules, so rank 0's cannot be copied when a step begins")
    assert "(here OtherSize.memory: torch.float32 [2], which rank 0 has not)" in second


class FilledWhereItStarts(Normed):
    """Ranks fill a buffer when they have been set up."""

    def fill(self) -> None:
        self.seen.fill_(self.rank + 5)

    on_validation_start = on_predict_start = fill

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.seen.clone()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.held = self.seen.item()


def evaluated(folder: Path) -> list[Any]:
    found: list[Any] = []
    for strategy in (DDPStrategy(timeout=timedelta(seconds=TIMEOUT_S)), make_strategy(folder, "ram")):
        module = FilledWhereItStarts(_rank())
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **quiet)
        loader = DataLoader(TensorDataset(torch.zeros(4, 8)), batch_size=1)
        trainer.validate(module, loader, verbose=False)
        rows = trainer.predict(module, loader)
        found.append([module.held, [row.item() for row in rows or ()]])
    return found


def test_outside_of_training_what_ranks_fill_is_their_own(tmp_path: Path) -> None:
    for rank, (theirs, ours) in enumerate(run_ranks(evaluated, 2, tmp_path, limit_s=120.0)):
        assert theirs == ours == [rank + 5, [rank + 5] * 2]


class ByHand(Normed):
    """Optimizes by hand, now and then behind a step.

    Attributes:
        behind: a backward pass follows each second step.
        saves_up: gradients of each second step are reduced with those of the next.
    """

    def __init__(self, rank: int, *, behind: bool, saves_up: bool) -> None:
        super().__init__(rank)
        self.automatic_optimization = False
        self.behind, self.saves_up = behind, saves_up

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = self.loss_of(batch)
        with self.trainer.strategy.block_backward_sync() if self.saves_up and index % 2 == 0 else nullcontext():
            self.manual_backward(loss)
        if not self.saves_up or index % 2:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        self.log("loss", loss.detach(), sync_dist=True)
        return loss.detach()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.behind and self.trainer.global_step % 2:
            self.manual_backward(self.first(torch.ones(1, 8)).square().mean())
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]


def train_manually(folder: Path, behind: bool, saves_up: bool) -> list[Any]:
    ddp = DDPStrategy(timeout=timedelta(seconds=TIMEOUT_S), find_unused_parameters=behind)
    strategies = (ddp, make_strategy(folder, "ram"))
    return [trained(each, ByHand(_rank(), behind=behind, saves_up=saves_up)) for each in strategies]


@pytest.mark.parametrize(
    ("behind", "saves_up"), [pytest.param(False, False, marks=pytest.mark.slow), (False, True), (True, False)]
)
def test_under_manual_optimization_too_they_are_those_of_ddp(behind: bool, saves_up: bool, tmp_path: Path) -> None:
    """Buffers under manual optimization are those of DDP: each rank keeps its own during training, except after a
    backward pass outside of steps."""
    results = run_ranks(train_manually, 2, tmp_path, behind, saves_up, limit_s=120.0)
    for theirs, ours in results:
        for expected, values in zip(theirs, ours, strict=True):
            assert expected.keys() == values.keys()
            for name, value in expected.items():
                torch.testing.assert_close(values[name], value, msg=lambda text, name=name: f"{name}: {text}")
    (first, _), (second, _) = results
    assert behind or not torch.equal(first[1]["codebook"], second[1]["codebook"])
