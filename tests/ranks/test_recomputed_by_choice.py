"""Ranks of which one alone recomputes units, since memory is short there (`recompute="auto"`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from kit.outcomes import Outcome
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.models import Tower
from kit.ranks.training import BATCH, Training, fit, make_strategy, make_trainer, plain, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.engine.engine import Engine

SECOND = 1


class SumsOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return SumsOverRanks.forward(ctx, gradient)


class Sums(Tower):
    """The first block sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        first = self.blocks[0]
        forward = first.forward
        first.forward = lambda x, *more: forward(SumsOverRanks.apply(x), *more)


class Normalizes(Tower):
    """Blocks have a SyncBatchNorm that computes nothing: it is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].unused = nn.SyncBatchNorm(4, affine=False)


class Cut(Tower):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


def short_on_the_second_rank() -> list[int]:
    """Makes memory short there; returns the units that calls of this process will be to recompute."""
    recomputed: list[int] = []
    begins = ActivationPolicy.call_begins

    def noted(policy: ActivationPolicy, unit: int, input_bytes: Callable[[], int]) -> Handling:
        handling = begins(policy, unit, input_bytes)
        recomputed.extend([unit] if handling.recomputes else [])
        return handling

    if int(os.environ["RANK"]) == SECOND:
        ActivationPolicy._needed_bytes = lambda policy, unit: math.inf  # type: ignore[method-assign]
    ActivationPolicy.call_begins = noted  # type: ignore[method-assign]
    Engine._activation_room = lambda engine: lambda: 1 << 40  # type: ignore[method-assign]
    return recomputed


def fit_short(build: Callable[[], Tower], folder: Path) -> tuple[Outcome, int]:
    recomputed = short_on_the_second_rank()
    return fit(Training(build), 2, folder, offload_activations="none"), len(recomputed)


@pytest.mark.parametrize(("build", "recomputes"), [(Tower, True), (Normalizes, False)])
def test_one_rank_recomputes(build: Callable[[], Tower], recomputes: bool, disk: Path) -> None:
    """With a SyncBatchNorm none does, since its second forward would wait for the other rank."""
    expected = plain(Training(build), 2)
    for rank, (ours, count) in enumerate(run_ranks(fit_short, 2, build, disk, fresh=True)):
        ours.assert_equal(expected[rank])
        assert bool(count) == (recomputes and rank == SECOND)


def fit_cut(folder: Path) -> int:
    recomputed = short_on_the_second_rank()
    training = Training(Cut)
    for settings in ({"offload_activations": "none"}, {}):
        trainer = make_trainer(training, make_strategy(folder, tensor_parallel_size=2, **settings), 2)
        trainer.fit(Cut(), DataLoader(tokens(training, 1), batch_size=BATCH))  # type: ignore[arg-type]
    return len(recomputed)


def test_with_divided_layers_no_rank_recomputes(disk: Path) -> None:
    """Their second forward may exchange results again: those that were written to in place."""
    assert run_ranks(fit_cut, 2, disk, fresh=True) == [0, 0]


def test_a_collective_in_a_unit_that_one_rank_recomputes_is_refused(disk: Path) -> None:
    outcomes = watch_ranks(fit_short, 2, Sums, disk, fresh=True)
    assert [each.end for each in outcomes] == [End.RAISED] * 2
    error = str(outcomes[SECOND])
    assert (
        "UsageError: blocks.0 (Block) calls a collective of torch.distributed" in error and "recompute='all'" in error
    )
