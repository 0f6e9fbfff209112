"""Check of batches in two halves: before the first one trains, its loss as a whole is compared with the mean of its halves'.

Where samples of a batch meet (losses over pairs of samples, statistics of a batch), or where the loss is a sum over samples,
halves train something else, without an error. Without gradients and dropout; logs and what a step leaves in attributes are
undone.

I1: a loss that is a mean over tokens, of which the halves have different numbers (padding), is not refused. It is a
    weighted mean of the halves' losses, and the weights, found from the whole batch, have to explain the loss of a batch
    that has one half twice. Training is then as with accumulated micro-batches, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_ptm.errors import ConfigError, RankError, UsageError
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.runtime.autograd.recompute import ignoring_stored_exchanges
from lightning_ptm.runtime.tensors.random_functions import NoDropout
from lightning_ptm.trainer.loss_check import Extremes, undone

_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-9}
_OF_FP32, _OF_TF32 = 1e-5, 1e-3
"""Largest differences of losses, relative to the loss where that is above 1."""


class HalvesCheck:
    """The check of one run.

    Args:
        module: the module that trains.
        group: its tensor group.
    """

    def __init__(self, module: LightningModule, group: TensorGroup) -> None:
        self._module = module
        self._group = group
        # state
        self._done = False

    def check(
        self,
        batch: Any,
        sizes: tuple[int, int],
        rows: Callable[[Any, list[int]], Any],
        step: Callable[[Any], Any],
        iteration: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Checks the first batch; does nothing with later ones. Collective in the group.

        Args:
            sizes: numbers of samples of the halves.
            rows: returns some samples of a batch, by their numbers.
            step: computes a batch.
            iteration: context of a forward.

        Raises:
            ConfigError: the halves train something else.
        """
        if self._done:
            return
        self._done = True

        def loss(samples: list[int]) -> float | None:
            with iteration():
                return self._loss(rows(batch, samples), step)

        first, second = list(range(sizes[0])), list(range(sizes[0], sum(sizes)))
        whole, one, other = loss(first + second), loss(first), loss(second)
        if whole is None or one is None or other is None:
            return  # a step that skips this batch
        mean = (sizes[0] * one + sizes[1] * other) / sum(sizes)
        if self._equal(mean, whole):
            return
        # Of a mean over unequally many tokens, the first half's share of them; if that half comes twice, so do they.
        share = (whole - other) / (one - other) if one != other else -1.0
        expected = (2 * share * one + (1 - share) * other) / (1 + share) if 0 <= share <= 1 else None
        twice = loss(first + first + second)
        if twice is None or expected is None or not self._equal(twice, expected):
            raise ConfigError(
                f"TensorParallel(overlap='two_batches') would train something else than {type(self._module).__name__} does "
                f"with whole batches: the loss of the first batch is {whole:.6g}, and the mean of its halves' losses "
                f"{mean:.6g}, so the samples of a batch meet, or the loss is a sum over samples; return a mean over samples "
                f"that do not meet, or use TensorParallel(overlap='none')"
            )
        rank_zero_warn(
            f"TensorParallel(overlap='two_batches'): the loss of the first batch is {whole:.6g}, and the mean of its halves' "
            f"losses {mean:.6g}: halves have unequally many of what the loss is a mean over (tokens beside padding), as "
            f"micro-batches have with accumulate_grad_batches"
        )

    def _loss(self, batch: Any, step: Callable[[Any], Any]) -> float | None:
        try:
            with (
                undone(self._module),
                torch.no_grad(),
                NoDropout(),
                Extremes(high=False),
                isolate_rng(include_cuda=False),
                ignoring_stored_exchanges(),
                self._group.seeded(1),
            ):
                result = step(batch)
        except (RankError, UsageError):
            raise
        except Exception as error:
            raise ConfigError(
                f"TensorParallel(overlap='two_batches'): training_step was tried without gradients on the first batch, to "
                f"compare its loss with that of its halves, and raised {type(error).__name__}: {error}; let it compute "
                f"without gradients, or use TensorParallel(overlap='none')"
            ) from error
        loss = result.get("loss") if isinstance(result, Mapping) else result
        return float(loss) if isinstance(loss, Tensor) else None

    def _equal(self, one: float, other: float) -> bool:
        dtype = self._module.trainer.precision_plugin.plan.compute  # type: ignore[attr-defined]
        of_fp32 = _OF_FP32 if torch.get_float32_matmul_precision() == "highest" else _OF_TF32
        return abs(one - other) <= _TOLERANCES.get(dtype, of_fp32) * max(1.0, abs(other))
