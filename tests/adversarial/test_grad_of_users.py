"""`.grad` is an attribute of its parameter wherever its bytes are: what a user reads there, edits, assigns, or sets to None
counts as it does for a plain Trainer, or is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, judge, run
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import UsageError


class Moves(ByHand):
    """A step with something done to gradients between backward and step, by the name of the method."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.move = getattr(self, name)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.move(optimizer, batch)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)

    # -- moves

    def reads(self, optimizer: Any, batch: Any) -> None:
        for parameter in self.parameters():
            self.note(parameter.grad.norm())
            self.note(parameter.grad.abs().max().item())
        self.note(self.head.weight.grad[1, 2:5].clone())
        self.note(torch.stack([each.grad.sum() for each in self.blocks.parameters()]))
        self.note(float(self.head.bias.grad.numpy()[2]))
        self.note(self.head.bias.grad.tolist())
        self.note(copy.deepcopy(self.first.bias.grad))

    def clips(self, optimizer: Any, batch: Any) -> None:
        self.note(nn.utils.clip_grad_norm_(self.parameters(), 0.01))
        nn.utils.clip_grad_value_(self.blocks.parameters(), 1e-4)
        self.note(self.first.weight.grad.norm())

    def scales(self, optimizer: Any, batch: Any) -> None:
        for parameter in self.blocks[0].parameters():
            parameter.grad.mul_(0.5)
        self.head.weight.grad *= 2
        self.head.bias.grad[1] = 3.0
        self.first.weight.grad.data.add_(1e-3)

    def forgets_one(self, optimizer: Any, batch: Any) -> None:
        self.blocks[1].inner[0].weight.grad = None
        self.head.bias.grad = None

    def forgets_deep_modules(self, optimizer: Any, batch: Any) -> None:
        self.blocks[0].inner.zero_grad()
        self.blocks[1].inner[2].zero_grad(set_to_none=False)
        self.head.zero_grad()

    def forgets_all(self, optimizer: Any, batch: Any) -> None:
        self.zero_grad()
        self.note(all(parameter.grad is None for parameter in self.parameters()))

    def zeroes(self, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        self.note(float(self.head.weight.grad.sum()))

    def assigns(self, optimizer: Any, batch: Any) -> None:
        for parameter in self.blocks[0].parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.head.weight.grad = self.head.weight.grad * 0.25

    def forgets_and_computes_again(self, optimizer: Any, batch: Any) -> None:
        self.blocks[0].zero_grad()
        self.head.weight.grad = None
        self.manual_backward(self.loss(batch) * 0.5)
        self.note(self.head.weight.grad.norm())

    def edits_and_adds(self, optimizer: Any, batch: Any) -> None:
        self.blocks[0].inner[0].weight.grad.mul_(3)
        self.head.weight.grad.mul_(3)
        self.loss(batch).backward()

    def adds_without_being_told(self, optimizer: Any, batch: Any) -> None:
        self.loss(batch).backward()
        (self.head.weight.sum() + self.first.bias.square().sum()).backward()
        self.note(self.head.weight.grad.norm())

    def clips_twice(self, optimizer: Any, batch: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.note(nn.utils.get_total_norm([parameter.grad for parameter in self.parameters()]))
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    def edits_behind_the_step(self, optimizer: Any, batch: Any) -> None:
        optimizer.step()
        self.note(self.head.weight.grad.norm())
        optimizer.zero_grad(set_to_none=False)
        self.note(self.head.weight.grad.norm())

    def keeps(self, optimizer: Any, batch: Any) -> None:
        kept = self.head.weight.grad
        self.note(kept.sum())
        self.head.weight.grad = None
        optimizer.step()
        self.note(kept.sum())

    def swaps(self, optimizer: Any, batch: Any) -> None:
        first, second = self.blocks[0].inner[0].weight, self.blocks[1].inner[0].weight
        first.grad, second.grad = second.grad, first.grad


MOVES = [
    name for name in vars(Moves) if not name.startswith("_") and name not in ("training_step", "configure_optimizers")
]


@pytest.mark.diagonal
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("where", ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free"])
def test_what_is_done_to_grad_counts(name: str, where: str, strategy_at: MakeStrategy) -> None:
    judge(lambda: Moves(name), strategy_at(where), limit_train_batches=2)


class FromAutogradGrad(ByHand):
    """Gradients that no backward pass has put there."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            parameter.grad = gradient
        self.optimizers().step()  # type: ignore[union-attr]


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_gradients_of_autograd_grad_are_applied(tier: str, strategy_at: MakeStrategy) -> None:
    judge(FromAutogradGrad, strategy_at(tier))


class InHooks(Judged):
    """Automatic optimization: hooks that look, and one that edits."""

    def on_after_backward(self) -> None:
        self.note(self.head.weight.grad.norm())
        self.blocks[0].inner[0].weight.grad.clamp_(-1e-3, 1e-3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            self.note(parameter.grad.norm())
        self.first.weight.grad = None


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}])
def test_hooks_see_and_change_gradients(options: dict[str, Any], tier: str, strategy_at: MakeStrategy) -> None:
    judge(InHooks, strategy_at(tier), **options)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_gradients_that_were_read_are_ordinary_ones_when_the_run_has_ended(
    tier: str, strategy_at: MakeStrategy
) -> None:
    """Under mixed precision, too, where those of a run have 16 bits and parameters after it 32."""

    class Looks(Judged):
        def on_after_backward(self) -> None:
            self.read = [float(parameter.grad.norm()) for parameter in self.parameters()]

    module = run(Looks, strategy_at(tier), precision="bf16-mixed")
    if tier == "lock_free":  # the updates have used the pages of gradients, and those of the next step would be there
        assert all(parameter.grad is None for parameter in module.parameters())
        return
    for parameter, norm in zip(module.parameters(), module.read, strict=True):
        assert type(parameter.grad) is Tensor and parameter.grad.device == parameter.device
        assert float(parameter.grad.norm()) == pytest.approx(norm, rel=1e-2)


class Afterwards(Judged):
    """Looks at a gradient when the step has been taken."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.note(self.head.weight.grad.norm())


def test_gradients_behind_the_step_are_true_or_refused(strategy_at: MakeStrategy) -> None:
    for options in ({}, {"gradient_clip_val": 0.05}):
        judge(Afterwards, strategy_at("ram"), **options)
        for where in ("masters_on_disk", "three_tiers", "lock_free"):
            try:
                judge(Afterwards, strategy_at(where), **options)
            except UsageError as error:
                assert "gradient of head.weight was read after the step that has used it" in str(error)


class Converted(Judged):
    """A layer is converted and back, right behind a step."""

    forgets = True

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        with strategy.gathered(self) if isinstance(strategy, AngelPTMStrategy) else nullcontext():
            if self.forgets:
                self.zero_grad()
            self.head.double().float()


class ConvertedWithGradients(Converted):
    """Conversion with gradients that the step has used."""

    forgets = False


@pytest.mark.parametrize("where", ["ram", "all_on_disk", "three_tiers"])
def test_a_layer_that_is_converted_there_and_back(strategy_at: MakeStrategy, where: str) -> None:
    judge(Converted, strategy_at(where))
    if where == "ram":
        judge(ConvertedWithGradients, strategy_at(where))
    else:
        with pytest.raises(
            UsageError, match=r"gradient of head.* if you convert the module .* call module.zero_grad\(\) first"
        ):
            run(ConvertedWithGradients, strategy_at(where))


class EditedBehindClipping(Judged):
    """Adds to what was clipped."""

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*args, **options)
        self.head.weight.grad.add_(0.1)


class ReplacedBehindClipping(Judged):
    """Puts another gradient in the place of what was clipped."""

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*args, **options)
        self.head.weight.grad = torch.ones_like(self.head.weight)


class DroppedBehindClipping(Judged):
    """Leaves a parameter out of the step."""

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*args, **options)
        self.head.weight.grad = None


