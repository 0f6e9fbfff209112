"""Gradients that pass through a pool of pages in RAM to updates within the backward: whatever units a step calls, and
whenever their updates begin, no gradient waits for pages that none frees (docs/design/gradients_waiting_for_disk.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.plain_loop import PlainLoop, TrainModule, fit, vectors
from test_least_device_memory import Deep, accepted
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import CapacityError

ROWS = vectors(4, 8, 32)
SETTINGS: dict[str, Any] = {
    "device_memory": "16MiB",
    "offload_parameters": "device",
    "offload_optimizer": "host",
    "units": ["Wide"],
}


class Conditional(Deep):
    """Each step leaves out other blocks."""

    def order(self, index: int) -> tuple[int, ...]:
        return tuple(block for block in range(10) if (block + index) % 3)


class Twice(Deep):
    """All blocks are called, and then again from the first on."""

    def order(self, index: int) -> tuple[int, ...]:
        return (*range(10), *range(0, 10, 1 + index % 2))


class PassOfItsOwn(Deep):
    """A backward pass of the step comes before that of the loss, through all blocks."""

    def loss(self, batch: Tensor, index: int) -> Tensor:
        if index != 1:
            super().loss(batch, index).backward()
        return super().loss(batch * 0.5, index)


class PartlyInAPassOfItsOwn(Deep):
    def loss(self, batch: Tensor, index: int) -> Tensor:
        super().loss(batch[:, :16].repeat(1, 2), index).backward()
        return self.last(self.blocks[index](self.first(batch))).float().pow(2).mean()


class ClosureOfItsOwn(Deep):
    """Units are not updated within the backward, since code of the user follows it."""

    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            return optimizer_closure()

        optimizer.step(closure=closure)


MODULES: dict[str, type[TrainModule]] = {
    "conditional": Conditional,
    "twice": Twice,
    "a pass of its own": PassOfItsOwn,
    "partly in a pass of its own": PartlyInAPassOfItsOwn,
    "a closure of its own": ClosureOfItsOwn,
}


def least_ram(module: nn.Module, precision: str) -> int:
    """The least pages of RAM that a plan is accepted with, in which gradients pass through a pool."""
    mixed = precision.endswith("mixed")
    options = {**SETTINGS, "compute": torch.bfloat16 if mixed else torch.float32, "mixed": mixed}
    states = (3 if mixed else 2) * (10 * 4 + 1)
    for pages in range(states - 10, 2 * states):
        found = accepted(module, host_memory=pages << 16, **options)
        if found is not None:
            assert found.placement.passing_bytes
            return pages
    raise AssertionError("no plan")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", MODULES)
def test_every_run_that_the_plan_accepts_ends(name: str, precision: str) -> None:
    kind = MODULES[name]
    strategy = AngelPTMStrategy(page_size="64KiB", host_memory=least_ram(kind(), precision) << 16, **SETTINGS)
    fit(kind, ROWS, strategy, precision).assert_equal(PlainLoop(kind, precision).run(ROWS))


class ClipsByItself(Deep):
    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()


def test_a_clip_that_the_plan_does_not_know_of_is_refused() -> None:
    """It needs all gradients at once; nothing was updated before."""
    strategy = AngelPTMStrategy(page_size="64KiB", host_memory=least_ram(Deep(), "32-true") << 16, **SETTINGS)
    with pytest.raises(
        CapacityError, match="gradients in RAM wait for the optimizer's step, since code of yours clips"
    ):
        fit(ClipsByItself, ROWS, strategy, "32-true")
