"""Parameters of no elements: torch counts their norms, which are zero, when it takes the norm of all of them."""

from __future__ import annotations

import pytest
import torch
from kit.judged import Judged, MakeStrategy, judge
from kit.twins import Twin, compare
from torch import Tensor, nn


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


@pytest.mark.diagonal
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_they_are_clipped_with_the_others(count: int, home: str, strategy_at: MakeStrategy) -> None:
    kind = type("Program", (Program,), {"count": count})
    compare(kind, strategy_at(home), max_epochs=4, gradient_clip_val=0.05)


class Leaving(Judged):
    """One is by itself in its flat, and leaves the module in mid-run."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + (self.empty.sum() if hasattr(self, "empty") else 0.0)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.kept = [self.empty, self.frozen]
            del self.empty, self.frozen
            groups = self.optimizers().param_groups
            groups[0]["params"] = [each for each in groups[0]["params"] if each.numel()]
            self.note([tuple(each.shape) for each in self.kept])


@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk"])
def test_they_leave_a_module_in_mid_run(home: str, strategy_at: MakeStrategy) -> None:
    judge(Leaving, strategy_at(home), max_epochs=2)