@pytest.mark.parametrize("kind", [EditedBehindClipping, ReplacedBehindClipping])
def test_in_mixed_precision_gradients_that_are_changed_behind_clipping_are_refused(
    strategy_at: MakeStrategy, kind: type[Judged]
) -> None:
    """The update would clip them again."""
    judge(kind, strategy_at("ram"), gradient_clip_val=0.05)
    with pytest.raises(UsageError, match=r"gradient of head.weight was changed when it was clipped already.* before"):
        run(kind, strategy_at("ram"), gradient_clip_val=0.05, precision="bf16-mixed")


def test_in_mixed_precision_a_gradient_may_be_dropped_behind_clipping(strategy_at: MakeStrategy) -> None:
    module = run(DroppedBehindClipping, strategy_at("ram"), gradient_clip_val=0.05, precision="bf16-mixed")
    begun = run(DroppedBehindClipping, None, max_epochs=0)
    assert torch.equal(module.head.weight, begun.head.weight) and not torch.equal(module.head.bias, begun.head.bias)


class Kept(Moves):
    """A gradient that somebody has kept is never another step's."""

    def __init__(self) -> None:
        super().__init__("later")
        self.kept: list[Tensor] = []

    def later(self, optimizer: Any, batch: Any) -> None:
        self.kept.append(self.head.weight.grad)
        if len(self.kept) > 1:
            self.note(self.kept[0].sum())


def test_a_gradient_that_was_kept_is_refused_in_the_next_step(strategy_at: MakeStrategy) -> None:
    with pytest.raises(UsageError, match=r"gradient of head\.weight was read when it was of an earlier step"):
        run(Kept, strategy_at("three_tiers"))


class ChangedTooLate(Moves):
    def __init__(self) -> None:
        super().__init__("late")

    def late(self, optimizer: Any, batch: Any) -> None:
        optimizer.step()
        for parameter in self.parameters():
            parameter.grad.zero_()


def test_a_gradient_that_changes_while_its_update_waits_is_refused_or_was_used(strategy_at: MakeStrategy) -> None:
    judge(ChangedTooLate, strategy_at("ram"))
    judge(ChangedTooLate, strategy_at("three_tiers"))
    with pytest.raises(UsageError, match=r"was changed in place after the optimizer's step.*self\.clip_gradients"):
        run(ChangedTooLate, strategy_at("masters_on_disk"))
