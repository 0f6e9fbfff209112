"""Ranks whose gradients pass through a pool of pages in RAM, and which call different units: no gradient waits for pages that
none frees (docs/design/gradients_waiting_for_disk.md)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from kit.memory import LEAST
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, expected, fit
from torch import Tensor

from lightning_ptm.runtime.gradients.store import GradientPages

BLOCKS = 9
SETTINGS: dict[str, Any] = {
    "disk_path": None,
    "device_memory": "16MiB",
    "host_memory": LEAST,
    "offload_parameters": "device",
    "offload_optimizer": "host",
}


class Deep(Tower):
    def __init__(self) -> None:
        super().__init__(hidden=(256,) * BLOCKS)


class Halves(Deep):
    """Each rank calls the blocks that the other one leaves out."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return range((rank + step) % 2, BLOCKS, 2)


class OneAfterAnother(Deep):
    """Rank 0 leaves more and more blocks out; rank 1 calls all of them, from the last to the first."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return range(BLOCKS)[::-1] if rank else range(2 * step, BLOCKS)


class PassOfItsOwn(Halves):
    """A backward pass comes before that of the loss, through all blocks."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        Deep.loss(self, batch, 0, 0).backward()  # type: ignore[union-attr]
        return super().training_step(batch, index)


class ClosureOfItsOwn(Halves):
    """Units are not updated within the backward, since code of the user follows it."""

    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=lambda: optimizer_closure())


def fit_in_pool(training: Training, world_size: int, folder: Path) -> tuple[Outcome, int]:
    """Returns the outcome, and how many gradients have passed through the pool."""
    taken: list[int] = []
    take = GradientPages.take

    def counted(pool: GradientPages, *args: Any) -> Any:
        taken.append(1)
        return take(pool, *args)

    GradientPages.take = counted  # type: ignore[method-assign]
    try:
        return fit(training, world_size, folder, "ram", **SETTINGS), len(taken)
    finally:
        GradientPages.take = take  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [Deep, Halves, OneAfterAnother, ClosureOfItsOwn])
def test_ranks_that_call_different_units(kind: type[Tower], disk: Path) -> None:
    training = Training(kind, "32-true")
    for (ours, taken), theirs in zip(run_ranks(fit_in_pool, 2, training, 2, disk), expected(training, 2), strict=True):
        assert taken >= 4 * BLOCKS // 2
        ours.assert_equal(theirs)


def test_a_backward_pass_that_is_not_that_of_the_loss(disk: Path) -> None:
    training = Training(PassOfItsOwn, "32-true")
    found = run_ranks(fit_in_pool, 2, training, 2, disk)
    expected = run_ranks(fit, 2, training, 2, disk, "ram")
    for (ours, _), theirs in zip(found, expected, strict=True):
        ours.assert_equal(theirs)
