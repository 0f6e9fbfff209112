"""The check of batches in two halves: what it refuses, what it warns of, and which batches it computes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.trainer.halves_check import HalvesCheck
from lightning_ptm.trainer.two_batch_steps import rows_of

SAMPLES, TOKENS, WORDS = 4, 5, 8


class Module(L.LightningModule):
    """Its step is given; counts its calls in `calls`, which no check undoes."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WORDS, dtype=torch.float64)
        self.register_buffer("average", torch.zeros(WORDS, dtype=torch.float64))
        self.mean = MeanMetric()
        self.count, self.tokens, self.last = 0, 0, 0.0
        self.losses: list[float] = []
        self.compute = compute
        self._trainer: Any = SimpleNamespace(
            precision_plugin=SimpleNamespace(plan=SimpleNamespace(compute=torch.float64))
        )

    @property
    def trainer(self) -> Any:
        return self._trainer

    def log(self, *args: Any, **named: Any) -> None:
        raise AssertionError("the check logs")

    def training_step(self, batch: Tensor) -> Any:
        return self.compute(self, batch)


def loss_of(module: Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(module.table(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batch_of(seed: int = 5) -> Tensor:
    return torch.randint(1, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(seed))


class Checked:
    """A module's check, the number of computed parts, and its warnings."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        self.module = Module(compute)
        self.check = HalvesCheck(self.module, TensorGroup(2, 0))
        self.computed = 0
        self.warnings: list[str] = []

    def __call__(self, batch: Any, steps: int = 0) -> int | None:
        def step(part: Any) -> Any:
            self.computed += 1
            return self.module.training_step(part)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            half = len(batch) // 2
            alone = self.check.check(
                batch,
                (len(batch) - half, half),
                lambda batch, rows: rows_of(batch, len(batch), rows),
                step,
                nullcontext,
                steps,
            )
        self.warnings += [str(each.message) for each in caught]
        return alone


def with_state(change: Callable[[Module, Tensor], Any]) -> Callable[[Module, Tensor], Tensor]:
    def compute(module: Module, batch: Tensor) -> Tensor:
        change(module, batch)
        return loss_of(module, batch)

    return compute


def average(module: Module, batch: Tensor) -> None:
    module.average.mul_(0.9).add_(module.table(batch).mean((0, 1)), alpha=0.1)


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (
            with_state(average),
            "leaves another value in average than after the whole batch; change it in on_train_batch",
        ),
        (with_state(lambda module, batch: setattr(module, "count", module.count + 1)), "another value in count than"),
        (lambda module, batch: loss_of(module, batch) * len(batch), "a batch meet, the loss is a sum over samples, or"),
        (lambda module, batch: module.table(batch).mean((1, 2)).std(), "the mean of its halves' losses"),
    ],
)
def test_what_would_train_something_else_is_refused(compute: Any, words: str) -> None:
    checked = Checked(compute)
    with pytest.raises(ConfigError, match="would train something else than Module does with whole batches") as error:
        checked(batch_of())
    assert words in str(error.value)
    assert checked.module.count == 0 and not checked.module.average.any()


def with_term(term: Callable[[Tensor], Tensor]) -> Callable[[Module, Tensor], Tensor]:
    """A step with another term of its tokens' features, (samples, tokens - 1, width)."""
    return lambda module, batch: loss_of(module, batch) + term(module.table(batch[:, :-1]))


@pytest.mark.parametrize(
    "term",
    [
        lambda features: features.std() - features.std().detach(),
        lambda features: features.std() / features.std().detach(),
    ],
)
def test_a_term_that_is_the_same_for_each_batch_and_whose_gradient_combines_samples_is_refused(term: Any) -> None:
    with pytest.raises(
        ConfigError, match="with other values for the tensors that training_step detaches, the loss of a"
    ):
        Checked(with_term(term))(batch_of())


def test_detached_values_of_single_samples_are_no_reason_to_refuse() -> None:
    """A straight-through estimator, and a weight of each token that has no gradient."""

    def term(features: Tensor) -> Tensor:
        rounded = features + (features.round() - features).detach()
        return (rounded * features.softmax(-1).detach()).mean()

    checked = Checked(with_term(term))
    assert checked(batch_of()) is None and not checked.warnings
    assert checked.computed == 6  # the batch and its halves, twice


def test_what_halves_have_unequally_many_of_is_checked_once() -> None:
    """Combinations of several such values would be another kind of batch for a long time."""

    def compute(module: Module, batch: Tensor) -> Tensor:
        special = [batch == word for word in range(1, 7)]
        return loss_of(module, batch) + 0 * torch.stack(special).sum()

    checked = Checked(compute)
    for seed in range(200):
        checked(batch_of(seed), 2000)
    assert checked.computed <= 3 * 17  # the whole batch and its halves, for the first batch and for each of 16 counts


def test_losses_that_are_all_nan_are_equal() -> None:
    """As a plain Trainer, it goes on with batches of which nothing counts, and after a divergence."""
    checked = Checked(lambda module, batch: loss_of(module, batch) * torch.nan)
    assert checked(batch_of()) is None and not checked.warnings


def test_a_loss_that_depends_on_how_often_the_step_was_called_is_refused() -> None:
    def compute(module: Module, batch: Tensor) -> Tensor:
        module.last += 0.1
        return loss_of(module, batch) * (1 + module.last)

    with pytest.raises(ConfigError, match="or it depends on how often the step was called"):
        Checked(compute)(batch_of())


def test_what_adds_up_over_halves_is_accepted() -> None:
    def change(module: Module, batch: Tensor) -> None:
        module.tokens += batch.numel()
        module.mean.update(module.table(batch).mean())
        module.average += module.table(batch).sum((0, 1))

    checked = Checked(with_state(change))
    assert checked(batch_of()) is None and not checked.warnings
    assert checked.module.tokens == 0 and not checked.module.average.any()


def test_random_numbers_are_each_halfs_own_and_no_difference() -> None:
    def compute(module: Module, batch: Tensor) -> Tensor:
        times = torch.randint(0, 100, (len(batch),))
        noise = torch.randn(len(batch), dtype=torch.float64) * times * torch.rand(())
        return loss_of(module, batch) * (1 + random.random()) + noise.mean()

    assert Checked(compute)(batch_of()) is None


def test_other_attributes_give_one_warning_with_their_names() -> None:
    def change(module: Module, batch: Tensor) -> None:
        module.last = float(batch[-1, -1]) + 0.5
        module.losses.append(module.last)

    checked = Checked(with_state(change))
    for seed in (5, 6):
        checked(batch_of(seed), steps=seed)
    (told,) = checked.warnings
    assert "leaves other values in last, losses than" in told or "leaves other values in losses than" in told


def test_logs_and_results_that_are_no_means_give_a_warning_with_their_names() -> None:
    def compute(module: Any, batch: Tensor) -> dict[str, Tensor]:
        loss = loss_of(module, batch)
        module.log("loss", loss)
        module.log_dict({"rows": float(len(batch)), "added up": float(len(batch))}, reduce_fx="sum")
        module.log("spread", batch.double().std())
        return {"loss": loss, "count": torch.tensor(len(batch)), "of rows": batch.sum(1), "norm": batch.double().norm()}

    checked = Checked(compute)
    checked(batch_of())
    (told,) = checked.warnings
    assert told.startswith(
        "TensorParallel(overlap='two_batches'): self.log('spread'), the result 'norm': the mean of the "
    )


def test_a_result_without_rows_of_samples_is_refused() -> None:
    checked = Checked(lambda module, batch: {"loss": loss_of(module, batch), "table": module.table.weight.detach()})
    with pytest.raises(
        UsageError, match=r"'table' of shape \(8, 8\) for the whole batch, and its halves give \(16, 8\)"
    ):
        checked(batch_of())


def padded(module: Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(module.table(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=3)


def test_the_first_batch_with_unequally_many_tokens_gives_a_warning() -> None:
    even = batch_of().masked_fill_(batch_of() == 3, 4)
    uneven = even.clone()
    uneven[0, 2:] = 3
    checked = Checked(padded)
    checked(even)
    assert not checked.warnings
    checked(uneven, steps=10)
    assert "halves have unequally many of what the loss is a mean over" in checked.warnings[0]


@pytest.mark.parametrize("empty", [0, 1])
def test_a_half_without_any_target_does_not_train(empty: int) -> None:
    batch = batch_of().masked_fill_(batch_of() == 3, 4)
    checked = Checked(padded)
    assert checked(batch) is None
    batch[2 * empty : 2 * empty + 2, 1:] = 3
    for steps in (10, 11):
        assert checked(batch, steps) == 1 - empty


def test_it_comes_again_after_1_2_4_steps_and_with_batches_of_another_kind() -> None:
    checked = Checked(loss_of)
    found = []
    for steps in range(10):
        before = checked.computed
        checked(batch_of(), steps)
        found.append(checked.computed - before)
    assert found == [3, 3, 3, 0, 3, 0, 0, 0, 3, 0]
    checked(batch_of()[:3], 10)
    before = checked.computed
    checked(batch_of().int().long(), 11)
    assert checked.computed == before


def test_a_step_that_needs_gradients_is_refused_in_words() -> None:
    def compute(module: Module, batch: Tensor) -> Tensor:
        loss = loss_of(module, batch)
        torch.autograd.grad(loss, module.table.weight)
        return loss

    with pytest.raises(ConfigError, match=r"was tried without gradients on a batch, .* raised RuntimeError"):
        Checked(compute)(batch_of())


def test_a_step_that_skips_the_batch_is_not_compared() -> None:
    assert Checked(lambda module, batch: None)(batch_of()) is None
