"""Batches in two halves: how a batch is cut, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.trainer.two_batch_steps import TwoBatchSteps, halves_of, refuse_module, rows_of, samples_of


@pytest.mark.parametrize(("samples", "halves"), [(2, (1, 1)), (5, (3, 2)), (8, (4, 4))])
def test_a_batch_is_cut_into_two_halves(samples: int, halves: tuple[int, int]) -> None:
    assert halves_of(samples) == halves


def test_all_that_has_a_row_for_each_sample_is_cut() -> None:
    batch = {
        "tokens": torch.arange(8).view(4, 2),
        "names": ["a", "b", "c", "d"],
        "texts": ("a", "b", "c", "d"),
        "pair": ("of", "words"),
        "nested": [torch.arange(4), (torch.arange(4) + 10,)],
        "positions": torch.zeros(1, 2),
        "scale": torch.tensor(3.0),
        "length": 2,
    }
    assert samples_of(batch) == 4
    part = rows_of(batch, 4, slice(1, 3))
    assert part["tokens"].tolist() == [[2, 3], [4, 5]]
    assert part["names"] == ["b", "c"] and part["texts"] == ("b", "c") and part["pair"] == ("of", "words")
    assert samples_of([torch.zeros(1, 2), torch.zeros(4)]) == 4
    assert part["nested"][0].tolist() == [1, 2] and part["nested"][1][0].tolist() == [11, 12]
    assert part["positions"].shape == (1, 2) and part["scale"] == 3 and part["length"] == 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": "a", "scale": torch.tensor(1.0)}, r"this batch \(dict\) has no tensor with a dimension"),
        ([torch.zeros(4, 2), torch.zeros(3, 2)], r"tensors of 4 and of 3 rows \(shape \(3, 2\)\)"),
    ],
)
def test_a_batch_without_two_halves_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rows_of(batch, halves_of(samples_of(batch))[0] * 2, slice(0, 1))


class Module(L.LightningModule):
    def __init__(self, *layers: nn.Module, automatic: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.automatic_optimization = automatic


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Module(automatic=False),
            "the Module uses manual optimization, and one backward pass has to follow both halves",
        ),
        (
            Module(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            r"layers\.1 is a BatchNorm1d, whose statistics would be those of half",
        ),
    ],
)
def test_a_module_whose_samples_meet_or_with_manual_optimization_is_refused(module: Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_module(module)


def test_a_compiled_module_is_refused() -> None:
    module = Module(nn.Linear(2, 2))
    module.layers[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"layers\.0 is compiled by torch\.compile"):
        refuse_module(module)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": {"overlap": "two_batches"}}, "with tensor_parallel_size=1: there is no group of ranks"),
        ({"tensor_parallel": {"overlap": "three"}}, r"overlap='three'\): use 'none' or 'two_batches'"),
        (
            {"tensor_parallel": {"overlap": "two_batches", "sequence_parallel": True}},
            "overlap='two_batches', sequence_parallel=True.: one half of a batch computes during all-reduces of the other",
        ),
        (
            {"tensor_parallel": {"overlap": "two_batches"}, "context_parallel_size": 2},
            "context_parallel_size=2 with Tensor",
        ),
        (
            {"tensor_parallel": {"overlap": "two_batches"}, "expert_parallel_size": 2},
            "expert_parallel_size=2 with Tensor",
        ),
    ],
)
def test_settings_that_exclude_halves_are_refused(settings: dict[str, Any], message: str) -> None:
    size = {} if "=1" in message else {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=message):
        AngelPTMStrategy(**settings, **size)


# -- what halves return and log ---------------------------------------------------------------------------------------


class Steps(Module):
    """Logs and returns what `results` gives for a half, by the number of the half's first row."""

    def __init__(self, results: Any, logs: Any) -> None:
        super().__init__()
        self.results, self.logs = results, logs
        self.logged: list[tuple[str, float]] = []
        self._trainer = SimpleNamespace(
            precision_plugin=SimpleNamespace(train_step_context=lambda: torch.enable_grad())
        )  # type: ignore[assignment]

    @property
    def trainer(self) -> Any:
        return self._trainer

    def log(self, name: str, value: Any, **named: Any) -> None:  # type: ignore[override]
        self.logged.append((name, float(value)))

    def training_step(self, batch: Tensor) -> Any:
        first = int(batch[0])
        for name, value in self.logs(first).items():
            self.log(name, value)
        return self.results(first)


