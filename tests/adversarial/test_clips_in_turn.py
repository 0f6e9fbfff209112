"""Clips one after the other: each is of what those before it have left, wherever gradients are."""

from __future__ import annotations

from typing import Any

import pytest
from kit.judged import ByHand, Judged, MakeStrategy, assert_alike, judge, run
from torch import Tensor

from lightning_ptm import AngelPTMPrecision
from lightning_ptm.update.loss_scale import LossScale


class ClipsAgain(Judged):
    """By value, by the norm of what is left, and by a wider norm, which changes nothing more."""

    clips: tuple[tuple[float, str], ...] = ((1e-3, "value"), (0.01, "norm"), (0.5, "norm"))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for value, algorithm in self.clips:
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)


class ByValueLast(ClipsAgain):
    """By norm, by value, and by a wider value."""

    clips = ((0.1, "norm"), (1e-3, "value"), (1e-2, "value"))


@pytest.mark.diagonal
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["one batch", "two batches"])
@pytest.mark.parametrize("build", [ClipsAgain, ByValueLast])
def test_each_clip_is_of_what_the_last_has_left(
    tier: str, build: type[Judged], options: dict[str, Any], strategy_at: MakeStrategy
) -> None:
    judge(build, strategy_at(tier), **options)


class Forgets(ByHand):
    """The gradients of the first batch are dropped with the module's gradients; under a loss scale clips wait for the
    step."""

    clips_first = True

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if index == 0:
            if self.clips_first:
                self.clip_gradients(optimizer, gradient_clip_val=1e-6, gradient_clip_algorithm="norm")
            self.zero_grad()
            return
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        self.zero_grad()


class ForgetsUnclipped(Forgets):
    clips_first = False


@pytest.mark.parametrize("where", ["ram", "all_on_disk"])
def test_a_clip_is_forgotten_with_its_gradients(where: str, strategy_at: MakeStrategy) -> None:
    options = {"precision": None, "limit_train_batches": 2}
    first, second = (
        run(build, strategy_at(where), **options, plugins=[AngelPTMPrecision("16-mixed", LossScale(2.0**8))])
        for build in (Forgets, ForgetsUnclipped)
    )
    assert_alike(first, second)
