"""A run that an error ends in the middle gives the module back: ordinary weights, those of the steps that were taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.outcomes import Outcome
from kit.plain_loop import PlainLoop, make_trainer, outcome_of, tokens
from kit.stacks import Stack
from torch import Tensor

PRECISION = "bf16-mixed"
FAILS_AT = 2
"""The batch, of four."""


class Fails(Stack):
    """Raises in one place of one batch."""

    def __init__(self, place: str) -> None:
        super().__init__(3)
        self.place = place
        self.batch = 0

    def fail_in(self, place: str) -> None:
        if place == self.place and self.batch == FAILS_AT:
            raise RuntimeError(f"the user's own, in {place}")

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        self.batch = index
        self.fail_in("training_step")
        return super().training_step(batch, index)

    def on_before_backward(self, loss: Tensor) -> None:
        self.fail_in("on_before_backward")
        if self.place == "backward":
            loss.register_hook(lambda _: self.fail_in("backward"))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail_in("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail_in("on_train_batch_end")


TAKEN = {
    "training_step": FAILS_AT,
    "on_before_backward": FAILS_AT,
    "backward": FAILS_AT,
    "on_before_optimizer_step": FAILS_AT,
    "on_train_batch_end": FAILS_AT + 1,
}
"""By the place that fails, steps that were taken before."""


def failed(strategy: Any, place: str) -> Fails:
    torch.manual_seed(0)
    module = Fails(place)
    with pytest.raises(RuntimeError, match=f"the user's own, in {place}"):
        make_trainer(strategy, PRECISION).fit(module, tokens(4).loader())
    return module


@pytest.mark.slow_unless(
    "ram-backward",
    "ram-on_train_batch_end",
    "three_tiers-on_before_optimizer_step",
    "tight-training_step",
    "tight-on_before_backward",
)
@pytest.mark.parametrize("place", TAKEN)
def test_they_are_those_of_the_steps_that_were_taken(strategy_at, tier: str, place: str) -> None:
    module = failed(strategy_at(tier), place)
    plain = PlainLoop(lambda: Stack(3), PRECISION).run(tokens(TAKEN[place]))
    Outcome([], outcome_of(module).weights).assert_equal(Outcome([], plain.weights))


class FailsBetweenBlocks(Fails):
    """In the backward pass of a block, when those behind it have ended theirs."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.blocks[0].register_full_backward_pre_hook(self._fail)

    def _fail(self, *_: Any) -> None:
        if self.batch == FAILS_AT:
            raise RuntimeError("the user's own, in a block")


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_an_error_in_the_middle_of_a_backward_leaves_each_weight_before_or_behind_its_update(
    strategy_at, tier: str
) -> None:
    torch.manual_seed(0)
    module = FailsBetweenBlocks()
    with pytest.raises(RuntimeError, match="the user's own, in a block"):
        make_trainer(strategy_at(tier), PRECISION).fit(module, tokens(4).loader())
    before, behind = (
        PlainLoop(lambda: Stack(3), PRECISION).run(tokens(count)).weights for count in (FAILS_AT, FAILS_AT + 1)
    )
    for name, value in outcome_of(module).weights.items():
        assert torch.equal(value, before[name]) or torch.equal(value, behind[name]), name
        assert not name.startswith("blocks.0.") or torch.equal(value, before[name]), name


@pytest.mark.slow_unless(
    "masters_on_disk-on_train_batch_end", "lock_free-training_step", "tight_recomputed-on_train_batch_end"
)
@pytest.mark.parametrize("place", ["training_step", "on_train_batch_end"])
def test_they_train_on(strategy_at, tier: str, place: str) -> None:
    """By another run, whose optimizer begins anew."""
    module = failed(strategy_at(tier), place)
    module.place, module.losses = "nowhere", []
    weights = outcome_of(module).weights
    make_trainer(strategy_at(tier), PRECISION).fit(module, tokens(2).loader())

    class Goes(Stack):
        def __init__(self) -> None:
            super().__init__(3)
            self.load_state_dict(weights)

    outcome_of(module).assert_equal(PlainLoop(Goes, PRECISION).run(tokens(2)))
