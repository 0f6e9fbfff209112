"""Code of the user's between the end of a backward pass and the update, in none of Lightning's hooks for it: it finds the
gradients of the pass in `.grad`, and what it writes there counts."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, judge
from torch import Tensor

PLACES = ["ram", "masters_on_disk", "three_tiers", "lock_free", "tight", "tight_recomputed"]


def halve(optimizer: torch.optim.Optimizer) -> None:
    """Halves the gradients, as most such code is written: without a gradient it does nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class InStep(Judged):
    """A function in the place of `optimizer.step`, which changes gradients behind the closure and calls the class's."""

    def replace(self, made: torch.optim.Optimizer) -> None:
        original = made.step

        def step(closure: Callable[[], Any]) -> Any:
            with torch.enable_grad():
                result = closure()
            self.change(made)
            original()
            return result

        made.step = step  # type: ignore[method-assign, assignment]

    def change(self, made: torch.optim.Optimizer) -> None:
        halve(made)

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.replace(made)
        return made


class Clips(InStep):
    def change(self, made: torch.optim.Optimizer) -> None:
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01))


class UnderASchedule(InStep):
    """torch's schedulers put a function of their own around it."""

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
        original = type(made).step

        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
            with torch.enable_grad():
                result = closure()
            halve(optimizer)
            original(optimizer)
            return result

        made.step = types.MethodType(step, made)  # type: ignore[method-assign]
        return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.StepLR(made, 1, 0.5)}


class FromTheSecondStepOn(InStep):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.replace(self.trainer.optimizers[0])


class InBackward(Judged):
    """`LightningModule.backward` is overridden."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        halve(self.trainer.optimizers[0])


class BehindLightnings(Judged):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01))


class TwoPasses(Judged):
    """Sets the gradients of the first pass aside and subtracts them from the sum again."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        first = [each.grad.clone() for each in self.parameters()]
        self.zero_grad()
        loss.mul(3).backward()
        for parameter, gradient in zip(self.parameters(), first, strict=True):
            parameter.grad = parameter.grad - gradient


class Asks(Judged):
    """The gradients are asked for, and assigned."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient


class NotAlways(Judged):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx != 1:
            loss.backward()


class OfTheObject(Judged):
    """The method is put into the module when the run has begun."""

    def on_train_start(self) -> None:
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()
            halve(self.trainer.optimizers[0])

        self.backward = backward  # type: ignore[method-assign]


class InManual(ByHand):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        halve(self.trainer.optimizers[0])

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


KINDS = [
    InStep,
    Clips,
    UnderASchedule,
    FromTheSecondStepOn,
    InBackward,
    BehindLightnings,
    TwoPasses,
    Asks,
    NotAlways,
    OfTheObject,
    InManual,
]


@pytest.mark.diagonal
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_done_to_gradients_counts(
    kind: type[Judged], place: str, accumulated: int, strategy_at: MakeStrategy
) -> None:
    manual = kind is InManual
    judge(kind, strategy_at(place), **({} if manual else {"accumulate_grad_batches": accumulated}))
