"""Weights that somebody other than the run's optimizers writes to in a step: as with a plain Trainer where what is written is
the weight's value from then on, and an error that names the weight where a copy alone would have it.

Most of these writes leave no version behind: they go through `.data`, views in numpy, addresses, or kernels of torch's own.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, assert_alike, batches, run, trainer
from torch import Tensor, nn

from lightning_ptm.errors import UsageError

ROUNDED = "ram, bf16-mixed"
PLACES = ["ram", ROUNDED, "masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "lock_free_three_tiers"]
LR = 1e-2


class OfTheHead(ByHand):
    """The head is in none of the run's optimizers; `update` does it."""

    def configure_optimizers(self) -> Any:
        head = {id(parameter) for parameter in self.head.parameters()}
        return torch.optim.AdamW([each for each in self.parameters() if id(each) not in head], lr=LR, fused=True)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        known = self.optimizers()
        known.zero_grad()
        for parameter in self.head.parameters():
            parameter.grad = None
        self.manual_backward(self.loss(batch))
        known.step()
        self.update(list(self.head.parameters()))

    def update(self, parameters: list[nn.Parameter]) -> None:
        raise NotImplementedError


class Fused(OfTheHead):
    """An optimizer whose fused kernel raises no version."""

    own: list[torch.optim.Optimizer]

    def configure_optimizers(self) -> Any:
        self.own = [torch.optim.AdamW(self.head.parameters(), lr=LR, fused=True)]
        return super().configure_optimizers()

    def update(self, parameters: list[nn.Parameter]) -> None:
        self.own[0].step()


class Foreach(Fused):
    def configure_optimizers(self) -> Any:
        self.own = [torch.optim.SGD(self.head.parameters(), lr=LR, momentum=0.9, foreach=True)]
        return OfTheHead.configure_optimizers(self)


