"""Going on with dropout, shuffled data and every generator that there is equals never having stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.checkpoint_runs import BATCHES, HALF, Full, fit, sharded
from kit.outcomes import Outcome
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm.trainer.randomness import KEY


class Random(Full):
    """Draws from every generator, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        self.numbers += [random.random(), np.random.random(), float(torch.rand(()))]
        loss = super().loss(batch, index)
        assert loss is not None
        noise = 1.0 + 0.1 * self.numbers[-2]
        return loss * noise * self.dropout(torch.ones(64)).mean()


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_random_numbers_and_the_order_of_data(strategy_at, kind: str, tmp_path: Path) -> None:
    def strategy() -> Any:
        return sharded(strategy_at, "ram") if kind == "sharded" else strategy_at("ram")

    modules: list[Random] = []

    def build() -> Random:
        random.seed(len(modules))  # a process that starts anew has other numbers
        np.random.seed(len(modules))
        modules.append(Random())
        return modules[-1]

    options: dict[str, Any] = {"build": build, "loader": DataLoader(BATCHES, batch_size=None, shuffle=True)}
    never, _ = fit(strategy(), tmp_path / "never", **options)
    again, _ = fit(strategy(), tmp_path / "again", tmp_path / "never" / "epoch=0.ckpt", seed=1, **options)
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))
    first, second = modules
    assert second.numbers == first.numbers[3 * HALF :]


def test_another_number_of_ranks_keeps_its_own(strategy_at, tmp_path: Path) -> None:
    fit(strategy_at("ram"), tmp_path)
    saved = torch.load(tmp_path / "epoch=0.ckpt")
    saved[KEY] *= 2
    torch.save(saved, tmp_path / "of two.ckpt")
    one = fit(strategy_at("ram"), tmp_path, tmp_path / "of two.ckpt", build=Random, seed=1)[0]
    other = fit(strategy_at("ram"), tmp_path, tmp_path / "of two.ckpt", build=Random, seed=2)[0]
    assert [float(loss) for loss in one.losses] != [float(loss) for loss in other.losses]
