"""Whatever device memory a plan is accepted with, the run fits in, from the least on (promise 4 of the design)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from decided_by_hand import decided
from kit.outcomes import Outcome
from kit.plain_loop import Batches, PlainLoop, TrainModule, fit, vectors
from test_micro_batches import ALL_FIRST, Staged
from test_run_and_paper import Tower
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import CapacityError
from lightning_ptm.runtime.deciding.blueprint import Blueprint


class Wide(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.inner = nn.Linear(128, inner)
        self.outer = nn.Linear(inner, 128)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.outer(self.inner(value).tanh())


class Uneven(Tower):
    """Blocks of three, seven, five and one pages, whose gradients come after the next one has been entered."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Wide, (128, 384, 256, 32)))


class Adapted(Uneven):
    """Blocks of four frozen pages and one that is trained: their gradients leave no room for another block's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide(256) for _ in range(4))
        for block in self.blocks:
            block.requires_grad_(False)
            block.outer.bias.requires_grad_(True)  # type: ignore[union-attr, operator]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)


class InFlight(Staged):
    """Forwards first; its gradients come in three backward passes of one iteration."""

    width = 128

    def __init__(self) -> None:
        super().__init__(ALL_FIRST)


ROWS = vectors(4, 8, 32)
MICRO_BATCHES = vectors(2, 4, 3, 32)
TWO = {"accumulate_grad_batches": 2}
CLIPPED = {"gradient_clip_val": 0.1}
RECOMPUTED = {"recompute": "all"}
CASES: dict[str, tuple[type[TrainModule], Batches, str, dict[str, Any], int]] = {
    "one backward pass a step": (Tower, ROWS, "32-true", {}, 12),
    "accumulated": (Tower, ROWS, "32-true", TWO, 17),
    "accumulated and clipped": (Tower, ROWS, "32-true", {**TWO, **CLIPPED}, 17),
    "clipped": (Tower, ROWS, "32-true", CLIPPED, 12),
    "accumulated in a wider dtype": (Tower, ROWS, "bf16-mixed", TWO, 13),
    "accumulated in blocks of several sizes": (Uneven, ROWS, "32-true", TWO, 23),
    "mostly frozen": (Adapted, ROWS, "32-true", {}, 9),
    "mostly frozen, recomputed": (Adapted, ROWS, "32-true", RECOMPUTED, 9),
    "in flight": (InFlight, MICRO_BATCHES, "32-true", {}, 17),
}
"""Models and settings, and the least pages of device memory with everything on disk: the root and the largest block,
with the gradients of both, are 12 (8 in 16 bits, 16 in blocks of several sizes, 9 where most is frozen); the sum to
which the block's are added is 5 (7)."""


class Begun(L.Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1


def attempt(name: str, disk: Path, **memory: str) -> None:
    """Trains, with as many bits as without pages.

    Raises:
        CapacityError: the plan is not accepted; nothing has been computed.
    """
    kind, batches, precision, options, _ = CASES[name]
    options = {**options}
    strategy = AngelPTMStrategy(
        page_size="64KiB",
        units=["Wide" if issubclass(kind, Uneven) else "Block"],
        recompute=options.pop("recompute", "none"),
        offload_parameters="disk",
        offload_optimizer="disk",
        disk_path=disk,
        **memory,
    )
    begun = Begun()
    try:
        ours = fit(kind, batches, strategy, precision, callbacks=[begun], **options)
    except CapacityError:
        assert not begun.batches, "the plan was accepted, and the run did not fit"
        raise
    ours.assert_equal(plainly(name))


@functools.cache
def plainly(name: str) -> Outcome:
    kind, batches, precision, options, _ = CASES[name]
    loop = PlainLoop(kind, precision, options.get("accumulate_grad_batches", 1), options.get("gradient_clip_val"))
    return loop.run(batches)


class Deep(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide(248) for _ in range(10))

    def order(self, index: int) -> tuple[int, ...]:
        return (*range(10),)


def test_gradients_pass_through_the_least_ram() -> None:
    """RAM has room for the gradients of the root and of four blocks, and compute waits for updates in the backward."""
    settings: dict[str, Any] = {
        "device_memory": "16MiB",
        "offload_parameters": "device",
        "offload_optimizer": "host",
        "units": ["Wide"],
    }
    states = 2 * (10 * 4 + 1)  # pages of the moments
    least = next(
        pages for pages in range(states, 2 * states) if (found := accepted(Deep(), host_memory=pages << 16, **settings))
    )
    assert found is not None and found.placement.passing_bytes == (4 * 4 + 1) << 16
    strategy = AngelPTMStrategy(page_size="64KiB", host_memory=least << 16, **settings)
    fit(Deep, ROWS, strategy, "32-true").assert_equal(PlainLoop(Deep, "32-true").run(ROWS))


def accepted(module: nn.Module, **settings: Any) -> Blueprint | None:
    try:
        return decided(module, **settings)
    except CapacityError:
        return None


@pytest.mark.slow_unless(
    "accumulated",
    "accumulated and clipped",
    "clipped",
    "accumulated in a wider dtype",
    "accumulated in blocks of several sizes",
)
@pytest.mark.parametrize("further", [range(2), pytest.param(range(2, 5), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_device_memory_from_the_least_that_is_accepted(disk: Path, name: str, further: range) -> None:
    least = CASES[name][-1]
    with pytest.raises(CapacityError):
        attempt(name, disk, device_memory=f"{64 * (least - 1)}KiB", host_memory="64MiB")
    for pages in further:
        attempt(name, disk, device_memory=f"{64 * (least + pages)}KiB", host_memory="64MiB")
