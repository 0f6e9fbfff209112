"""Weights that change between a forward and the backward through it: refused wherever they live, as torch refuses it.

A plain Trainer raises torch's error, but where a fused kernel or `.data` hides the change from torch: it then mixes two
versions of the weights, and what is refused here has no number to be compared with.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from kit.odd import Odd, assert_same, outcome, plain_outcome
from torch import Tensor

PLACES = ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "tight", "tight_recomputed"]


class Between(Odd):
    """Two losses are computed, then one is stepped with, then the backward of the other comes."""

    manual = True
    fused = False

    def optimizers_of(self) -> Any:
        first = [*self.stem.parameters(), *self.blocks[0].parameters()]
        rest = [*self.blocks[1:].parameters(), *self.head.parameters()]
        how = {"fused": True} if self.fused else {"foreach": False}
        return [torch.optim.AdamW(each, lr=1e-2, **how) for each in (first, rest)]

    def step(self, run: Any, x: Tensor) -> None:
        one, two = run.optimizers()
        early, late = self.loss(x), self.loss(x)
        two.zero_grad()
        run.manual_backward(late)
        self.change(run, two)
        one.zero_grad()
        run.manual_backward(early)
        one.step()

    def change(self, run: Any, optimizer: Any) -> None:
        optimizer.step()


class Fused(Between):
    """Step in between with torch's fused kernel, which hides the change from torch's own check."""

    fused = True


class Retained(Between):
    """Runs the same graph's backward twice, with a step in between."""

    def step(self, run: Any, x: Tensor) -> None:
        one, two = run.optimizers()
        loss = self.loss(x)
        run.manual_backward(loss, retain_graph=True)
        two.step()
        run.manual_backward(loss)
        one.step()


class RetainedFused(Retained):
    """Retained graph, with the fused kernel."""

    fused = True


class OfTheBatchBefore(Between):
    """The loss of a batch goes backward in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Tensor] = []

    def step(self, run: Any, x: Tensor) -> None:
        one, two = run.optimizers()
        self.waiting.append(self.loss(x))
        if len(self.waiting) > 1:
            run.manual_backward(self.waiting.pop(0))
        else:
            run.manual_backward(self.loss(x))
        one.step()
        two.step()


class Adversary(Between):
    """A generator's loss is computed before the critic's step, and goes backward through the critic behind it."""

    fused = True

    def optimizers_of(self) -> Any:
        critic = [*self.blocks[2:].parameters(), *self.head.parameters()]
        return [
            torch.optim.AdamW([*self.stem.parameters(), *self.blocks[:2].parameters()], lr=1e-2, fused=True),
            torch.optim.AdamW(critic, lr=1e-2, fused=True),
        ]

    def step(self, run: Any, x: Tensor) -> None:
        generator, critic = run.optimizers()
        made = self.blocks[1](self.blocks[0](self.stem(x)))
        fooled = self.head(self.blocks[3](self.blocks[2](made))).mean()
        told = self.head(self.blocks[3](self.blocks[2](made.detach()))).square().mean()
        critic.zero_grad()
        run.manual_backward(told)
        critic.step()
        generator.zero_grad()
        run.manual_backward(fooled)
        generator.step()


class EditedWhileGathered(Between):
    """A weight is edited inside of `gathered` (a plain Trainer's: where it is)."""

    def change(self, run: Any, optimizer: Any) -> None:
        strategy = run.trainer.strategy
        if not hasattr(strategy, "gathered"):
            with torch.no_grad():
                self.blocks[2].up.weight.mul_(0.5)
            return
        with strategy.gathered(self.blocks[2]), torch.no_grad():
            self.blocks[2].up.weight.mul_(0.5)


class DataEditedWhileGathered(EditedWhileGathered):
    """By way of `.data`, which torch does not see."""

    def change(self, run: Any, optimizer: Any) -> None:
        strategy = run.trainer.strategy
        if not hasattr(strategy, "gathered"):
            self.blocks[2].up.weight.data.mul_(0.5)
            return
        with strategy.gathered(self.blocks[2]):
            self.blocks[2].up.weight.data.mul_(0.5)


class PermutedWhileGathered(EditedWhileGathered):
    """Permutes the weights: the same numbers in another order."""

    def change(self, run: Any, optimizer: Any) -> None:
        strategy = run.trainer.strategy
        with strategy.gathered(self.blocks[2]) if hasattr(strategy, "gathered") else nullcontext(), torch.no_grad():
            self.blocks[2].up.weight.copy_(self.blocks[2].up.weight.flip(0))


RAISES_IN_PLAIN = [Between, Retained, OfTheBatchBefore, EditedWhileGathered, PermutedWhileGathered]
HIDDEN_IN_PLAIN = [Fused, RetainedFused, Adversary, DataEditedWhileGathered]


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", RAISES_IN_PLAIN + HIDDEN_IN_PLAIN, ids=lambda program: program.__name__)
def test_a_change_between_a_forward_and_its_backward_is_refused(strategy_at, program: type[Odd], place: str) -> None:
    ours = outcome(program, strategy_at(place))
    assert isinstance(ours, RuntimeError) and "modified by an inplace operation" in str(ours), ours


@pytest.mark.parametrize("program", RAISES_IN_PLAIN, ids=lambda program: program.__name__)
def test_a_plain_trainer_raises_the_same(program: type[Odd]) -> None:
    plain = plain_outcome(program)
    assert isinstance(plain, RuntimeError) and "modified by an inplace operation" in str(plain)


class ReadWhileGathered(EditedWhileGathered):
    """A weight is read alone, in a block that would keep edits."""

    fused = True

    def change(self, run: Any, optimizer: Any) -> None:
        strategy = run.trainer.strategy
        if hasattr(strategy, "gathered"):
            with strategy.gathered(self.blocks[2]):
                float(self.blocks[2].up.weight.sum())


class StepOfOthers(Fused):
    """The parameters that are stepped in between are not in the graph of the other loss."""

    def step(self, run: Any, x: Tensor) -> None:
        one, two = run.optimizers()
        early = self.blocks[0](self.stem(x)).square().mean()
        late = self.head(self.blocks[3](self.stem(x).detach())).square().mean()
        two.zero_grad()
        run.manual_backward(late)
        two.step()
        one.zero_grad()
        run.manual_backward(early)
        one.step()
        run.losses.append(early.detach().clone())


class TwiceWithoutAStep(Fused):
    """Runs the same graph's backward twice, and the steps after both."""

    def step(self, run: Any, x: Tensor) -> None:
        loss = self.loss(x)
        run.manual_backward(loss, retain_graph=True)
        run.manual_backward(loss)
        for optimizer in run.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.detach().clone())


