"""Values that must be equal on ranks: losses in a tensor group, and what optimizers update with on all ranks.

If they differ, all ranks raise, with the values of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import End, RankOutcome, run_ranks, watch_ranks
from kit.ranks.tensor_blocks import Blocks, rows, trainer_of
from torch import Tensor
from torch.utils.data import DataLoader


def rank() -> int:
    return int(os.environ["RANK"])


class Lossy(Blocks):
    """Computes the loss with a number of the rank's own, from the second batch on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not batch_idx or rank() % 2 == 0:
            return loss
        changed: dict[str, Callable[[Tensor], Tensor]] = {
            "scaled": lambda loss: loss * 1.05,
            "with a penalty": lambda loss: loss + 0.05,
            "of another sign": lambda loss: -loss,
            "nan": lambda loss: loss * float("nan"),
            "half": lambda loss: loss / 2,
            "rounded": lambda loss: loss * (1 + 1e-6),
        }
        return changed[self.kind](loss)


def fit(module: Callable[[], Blocks], ranks: int, tensor: int, settings: Any) -> list[float]:
    torch.manual_seed(0)
    built = module()
    trainer_of(ranks, tensor, settings).fit(built, DataLoader(rows(16), 2))  # type: ignore[arg-type]
    return built.losses


def fit_lossy(kind: str, ranks: int, settings: Any) -> list[float]:
    return fit(lambda: Lossy(kind), ranks, 2, settings)


def assert_all_told(found: list[RankOutcome], *texts: str) -> None:
    for each in found:
        assert each.end is End.RAISED, each
        for text in texts:
            assert text in each.error, each.error


ON_DISK = {"offload_parameters": "disk", "offload_optimizer": "disk"}


@pytest.mark.parametrize("kind", ["scaled", "with a penalty", "of another sign", "nan", "half"])
def test_losses_of_a_tensor_group_that_differ_are_told(kind: str, disk: Path) -> None:
    settings = {**ON_DISK, "disk_path": str(disk)} if kind == "half" else {}
    found = watch_ranks(fit_lossy, 2, kind, 2, settings)
    assert_all_told(
        found, "ranks of a tensor group compute one loss, and theirs differ", "the loss in tensor group 0 is "
    )
    assert_all_told(found, " on rank 0, ", " on rank 1")


def test_losses_that_differ_by_rounding_are_not() -> None:
    assert len(run_ranks(fit_lossy, 2, "rounded", 2, {})[0]) == 8


@pytest.mark.slow
def test_losses_of_other_groups_may_differ() -> None:
    assert len(run_ranks(fit_of_its_group, 4)[0]) == 4


class OfItsGroup(Blocks):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + rank() // 2)


def fit_of_its_group() -> list[float]:
    return fit(OfItsGroup, 4, 2, {})


class Tuned(Blocks):
    """Changes what an optimizer updates with on one rank, behind the first batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "from the start":
            return torch.optim.AdamW(self.parameters(), lr=1e-2 * (1 + rank()))
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        if rank() == 1 and batch_idx == 0 and self.kind != "from the start":
            group[self.kind] = {"betas": (0.5, 0.9), "maximize": True}.get(self.kind, 0.5)


def fit_tuned(kind: str, ranks: int, tensor: int) -> list[float]:
    return fit(lambda: Tuned(kind), ranks, tensor, {})


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", ["lr", "weight_decay", "betas", "from the start"])
def test_hyper_parameters_that_differ_are_told(kind: str, tensor: int) -> None:
    found = watch_ranks(fit_tuned, 2, kind, 2, tensor)
    name = "lr" if kind == "from the start" else kind
    assert_all_told(found, "optimizers have other hyper-parameters on another rank", f"{name} of group 0 of AdamW is ")
    assert_all_told(found, " on rank 0, ", " on rank 1")


class Asks(Blocks):
    """For the gradient of a weight, by `torch.autograd.grad`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        torch.autograd.grad(loss, self.get_parameter(self.name), retain_graph=True)
        return loss


def fit_asking(name: str) -> list[float]:
    return fit(lambda: Asks(name), 2, 2, {})


@pytest.mark.parametrize("name", ["blocks.0.expand.weight", "blocks.1.expand.bias", "blocks.1.project.weight"])
def test_a_gradient_of_a_part_is_not_handed_out(name: str) -> None:
    assert_all_told(
        watch_ranks(fit_asking, 2, name), f"torch.autograd.grad asks for the gradient of {name}", "computes only a part"
    )


def test_a_gradient_of_what_is_whole_is() -> None:
    assert len(run_ranks(fit_asking, 2, "blocks.1.project.bias")[0]) == 8


class ReadsByHand(Blocks):
    """A weight that is cut, in a step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def loss(self, batch: Tensor) -> Tensor:
        block = self.blocks[0]
        read: dict[str, Callable[[], Any]] = {
            "F.linear": lambda: torch.nn.functional.linear(batch, block.expand.weight).mean(),
            "penalty": lambda: 1e-3 * block.project.weight.square().mean(),
            "norm": lambda: torch.linalg.vector_norm(block.expand.weight),
            "matmul": lambda: (batch @ block.expand.weight.T).mean(),
            "bias": lambda: (block.expand.bias + 1).mean(),
            "detached": lambda: block.project.weight.detach().sum(),
            "data": lambda: block.project.weight.data.sum(),
            "stack": lambda: torch.stack([block.expand.weight, block.expand.weight]).sum(),
            "iterated": lambda: sum(each.sum() for each in block.expand.bias),
            "without gradients": lambda: torch.no_grad()(lambda: block.expand.weight.mean())(),
            "shape": lambda: block.expand.weight.shape[0] + block.expand.weight.dtype.itemsize,
            "whole": lambda: block.project.bias.square().mean(),
        }
        return super().loss(batch) + read[self.kind]()


class ReadsBetween(Blocks):
    """Parts, between two steps, where a run's module has them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.blocks[0].expand.weight.detach().norm() > 0
        assert self.state_dict()["blocks.0.expand.weight"].shape == (32, 16)
        with self.trainer.strategy.gathered(self):
            self.blocks[0].expand.weight.data.mul_(0.99)


def fit_reading(kind: str, validates: bool) -> list[float]:
    if not validates:
        return fit(ReadsBetween if kind == "between" else lambda: ReadsByHand(kind), 2, 2, {})
    torch.manual_seed(0)
    trainer_of(2, 2).validate(ReadsByHand(kind), DataLoader(rows(4), 2), verbose=False)  # type: ignore[arg-type]
    return []


READS = ["F.linear", "penalty", "norm", "matmul", "bias", "detached", "data", "stack", "iterated", "without gradients"]


@pytest.mark.parametrize("kind", READS)
def test_a_part_that_user_code_reads_in_a_step_is_refused_by_its_name(kind: str) -> None:
    found = watch_ranks(fit_reading, 2, kind, False)
    assert_all_told(found, "was read in a step by code other than its layer's", "blocks.0.")


def test_so_it_is_in_an_evaluation() -> None:
    assert_all_told(watch_ranks(fit_reading, 2, "norm", True), "blocks.0.expand.weight was read in a step")


@pytest.mark.parametrize("kind", ["shape", "whole", "between"])
def test_other_reads_are_what_they_were(kind: str) -> None:
    assert len(run_ranks(fit_reading, 2, kind, False)[0]) == 8
