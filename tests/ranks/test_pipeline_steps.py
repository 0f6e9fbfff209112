"""Pipeline stages: what surrounds a step is as with one rank (its number, random states, metrics, batches of other ranks)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.harness import run_ranks
from kit.ranks.pipeline_models import BATCH, LENGTH, StagedGPT, StagedOutcome, StagedRun, assert_same, train
from kit.ranks.tensor_models import STEPS, VOCABULARY
from kit.ranks.training import PLACES
from kit.settings import merged
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_ptm.trainer.stage_check import StageCheck


class Unnumbered(StagedGPT):
    """Lightning gives its steps no number of the batch."""

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


def train_unnumbered(how: StagedRun, disk: Path) -> StagedOutcome:
    return train(how, disk, model=Unnumbered)


def test_steps_that_get_no_number_accumulate(disk: Path) -> None:
    trainer = {"accumulate_grad_batches": 2, "max_steps": 3}
    (whole,) = run_ranks(train_unnumbered, 1, StagedRun(trainer=trainer), disk)
    assert_same(run_ranks(train_unnumbered, 2, StagedRun(2, 2, trainer=trainer), disk), whole)


class Watched(StagedGPT):
    """Records whether the random state is the same where a batch and where its training begins."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.same: list[bool] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.began = torch.get_rng_state()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if len(self.same) == batch_idx:  # the schedule's, before it draws
            self.same.append(torch.equal(self.began, torch.get_rng_state()))
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


def random_states_stay(disk: Path) -> list[bool]:
    made: list[Watched] = []

    def model(**sizes: Any) -> Watched:
        made.append(Watched(**sizes))
        return made[0]

    train(StagedRun(2, 2, steps=3), disk, model=model)  # type: ignore[arg-type]
    return made[0].same


def test_checks_of_stages_draw_no_random_numbers_of_the_run(disk: Path) -> None:
    """A run that goes on with a checkpoint checks other steps than one without a break."""
    assert run_ranks(random_states_stay, 2, disk) == [[True] * 3] * 2


class CountsTokens(StagedGPT):
    """Its step updates a metric before the first block."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.tokens = SumMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.tokens.update(batch.numel())
        self.log("tokens", self.tokens, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def count_tokens(how: StagedRun, disk: Path) -> float:
    return train(how, disk, model=CountsTokens).metrics["tokens"]


@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("breadth_first", marks=pytest.mark.slow)])
def test_a_micro_batch_counts_once_where_stages_have_several_runs_of_blocks(schedule: str, disk: Path) -> None:
    assert run_ranks(count_tokens, 2, StagedRun(2, 2, schedule=schedule), disk) == [STEPS * BATCH * LENGTH] * 2


def steps_of_unequal_batches() -> int:
    torch.manual_seed(0)
    samples = 8 if int(os.environ["RANK"]) % 2 else 4  # micro-batches of two samples, and of one
    rows = torch.randint(3, VOCABULARY, (2 * samples, LENGTH), generator=torch.Generator().manual_seed(5))
    strategy = strategy_with(pipeline_parallel_size=2, micro_batches=4)
    trainer = quiet_trainer(strategy, devices=4, use_distributed_sampler=False, max_epochs=1)
    trainer.fit(StagedGPT(), DataLoader(rows, samples))  # type: ignore[arg-type]
    return trainer.global_step


def test_ranks_with_other_batches_may_have_other_numbers_of_samples() -> None:
    assert run_ranks(steps_of_unequal_batches, 4) == [2] * 4


class Validated(StagedGPT):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.log("val", self.loss(batch), sync_dist=True)


def train_on_uneven_batches(stages: int, disk: Path) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    """An odd number of batches of other sizes and lengths; two are one step, and the model is validated after each."""
    os.environ.setdefault("RANK", "0")
    torch.manual_seed(0)
    module, numbers = Validated(), torch.Generator().manual_seed(5)
    batches, rest = (
        [torch.randint(3, VOCABULARY, shape, generator=numbers) for shape in shapes]
        for shapes in (((8, 17), (4, 9), (8, 17), (12, 5), (4, 11)), ((8, 17), (3, 17)))
    )
    given: dict[str, Any] = {"pipeline_parallel_size": stages, "micro_batches": 4} if stages > 1 else {}
    trainer = quiet_trainer(
        strategy_with(**merged({"page_size": "64KiB", "disk_path": str(disk)}, given, PLACES["tight"])),
        devices=stages,
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=1,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(rest, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == 6
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    return vars(module)["losses"], weights, {name: float(each) for name, each in trainer.callback_metrics.items()}


def test_batches_of_other_sizes_accumulate_and_the_model_is_validated_in_between(disk: Path) -> None:
    ((losses, weights, metrics),) = run_ranks(train_on_uneven_batches, 1, 1, disk)
    for ours in run_ranks(train_on_uneven_batches, 2, 2, disk):
        assert ours[0] == pytest.approx(losses, abs=1e-12) and ours[2] == pytest.approx(metrics, abs=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(ours[1][name], value, rtol=0, atol=1e-9, msg=name)


class Unfreezes(StagedGPT):
    """A block of each stage, and the head, begin to train after three steps, for which pages are laid out again."""

    def build(self) -> None:
        super().build()
        self.late = [self.blocks[0], self.blocks[3], self.head]
        self.set_training(on=False)

    def set_training(self, *, on: bool) -> None:
        for module in self.late:
            module.requires_grad_(on)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:
            self.set_training(on=True)


def train_unfreezing(how: StagedRun, disk: Path) -> tuple[StagedOutcome, list[int]]:
    """Returns the steps before which stages were compared, too."""
    checked: list[int] = []
    check = StageCheck.check

    def recorded(self: StageCheck, compute: Any, steps: int) -> None:
        checked.append(steps)
        check(self, compute, steps)

    with patch.object(StageCheck, "check", recorded):
        return train(how, disk, model=Unfreezes), checked


@pytest.mark.slow
def test_a_re_layout_changes_no_numbers_and_repeats_no_check(disk: Path) -> None:
    ((whole, _),) = run_ranks(train_unfreezing, 1, StagedRun(steps=6), disk)
    found = run_ranks(train_unfreezing, 2, StagedRun(2, 2, steps=6, schedule="interleaved"), disk)
    assert_same([outcome for outcome, _ in found], whole)
    assert [steps for _, steps in found] == [[0, 1, 2, 4]] * 2