class Lookahead:
    """A wrapper that is no torch optimizer, around one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.slow = [parameter.detach().clone() for group in inner.param_groups for parameter in group["params"]]

    def step(self) -> None:
        self.inner.step()
        fast = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        for slow, parameter in zip(self.slow, fast, strict=True):
            slow.lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(slow)


class Wrapped(Fused):
    def configure_optimizers(self) -> Any:
        self.own = [Lookahead(torch.optim.SGD(self.head.parameters(), lr=LR))]  # type: ignore[list-item]
        return OfTheHead.configure_optimizers(self)


class NoClass(OfTheHead):
    """Descent by hand."""

    def update(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data.sub_(parameter.grad, alpha=LR)


class ManyAtOnce(OfTheHead):
    def update(self, parameters: list[nn.Parameter]) -> None:
        torch._foreach_add_([each.data for each in parameters], [each.grad for each in parameters], alpha=-LR)


class Kernel(OfTheHead):
    """The kernel that torch's SGD calls."""

    @torch.no_grad()
    def update(self, parameters: list[nn.Parameter]) -> None:
        torch._fused_sgd_(
            parameters,
            [each.grad for each in parameters],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=LR,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Numpy(OfTheHead):
    def update(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            view = parameter.detach().float() if parameter.dtype is torch.bfloat16 else parameter.detach()
            view.numpy()[...] -= LR


class Address(OfTheHead):
    def update(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            new = parameter.detach() * 0.9
            ctypes.memmove(parameter.data_ptr(), new.data_ptr(), new.numel() * new.element_size())


class Shared(OfTheHead):
    """Through a capsule that another library would read."""

    def update(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            torch.from_dlpack(parameter.detach()).mul_(0.9)


class InHooks(ByHand):
    """Updates a parameter that is in no optimizer of the run in a hook, when its gradient comes."""

    def configure_optimizers(self) -> Any:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook(parameter))
        return None

    def hook(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        own = torch.optim.AdamW([parameter], lr=LR, fused=True)

        def step(_: Tensor) -> None:
            own.step()
            own.zero_grad()

        return step

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))


class DataInHooks(InHooks):
    def hook(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def step(_: Tensor) -> None:
            parameter.data.sub_(parameter.grad, alpha=LR)
            parameter.grad = None

        return step


class Clipped(Judged):
    """Weights of a unit are clipped in a hook on its forward, as critics' are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(self.clip)

    @staticmethod
    def clip(block: nn.Module, _: Any) -> None:
        for parameter in block.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Target(Judged):
    """A frozen block follows another one, as target networks do, behind the forward of both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(type(self.blocks[0])().requires_grad_(False))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.data.mul_(0.5)
        return loss


class Normal(Judged):
    """A row of a matrix is normalised between two batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.blocks[0].inner[0].weight.data
        weight.div_(weight.norm())


KINDS = [
    Fused,
    Foreach,
    Wrapped,
    NoClass,
    ManyAtOnce,
    Kernel,
    Address,
    Shared,
    InHooks,
    DataInHooks,
    Clipped,
    Target,
    Normal,
]
KEPT = {"ram", "masters_on_disk", "lock_free"}
"""Where weights that no optimizer of the run has are in RAM, and no copies."""


def fitted(kind: type[Judged], place: str, strategy_at: MakeStrategy, **settings: Any) -> Judged | UsageError:
    tier, _, precision = place.partition(", ")
    try:
        return run(kind, strategy_at(tier, **settings), precision=precision or "32-true")
    except UsageError as error:
        return error


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_writes_count_or_are_refused(kind: type[Judged], place: str, strategy_at: MakeStrategy) -> None:
    ours = fitted(kind, place, strategy_at)
    if isinstance(ours, UsageError):
        assert place != "ram", ours
        names = [name for name, _ in kind().named_parameters()]
        names = [name for name in names if name.startswith("head.")] if issubclass(kind, OfTheHead) else names
        assert any(name in str(ours) for name in names), ours
        return
    assert place in KEPT, f"trained in {place}, where what is written to a copy is lost"
    assert_alike(ours, run(kind, None))


@pytest.mark.parametrize("place", [ROUNDED, "all_on_disk", "three_tiers"])
@pytest.mark.parametrize("kind", [NoClass, ManyAtOnce, Address, DataInHooks, Clipped])
def test_without_poison_a_sample_of_each_weight_is_compared(
    kind: type[Judged], place: str, strategy_at: MakeStrategy
) -> None:
    found = fitted(kind, place, strategy_at, debug={"poison": False})
    assert isinstance(found, UsageError) and "was written to, and it is a copy of values in pages" in str(found)


class OneElement(OfTheHead):
    def update(self, parameters: list[nn.Parameter]) -> None:
        parameters[0].data[1, 3] += 1


class Turned(OfTheHead):
    """Writes the same numbers to other places."""

    def update(self, parameters: list[nn.Parameter]) -> None:
        parameters[0].data.copy_(parameters[0].data.flip(1))


@pytest.mark.parametrize("place", [ROUNDED, "all_on_disk", "three_tiers"])
@pytest.mark.parametrize("kind", [OneElement, Turned])
def test_with_poison_every_element_is_compared(kind: type[Judged], place: str, strategy_at: MakeStrategy) -> None:
    found = fitted(kind, place, strategy_at)
    assert isinstance(found, UsageError) and "the data of parameter head.weight was written to" in str(found)


class InTheLastStep(OfTheHead):
    last = 2

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.index = index
        super().training_step(batch, index)

    def update(self, parameters: list[nn.Parameter]) -> None:
        if self.index == self.last:
            parameters[0].data.mul_(0.5)


def test_a_write_in_the_last_step_is_an_error_and_all_else_is_given_back(strategy_at: MakeStrategy) -> None:
    torch.manual_seed(0)
    module = InTheLastStep()
    with pytest.raises(UsageError, match=r"the data of parameter head.weight was written to"):
        trainer(strategy_at("all_on_disk")).fit(module, batches())
    plain = run(InTheLastStep, None)
    ours = dict(module.named_parameters())
    for name, value in plain.named_parameters():
        assert torch.equal(ours[name] * (0.5 if name == "head.weight" else 1), value), name


class Saved(InTheLastStep):
    last = 1

    def on_train_batch_end(self, *ignored: Any) -> None:
        self.trainer.save_checkpoint(self.path)


def test_no_checkpoint_is_written_without_what_was_written(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    module = Saved()
    module.path = tmp_path / "saved.ckpt"
    with pytest.raises(UsageError, match=r"the data of parameter head.weight was written to"):
        trainer(strategy_at("all_on_disk")).fit(module, batches())
    first = torch.load(module.path, weights_only=True)
    assert first["global_step"] == 1, "the one behind the write was written, too"


class Gathered(OfTheHead):
    """Updates gathered weights: inside `gathered` any optimizer may update them."""

    def configure_optimizers(self) -> Any:
        self.own = [torch.optim.AdamW(self.head.parameters(), lr=LR, fused=True)]
        return super().configure_optimizers()

    def update(self, parameters: list[nn.Parameter]) -> None:
        gradients = [each.grad.clone() for each in parameters]
        gathered = getattr(self.trainer.strategy, "gathered", None)
        if gathered is None:
            self.own[0].step()
            return
        with gathered(self.head):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.own[0].step()
        for parameter in parameters:
            parameter.grad = None


@pytest.mark.parametrize("place", ["ram", "masters_on_disk", "all_on_disk", "three_tiers"])
def test_inside_of_gathered_any_optimizer_steps(place: str, strategy_at: MakeStrategy) -> None:
    assert_alike(run(Gathered, strategy_at(place)), run(Gathered, None))


class AtTestTime(Judged):
    """Adapts to what it is evaluated on, with an optimizer of its own."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            own = torch.optim.AdamW(self.head.parameters(), lr=LR, fused=True)
            self.loss([batch[0].clone()]).backward()
            own.step()
            own.zero_grad()


@pytest.mark.parametrize("place", ["ram", "all_on_disk", "three_tiers"])
def test_in_an_evaluation(place: str, strategy_at: MakeStrategy) -> None:
    def evaluated(strategy: Any) -> AtTestTime:
        torch.manual_seed(0)
        module = AtTestTime()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(strategy, inference_mode=False, limit_val_batches=3).validate(module, batches(), verbose=False)
        return module

    if place == "ram":
        assert_alike(evaluated(strategy_at(place)), evaluated(None))
    else:
        with pytest.raises(
            UsageError, match=r"AdamW.step was called, .* would update .*copies of head.weight, head.bias"
        ):
            evaluated(strategy_at(place))


class WithoutGradients(Judged):
    """Steps an optimizer of its own that finds no gradient."""

    when = "on_train_batch_start"

    def __init__(self) -> None:
        super().__init__()
        self.own = [torch.optim.SGD(self.head.parameters(), lr=LR)]

    def step_of_its_own(self) -> None:
        self.zero_grad()
        self.own[0].step()

    def on_train_epoch_start(self) -> None:
        self.own[0].step()

    def on_train_batch_start(self, *args: Any) -> None:
        self.step_of_its_own()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.step_of_its_own()
        return loss


@pytest.mark.parametrize("place", ["ram", "all_on_disk", "three_tiers", "tight"])
def test_a_step_that_finds_no_gradient_is_none(place: str, strategy_at: MakeStrategy) -> None:
    assert_alike(run(WithoutGradients, strategy_at(place)), run(WithoutGradients, None))


class BehindTheStep(WithoutGradients):
    """Where a plain Trainer has the gradient yet."""

    def step_of_its_own(self) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        self.own[0].step()


class InAClosure(WithoutGradients):
    """A closure may compute gradients."""

    def step_of_its_own(self) -> None:
        self.zero_grad()
        self.own[0].step(lambda: None)


class InABackward(WithoutGradients):
    """In a backward pass gradients are on their way, and have left `.grad` already."""

    def step_of_its_own(self) -> None:
        pass

    def on_fit_start(self) -> None:
        self.first.weight.register_post_accumulate_grad_hook(lambda parameter: self.own[0].step())


@pytest.mark.parametrize("kind", [BehindTheStep, InAClosure, InABackward])
def test_where_there_are_gradients_or_may_be_it_is_refused(
    kind: type[WithoutGradients], strategy_at: MakeStrategy
) -> None:
    with pytest.raises(UsageError, match=r"SGD.step was called, .* would update .*copies of head.weight, head.bias"):
        run(kind, strategy_at("all_on_disk"))
    assert_alike(run(kind, strategy_at("ram")), run(kind, None))


def test_optimizers_of_other_things_step_as_ever(strategy_at: MakeStrategy) -> None:
    """Optimizers whose parameters are in no module step as with a plain Trainer."""

    class Perturbed(Judged):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            delta = nn.Parameter(torch.zeros_like(batch[0]))
            own = torch.optim.AdamW([delta], lr=LR, fused=True)
            (batch[0] + delta).square().sum().backward()
            own.step()
            return self.loss([batch[0] + delta.detach()])

    assert_alike(run(Perturbed, strategy_at("all_on_disk")), run(Perturbed, None))


def test_the_hook_on_all_optimizers_ends_with_the_run(strategy_at: MakeStrategy) -> None:
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks)
    fitted(Fused, "all_on_disk", strategy_at)
    assert len(optimizer._global_optimizer_pre_hooks) == before


class OtherStep(Judged):
    """Another function stands in the place of an optimizer's step, and calls none of torch's."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()

        def step(closure: Callable[[], Any] | None = None) -> None:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=LR)

        made.step = step
        return made


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_is_not_the_optimizers_own(place: str, steps: int, strategy_at: MakeStrategy) -> None:
    tier, _, precision = place.partition(", ")
    try:
        ours = run(OtherStep, strategy_at(tier), precision=precision or "32-true", limit_train_batches=steps)
    except UsageError as error:
        assert place != "ram" and ("AdamW.step" in str(error) or "was read or written" in str(error))
        return
    assert place == "ram"
    assert_alike(ours, run(OtherStep, None, limit_train_batches=steps))