def step(results: Any, logs: Any = lambda first: {}, rows: int = 4) -> tuple[Any, list[tuple[str, float]]]:
    module = Steps(results, logs)
    engine: Any = SimpleNamespace(hooks=SimpleNamespace(half_step=nullcontext))
    steps = TwoBatchSteps(lambda mode: nullcontext(), module, TensorGroup(2, 0), engine, CpuBackend())
    return steps.train(module.training_step, torch.arange(rows)), module.logged


def loss(value: float) -> Tensor:
    return torch.tensor(float(value), requires_grad=True) * 1


def test_the_loss_is_the_mean_over_samples() -> None:
    assert float(step(lambda first: loss(first))[0].detach()) == 1.0  # of 0 and 2
    # Of 0 three times, of 3 twice.
    assert float(step(lambda first: loss(first), rows=5)[0].detach()) == pytest.approx(3 * 2 / 5)


def test_values_are_logged_once_as_means() -> None:
    found, logged = step(
        lambda first: {"loss": loss(1.0), "rows": torch.tensor([first])}, lambda first: {"at": float(first)}
    )
    assert logged == [("at", 1.0)]
    assert found["rows"].tolist() == [0, 2]


def test_counts_are_added() -> None:
    found, _ = step(lambda first: {"loss": loss(1.0), "rows": torch.tensor(2), "mean": torch.tensor(float(first))})
    assert int(found["rows"]) == 4 and float(found["mean"]) == 1.0


def test_a_batch_of_one_sample_is_computed_as_a_whole() -> None:
    with pytest.warns(UserWarning, match="a batch has 1 sample, so it is computed as a whole, and its sums block"):
        found, logged = step(lambda first: loss(3.0), lambda first: {"at": float(first)}, rows=1)
    assert float(found.detach()) == 3.0 and logged == [("at", 0.0)]


def test_a_batch_may_be_skipped_as_a_whole() -> None:
    assert step(lambda first: None)[0] is None


@pytest.mark.parametrize(
    ("results", "logs", "message"),
    [
        (
            lambda first: loss(1.0) if first else None,
            lambda first: {},
            "returned None for one half of a batch and a loss",
        ),
        (lambda first: {"loss": loss(1.0), "name": "a"}, lambda first: {}, "returned 'name' of type str"),
        (
            lambda first: {"loss": loss(1.0), "rows": torch.zeros(2, 3 + first)},
            lambda first: {},
            r"'rows' of shapes \(2, 3\) and \(2, 5\) for the halves of a batch, which cannot be concatenated",
        ),
        (
            lambda first: {"loss": loss(1.0)} if first else {"loss": loss(1.0), "more": loss(1.0)},
            lambda first: {},
            r"returned \['loss', 'more'\] for one half of a batch and \['loss'\] for the other",
        ),
        (lambda first: loss(1.0), lambda first: {"a": 1.0} if first else {}, r"logged \[\] and the other one \['a'\]"),
    ],
)
def test_halves_that_do_not_make_a_whole_are_refused(results: Any, logs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        step(results, logs)


def test_a_metric_whose_step_would_be_that_of_a_half_is_refused() -> None:
    from torchmetrics import MeanMetric

    metric = MeanMetric()
    with pytest.raises(UsageError, match=r"self\.log\('mean', a MeanMetric\) would log the second half's value"):
        step(lambda first: loss(1.0), lambda first: {"mean": metric})