class InTurn(Between):
    """Each loss is computed behind the step before."""

    fused = True

    def step(self, run: Any, x: Tensor) -> None:
        for optimizer in run.optimizers():
            loss = self.loss(x)
            run.odd.zero_grad()
            run.manual_backward(loss)
            optimizer.step()
            run.losses.append(loss.detach().clone())


@pytest.mark.diagonal
@pytest.mark.parametrize("place", [each for each in PLACES if each != "lock_free"])
@pytest.mark.parametrize(
    "program", [ReadWhileGathered, StepOfOthers, TwiceWithoutAStep, InTurn], ids=lambda program: program.__name__
)
def test_what_changes_no_weight_of_the_graph_is_as_a_plain_trainer(strategy_at, program: type[Odd], place: str) -> None:
    assert_same(program, strategy_at(place))


class OneByOne(Odd):
    """Each parameter has an optimizer, which steps as soon as the parameter has its gradient."""

    manual = True
    fails = False

    def optimizers_of(self) -> Any:
        return [torch.optim.SGD([each], lr=1e-2, fused=True) for each in self.parameters()]

    def step(self, run: Any, x: Tensor) -> None:
        if not run.losses:
            for parameter, optimizer in zip(self.parameters(), run.optimizers(), strict=True):
                parameter.register_post_accumulate_grad_hook(partial(self._steps, optimizer))
        for _ in range(2):
            if self.fails and len(run.losses) == 2:
                with pytest.raises(ValueError, match="mine"):
                    run.manual_backward(self._failing(x))
            loss = self.loss(x)
            run.manual_backward(loss)
            run.losses.append(loss.detach().clone())

    def _steps(self, optimizer: Any, _: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def _failing(self, x: Tensor) -> Tensor:
        """A loss whose backward ends behind the last but one block."""
        x = self.blocks[0](self.stem(x))
        x.register_hook(fail)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def fail(_: Tensor) -> None:
    raise ValueError("mine")


class OneByOneAndFails(OneByOne):
    """A pass fails in between, and the step goes on."""

    fails = True


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["ram", "all_on_disk", "tight", "tight_recomputed"])
@pytest.mark.parametrize("program", [OneByOne, OneByOneAndFails], ids=lambda program: program.__name__)
def test_steps_within_a_backward(strategy_at, program: type[Odd], place: str) -> None:
    recomputed = {"recompute": "all"} if place == "all_on_disk" else {}
    assert_same(program, strategy_at(place, **recomputed))
