"""Blocks called in drawn orders, which change between batches and differ between ranks, in the least device memory that the
plan accepts: as a plain loop over the ranks' batches, to the bit. It sums the squares of a norm in fp64, as several ranks do.

Ranks that come to a unit at different times reduce it twice in a pass (docs/design/reduce_gradients.md). The sum over several
passes has its summands in another order then: these cases are in fp64, and equal within 1e-12."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from kit.memory import LEAST
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import ClippedInFp64, Training, fit, tokens

RANKS, BATCHES = 2, 4
Order = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """Args:
    widths: of the blocks.
    orders: blocks that a rank calls, by batch and rank.
    frozen: blocks that are not trained.
    """

    widths: tuple[int, ...]
    orders: tuple[tuple[Order, Order], ...]
    clip: float | None = None
    accumulate: int = 1
    parameters: str = "host"
    optimizer: str = "host"
    recompute: str = "none"
    frozen: tuple[int, ...] = ()

    @property
    def training(self) -> Training:
        return Training(
            partial(Ordered, self), "32-true" if self.to_the_bit else "64-true", BATCHES, self.accumulate, self.clip
        )

    @property
    def to_the_bit(self) -> bool:
        return self.accumulate == 1 or all(one == other for one, other in self.orders)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "device_memory": LEAST,
            "offload_parameters": self.parameters,
            "offload_optimizer": self.optimizer,
            "recompute": self.recompute,
        }


class Ordered(Tower):
    def __init__(self, case: Case) -> None:
        super().__init__(hidden=case.widths)
        self.case = case
        for block in case.frozen:
            self.blocks[block].requires_grad_(False)

    def order(self, rank: int, step: int) -> Iterable[int]:
        return self.case.orders[step][rank]

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return self.optimizer_class(trained, **self.optimizer_options)


def drawn(seed: int) -> Case:
    random = Random(f"odd order on ranks {seed}")
    count = random.randint(3, 5)
    recompute = random.choice(["none", "none", "all"])
    alike = random.random() < 0.5

    def order() -> Order:
        if recompute == "all":  # a unit that is called twice stays until the end of its last recomputed call
            return tuple(random.sample(range(count), random.randint(1, count)))
        return tuple(random.randrange(count) for _ in range(random.randint(1, 6)))

    def of_ranks() -> tuple[Order, Order]:
        first = order()
        return first, first if alike else order()

    return Case(
        widths=tuple(random.choice([40, 130, 200, 400, 600, 900]) for _ in range(count)),
        orders=tuple(of_ranks() for _ in range(BATCHES)),
        clip=random.choice([None, 0.1]),
        accumulate=random.choice([1, 1, 2]),
        parameters=random.choice(["host", "disk"]),
        optimizer=random.choice(["host", "disk"]),
        recompute=recompute,
        frozen=random.choice([(), (), (random.randrange(count),)]),
    )


def fit_drawn(seeds: range, folder: Path) -> list[Outcome]:
    """One rank's part."""
    found = []
    for seed in seeds:
        case = drawn(seed)
        try:
            found.append(fit(case.training, RANKS, folder, **case.settings))
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise
    return found


@pytest.mark.parametrize("first", [0, 2, *(pytest.param(at, marks=pytest.mark.slow) for at in range(4, 34, 6))])
def test_drawn_orders_in_the_least_device_memory(disk: Path, first: int) -> None:
    seeds = range(first, first + (2 if first < 4 else 6))
    for seed, *outcomes in zip(seeds, *run_ranks(fit_drawn, RANKS, seeds, disk), strict=True):
        training = drawn(seed).training
        for rank, (ours, theirs) in enumerate(
            zip(outcomes, ClippedInFp64(training, RANKS).run(tokens(training, RANKS)), strict=True)
        ):
            try:
                if training.precision == "32-true":
                    ours.assert_equal(theirs)
                else:
                    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=1e-12)
                    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-12)
            except AssertionError as error:
                error.add_note(f"rank {rank}, seed {seed}: {drawn(seed)}")
                raise
