"""`parallel="auto"`: what one rank and two choose, that all have the same, and runs that cannot be planned before set-up."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.harness import End, run_ranks, watch_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ptm.commands import run_choice
from lightning_ptm.commands.choice import SIZES
from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Eight texts of random tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 97, (8, 17), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index][:-1], self.tokens[index][1:]


class Stream(IterableDataset[Tensor]):
    """Data whose shapes are unknown before it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


AUTO = {"parallel": "auto"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A rank's settings after a fit, the first line of the run, the first weight and all of them."""

    settings: dict[str, Any]
    said: str
    weight: Tensor
    weights: dict[str, Tensor]
    next_number: float


class Losing(GPT):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__(vocab_size=97, width=32, layers=2, heads=2, sequence_length=16)


def fit(ranks: int, settings: dict[str, Any], stream: bool = False, precision: Any = "32-true") -> Outcome:
    """One rank's part: trains two steps."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    torch.manual_seed(0)
    module = Losing()
    strategy = strategy_with(page_size="64KiB", **settings)
    data: Any = Stream() if stream else Texts()
    trainer = quiet_trainer(strategy, devices=ranks, max_steps=2, precision=precision)
    trainer.fit(module, DataLoader(data, batch_size=2))
    names = (*SIZES, "recompute", "offload_activations", "micro_batches", "pipeline_schedule")
    first = next((line for line in said if "keeps" in line), "")
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    return Outcome(
        {name: getattr(strategy.settings, name) for name in names},
        first,
        next(iter(weights.values())),
        weights,
        float(torch.rand(())),
    )


def test_one_rank_keeps_its_numbers_and_says_what_it_chose() -> None:
    (chosen,) = run_ranks(fit, 1, 1, AUTO)
    (plain,) = run_ranks(fit, 1, 1, {})
    assert re.search(
        r"; parallel='auto' chose .* \(one rank\): \S+ s a step predicted, \d+ of \d+ candidates", chosen.said
    )
    assert torch.equal(chosen.weight, plain.weight) and chosen.next_number == plain.next_number
    assert all(chosen.settings[size] == 1 for size in SIZES)


@pytest.mark.slow
def test_a_size_of_the_user_stays() -> None:
    first, second = run_ranks(fit, 2, 2, {**AUTO, "tensor_parallel_size": 2, "recompute": "all"}, limit_s=300)
    assert first.settings == second.settings
    assert first.settings["tensor_parallel_size"] == 2 and first.settings["recompute"] == "all"
    assert "(tensor 2)" in first.said


def test_two_ranks_train_as_with_the_sizes_that_rank_0_chose() -> None:
    free = run_ranks(fit, 2, 2, AUTO, limit_s=300)
    assert free[0].settings == free[1].settings and "parallel='auto' chose" in free[0].said
    same = run_ranks(fit, 2, 2, free[0].settings)
    assert torch.equal(free[0].weight, same[0].weight) and free[0].next_number == same[0].next_number


_ABSENT = ("device_memory_bytes_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s")
MACHINE: dict[str, Any] = {
    **dict.fromkeys(_ABSENT),
    "device": "cpu",
    "device_memory": 0,
    "disk_memory": 0,
    "host_memory": "8GiB",
    "cpu_cores": 2,
    "compute_flops_per_s": {"float32": 1e11, "float64": 1e11},
    "compute_efficiency": 0.8,
    "host_memory_bytes_per_s": 1e10,
    "update_bytes_per_s": 1e10,
    "intra_node_bytes_per_s": 1e6,
    "tensor_exchange_bytes_per_s": 1e9,
}
"""Two ranks between which weights and gradients go so slowly that no run should shard them."""


def fit_on(machine: dict[str, Any], settings: dict[str, Any], precision: Any = "32-true") -> Outcome:
    """One rank's part, as if its machine had been measured so."""
    kept, text = run_choice.measured, yaml.safe_dump({**machine, "ranks_per_node": 2})
    run_choice.measured = lambda paths, launch: text if launch is None or launch.rank == 0 else None
    try:
        return fit(2, settings, precision=precision)
    finally:
        run_choice.measured = kept


@pytest.mark.slow
def test_ranks_with_slow_links_divide_layers_and_train_as_if_told_so() -> None:
    found = run_ranks(fit_on, 2, MACHINE, AUTO, limit_s=300)
    assert found[0].settings == found[1].settings
    sizes = {name: found[0].settings[name] for name in SIZES}
    assert sizes == {**dict.fromkeys(SIZES, 1), "tensor_parallel_size": 2}
    same = run_ranks(fit, 2, 2, found[0].settings)
    for ours, theirs in zip(found, same, strict=True):
        assert torch.equal(ours.weight, theirs.weight) and ours.next_number == theirs.next_number


def test_ranks_whose_sums_are_slow_too_train_in_stages_as_one_rank_does() -> None:
    # Hidden states of two texts are 4 kB, the weights 120 kB, and each sum of activations takes 50 ms.
    machine = {**MACHINE, "tensor_exchange_s": 0.05}
    found = run_ranks(fit_on, 2, machine, AUTO, "64-true", limit_s=300)
    assert found[0].settings == found[1].settings
    sizes = {name: found[0].settings[name] for name in SIZES}
    assert sizes == {**dict.fromkeys(SIZES, 1), "pipeline_parallel_size": 2}
    assert found[0].settings["micro_batches"] == 2 and "parallel='auto' chose" in found[0].said
    same = run_ranks(fit, 2, 2, found[0].settings, False, "64-true")
    for ours, theirs in zip(found, same, strict=True):
        assert torch.equal(ours.weight, theirs.weight) and ours.next_number == theirs.next_number
    (whole,) = run_ranks(fit, 1, 1, {}, False, "64-true")  # the same batches: stages share them
    for each in found:
        assert each.weights.keys() == whole.weights.keys()
        for name, value in whole.weights.items():
            torch.testing.assert_close(each.weights[name], value, rtol=0, atol=1e-9, msg=name)


def test_data_without_shapes_are_refused_on_all_ranks() -> None:
    outcomes = watch_ranks(fit, 2, 2, AUTO, True)
    assert [each.end for each in outcomes] == [End.RAISED, End.RAISED]
    said = "shapes of a batch of Stream are unknown then; give a DataLoader of a data set"
    assert all(said in each.error for each in outcomes)


def test_a_module_that_has_its_own_loaders_is_refused() -> None:
    class Own(Losing):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Texts())

    with pytest.raises(ConfigError, match=r"the shapes of a batch of Own are unknown then; give a DataLoader"):
        quiet_trainer(strategy_with(parallel="auto"), max_steps=1).fit(Own())


def test_a_module_that_reads_values_is_refused_with_its_reason_and_the_remedy() -> None:
    class Reading(Losing):
        def loss(self, batch: Any) -> Tensor:
            loss: Tensor = super().loss(batch)
            return loss if loss.item() < 1e9 else 2 * loss

    strategy = strategy_with(parallel="auto")
    said = r"Reading cannot be planned: none of \d+ candidates .*Tensor.item\(\) cannot.*; leave parallel out, and give"
    with pytest.raises(ConfigError, match=said):
        quiet_trainer(strategy, max_steps=1).fit(Reading(), DataLoader(Texts(), batch_size=2))


def test_an_evaluation_chooses_nothing() -> None:
    strategy = strategy_with(parallel="auto")
    quiet_trainer(strategy).validate(Losing(), DataLoader(Texts(), batch_size=2))
    assert strategy.settings == dataclasses.replace(strategy_with().settings, parallel="auto")


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel='data': use 'none' or 'auto'$"):
        strategy_with(parallel="data")
