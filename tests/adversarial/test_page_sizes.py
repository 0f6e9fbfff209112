"""Any multiple of 4096 bytes is a page, as the setting says: chunks of updates need not end where pages do."""

from __future__ import annotations

import pytest
import torch
from kit.judged import Judged, MakeStrategy, judge
from torch import nn


class Wide(Judged):
    """A head of several pages."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 700)


@pytest.mark.slow_unless(
    "ram-68KiB",
    "masters_on_disk",
    "all_on_disk-76KiB",
    "three_tiers-68KiB",
    "lock_free",
    "lock_free_three_tiers-76KiB",
    "tight-68KiB",
    "tight_recomputed",
)
@pytest.mark.parametrize("page_size", ["68KiB", "76KiB"])
def test_pages_of_odd_sizes(tier: str, page_size: str, strategy_at: MakeStrategy) -> None:
    judge(Wide, strategy_at(tier, page_size=page_size))


def test_pages_of_odd_sizes_hold_any_dtype(strategy_at: MakeStrategy) -> None:
    class Mixed(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.head.double()

        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            x = self.first(batch[0])
            for block in self.blocks:
                x = block(x)
            return self.head(x.double()).square().mean()

    judge(Mixed, strategy_at("three_tiers", page_size="68KiB"))
