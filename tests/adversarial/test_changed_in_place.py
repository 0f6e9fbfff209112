"""Values that a backward pass needs, changed in place after the forward: the numbers of a plain Trainer, or an error.

Torch detects such changes itself, but not where hooks have packed what is saved.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.judged import MakeStrategy
from kit.twins import WIDTH, Twin, compare, trained
from torch import Tensor, nn


class Doubles(nn.Linear):
    """Needs its input for nothing but a recomputed forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 2).sin())


class Program(Twin):
    kind: Any = Doubles

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            value = x * 2
            output = block(value)
            value.add_(1)
            x = (output + value).tanh()
        return self.head(x)  # type: ignore[no-any-return]


class Needed(Program):
    kind = staticmethod(lambda: nn.Linear(WIDTH, WIDTH))


HOMES = ["ram", "masters_on_disk", "all_on_disk", "three_tiers"]


@pytest.mark.parametrize("home", HOMES)
def test_what_backward_does_not_need(home: str, strategy_at: MakeStrategy) -> None:
    compare(Program, strategy_at(home))


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(("kind", "recompute"), [(Needed, "none"), (Needed, "all"), (Program, "all")])
def test_what_backward_needs(kind: type[Twin], recompute: str, home: str, strategy_at: MakeStrategy) -> None:
    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        trained(kind, strategy_at(home, recompute=recompute))
