"""Tensors of a module that lie in the same memory: one changes with the other, as in plain training, or they are refused."""

from __future__ import annotations

import pytest
import torch
from kit.judged import Judged, MakeStrategy, judge, run
from torch import Tensor, nn

from lightning_ptm import ConfigError


class TiedByData(Judged):
    """Two parameters of one memory: each is updated, so the memory is twice."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (block.inner[0] for block in self.blocks)  # type: ignore[union-attr, index]
        first.weight = nn.Parameter(second.weight.data)


class Overlapping(Judged):
    """Two that have some rows in common."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.randn(74, 64) * 0.1
        first, second = (block.inner[0] for block in self.blocks)  # type: ignore[union-attr, index]
        first.weight, second.weight = nn.Parameter(rows[:64]), nn.Parameter(rows[10:])


class BufferOfAWeight(Judged):
    """A buffer that is what the weight becomes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", self.head.weight.data)

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.note(self.seen)
        return super().loss(batch) + 0.1 * self.seen.square().sum()


KINDS = [TiedByData, Overlapping, BufferOfAWeight]


@pytest.mark.parametrize("build", KINDS)
def test_with_everything_in_ram_they_are_as_anywhere(build: type[Judged], strategy_at: MakeStrategy) -> None:
    judge(build, strategy_at("ram"), accumulate_grad_batches=2)


@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize("where", ["masters_on_disk", "three_tiers", "lock_free"])
def test_elsewhere_they_are_refused_at_the_start(build: type[Judged], where: str, strategy_at: MakeStrategy) -> None:
    with pytest.raises(ConfigError, match=r"share memory.*decoder.weight = encoder.weight"):
        run(build, strategy_at(where))


def test_they_may_be_read_in_an_evaluation_and_be_frozen(strategy_at: MakeStrategy) -> None:
    class Frozen(TiedByData):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.requires_grad_(False)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([*self.first.parameters(), *self.head.parameters()], lr=0.1)

    judge(Frozen, strategy_at("three_tiers"))
