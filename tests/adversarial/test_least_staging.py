"""Everything on disk with the least staging: runs whose units come in another order than they are registered in.

Then what was read ahead is not what is needed first, and compute puts updates before others that hold all staging. The disk
brings nothing before somebody waits for it, so that each run is the same every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.policy_log import Disk
from kit.twins import Twin, assert_alike, trained, vectors
from torch import Tensor, nn

from lightning_ptm.errors import CapacityError

WIDTH = 66
ORDERS = [(1, 3, 2, 0), (2, 0, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3)]
ON_DISK = {"offload_parameters": "disk", "offload_optimizer": "disk"}


class Blocks(Twin):
    """Blocks that compute in an order of their own, and nothing beside them."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        del self.stem, self.head
        self.order = order
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in order)

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = x + torch.tanh(self.blocks[place](x))
        return x


OPTIONS: dict[str, dict[str, Any]] = {
    "in the backward": {},
    "at the step": {"gradient_clip_val": 1.0},
    "sums": {"accumulate_grad_batches": 2},
}


@functools.cache
def plain(order: tuple[int, ...], options: str) -> Any:
    return trained(lambda: Blocks(order), None, vectors(WIDTH, count=4), **OPTIONS[options])


def in_least_memory(order: tuple[int, ...], options: str, make: Callable[[str], Any]) -> Any:
    """Trained in the least memory that the plan takes."""
    for kib in range(512, 4096, 128):
        try:
            return trained(lambda: Blocks(order), make(f"{kib}KiB"), vectors(WIDTH, count=4), **OPTIONS[options])
        except CapacityError:
            continue
    raise AssertionError("4 MiB are too little")


@pytest.mark.diagonal
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
@pytest.mark.parametrize("staging", ["256KiB", "512KiB"])
@pytest.mark.parametrize("device", [None, "1MiB"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_ends_with_a_plain_trainers_bits(
    strategy_at: Any,
    monkeypatch: pytest.MonkeyPatch,
    order: tuple[int, ...],
    staging: str,
    device: str | None,
    options: str,
) -> None:
    homes = {**ON_DISK, "tuning": {"staging_memory": staging}, **({} if device is None else {"device_memory": device})}
    with monkeypatch.context() as patch:
        Disk(patch, slow=True)
        ours = in_least_memory(order, options, lambda host: strategy_at("ram", **homes, host_memory=host))
    assert_alike(ours, plain(order, options))


@pytest.mark.slow_unless("lock_free-1320", "lock_free-2031", "0123")
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
@pytest.mark.parametrize("tier", ["lock_free", "lock_free_three_tiers"])
def test_a_lock_free_run_ends_with_a_plain_trainers_bits(strategy_at: Any, order: tuple[int, ...], tier: str) -> None:
    def make(host: str) -> Any:
        return strategy_at(tier, offload_optimizer="disk", tuning={"staging_memory": "320KiB"}, host_memory=host)

    assert_alike(in_least_memory(order, "in the backward", make), plain(order, "in the backward"))
