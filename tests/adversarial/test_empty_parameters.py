"""Parameters of no elements: torch counts their norms, which are zero, when it takes the norm of all of them."""

from __future__ import annotations

import pytest
import torch
from judged import MakeStrategy
from torch import Tensor, nn
from twins import Twin, twins


class Program(Twin):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.ParameterList(nn.Parameter(torch.zeros(0)) for _ in range(self.count))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(each.sum() for each in self.empty)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        others = [parameter for parameter in self.parameters() if parameter.numel()]
        return torch.optim.AdamW([*self.empty, *others], lr=1e-2, fused=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_they_are_clipped_with_the_others(count: int, home: str, strategy_at: MakeStrategy) -> None:
    kind = type("Program", (Program,), {"count": count})
    twins(kind, strategy_at(home), max_epochs=4, gradient_clip_val=0.05)
