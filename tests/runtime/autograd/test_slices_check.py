"""The check of slices: units in which samples meet are refused, and the check changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.autograd.recompute import Recompute
from lightning_ptm.runtime.units.discovery import Unit

SAMPLES, WIDTH = 6, 4


def sliced(module: nn.Module, slices: int = 3) -> Any:
    unit = Unit(1, "block", module, (), ())
    return Recompute(module, lambda _: None, lambda _: dict).of(unit, module.forward, slices=slices)


class Refused(nn.Module):
    """Base of the modules that cannot be computed on slices."""

    reason = ""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.setup()

    def setup(self) -> None:
        pass


class Normed(Refused):
    reason = "its results for a sample depend on the other samples"

    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2))


class Contrasts(Refused):
    reason = r"result 0 has shape \(2, 2\) for two samples, and \(1, 1\) for one"

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x).flatten(1)
        return found @ found.t()


class ReturnsALoss(Refused):
    reason = r"result 1 has shape \(\), without a dimension of samples, and depends on them"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear(x).square().mean()


class Rolls(Refused):
    reason = "its results for a sample depend on how many others there are"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).roll(2, 0)


@pytest.mark.parametrize("slices", [2, 8])
@pytest.mark.parametrize("shift", range(1, 8))
def test_every_shift_of_the_samples_is_refused(shift: int, slices: int) -> None:
    class Shifts(Refused):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).roll(shift, 0)

    with pytest.raises(ConfigError, match="a sample"):
        sliced(Shifts(), slices)(torch.randn(8, 2, WIDTH, requires_grad=True))


@pytest.mark.parametrize("shift", [6, 30])
def test_a_long_shift_is_refused_by_a_later_check(shift: int) -> None:
    class Shifts(Refused):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).roll(shift, 0)

    call = sliced(Shifts(), 8)
    with pytest.raises(ConfigError, match="depend on how many others there are"):
        for _ in range(2):
            call(torch.randn(64, 2, WIDTH, requires_grad=True))


def test_samples_that_are_equal_in_all_calls_are_told_apart() -> None:
    with pytest.raises(ConfigError, match=Rolls.reason):
        sliced(Rolls())(torch.randn(1, 2, WIDTH).expand(SAMPLES, 2, WIDTH))


class MeetsWithoutGradient(Refused):
    reason = "its results for a sample depend on the other samples"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x / x.detach().abs().amax())


class MeetsInTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1e-6 * gradient.mean(0)


class MixesGradients(Refused):
    reason = "a sample's results have a gradient with respect to another sample"

    def forward(self, x: Tensor) -> Tensor:
        return MeetsInTheBackward.apply(self.linear(x))


class AddsALoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1e-6


class Balances(Refused):
    reason = "its backward adds gradients of its own, such as those of a balance loss"

    def forward(self, x: Tensor) -> Tensor:
        return x + AddsALoss.apply(self.linear(x.detach()))


class Counts(Refused):
    reason = "it writes to seen, with other values for slices"

    def setup(self) -> None:
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.linear(x)


class Keeps(Refused):
    reason = "it leaves a result in loss, where only that of one slice would remain"

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        self.loss = found.square().mean()
        return found


class HandsOn(Refused):
    reason = "a tensor that it computes is read by others than its caller"

    def setup(self) -> None:
        taken: list[Tensor] = []
        self.linear.register_forward_hook(lambda _, args, result: taken.append(result))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp()


class Draws(Refused):
    reason = "it draws random numbers other than dropout's"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.randperm(WIDTH)


class KnowsTheBatch(Refused):
    reason = r"two samples, or one, cannot be computed \(RuntimeError: shape"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(SAMPLES, -1)


class PenalizesZeros(Refused):
    """Its loss and the loss's gradients are 0 at first, as those of a divergence whose layer is initialized with 0."""

    reason = "a result without a dimension of samples is computed from them"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), (0 * x).square().mean()


class CountsCalls(Refused):
    reason = "it changes calls in each call, and each slice is a call"

    def setup(self) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Warms(Refused):
    reason = "it returns something else when it is called again"

    def setup(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Overwrites(Refused):
    reason = "it writes to a tensor among its arguments"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


class ChecksItself(Refused):
    reason = r"gradients of two samples, or of one, cannot be computed \(When use_reentrant"

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("build", Refused.__subclasses__())
def test_units_in_which_samples_meet_are_refused_by_name(build: type[Refused]) -> None:
    torch.manual_seed(0)
    module = build()
    with pytest.raises(
        ConfigError, match=rf"block \({build.__name__}\) cannot be computed in slices.*: {build.reason}"
    ):
        sliced(module)(torch.randn(SAMPLES, 2, WIDTH, requires_grad=True))


class Attributes:
    """An argument that a unit leaves results in."""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "it writes to a list or a dictionary among its arguments"),
        ({}, "it writes to a list or a dictionary among its arguments"),
        (Attributes(), "it writes to attributes of an argument, a Attributes"),
    ],
)
def test_units_that_leave_results_in_arguments_are_refused(given: Any, reason: str) -> None:
    class Leaves(Refused):
        def forward(self, x: Tensor, into: Any) -> Tensor:
            found = self.linear(x)
            if isinstance(into, list):
                into.append(found.mean())
            else:
                (into if isinstance(into, dict) else vars(into))["mean"] = found.detach().mean()
            return found

    with pytest.raises(ConfigError, match=reason):
        sliced(Leaves())(torch.randn(SAMPLES, 2, WIDTH), given)


def test_samples_that_meet_behind_a_gate_are_refused_once_it_is_open() -> None:
    class Gated(Refused):
        def setup(self) -> None:
            self.gate = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.gate * x.detach().mean(0)

    module, x = Gated(), torch.randn(SAMPLES, 2, WIDTH)
    call = sliced(module)
    call(x)
    module.gate = 1.0  # as after an update
    with pytest.raises(ConfigError, match="depend on the other samples"):
        call(x)


def test_a_submodule_that_trains_later_is_checked_again() -> None:
    class Frozen(Refused):
        def setup(self) -> None:
            self.norm = nn.BatchNorm1d(2).eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

    module, x = Frozen(), torch.randn(SAMPLES, 2, WIDTH)
    call = sliced(module)
    for _ in range(20):
        call(x)
    module.norm.train()
    with pytest.raises(ConfigError, match="depend on the other samples"):
        call(x)


def test_lengths_in_a_list_are_checked_whenever_they_change() -> None:
    class OfLengths(Refused):
        def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
            return torch.stack([self.linear(row) * length for row, length in zip(x, lengths, strict=False)])

    call, x = sliced(OfLengths()), torch.randn(SAMPLES, 2, WIDTH)
    call(x, [1] * SAMPLES)
    with pytest.raises(ConfigError, match="depend on the other samples"):
        call(x, [*range(SAMPLES)])


class Dropped(Refused):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), 1, 1) < 0.7  # stochastic depth
        return F.dropout(self.linear(x), 0.3, self.training) * kept


def test_the_check_leaves_random_numbers_buffers_and_gradients_alone() -> None:
    class Changes(Dropped):
        def setup(self) -> None:
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.fill_(7)
            return super().forward(x)

    module, x = Changes(), torch.randn(SAMPLES, 2, WIDTH, requires_grad=True)
    call = sliced(module)
    outcomes = []
    for _ in range(2):  # with the check, and without
        module.calls.zero_()
        torch.manual_seed(4)
        found = call(x)
        assert all(each.grad is None for each in module.parameters())
        outcomes.append((found.detach(), torch.get_rng_state()))
        assert module.calls.item() == 7
    assert all(map(torch.equal, *outcomes))


def test_the_check_calls_no_hook_on_gradients_of_parameters() -> None:
    module, calls = Rolls(), list[Tensor]()
    module.linear.weight.register_hook(calls.append)
    with pytest.raises(ConfigError, match=Rolls.reason):
        sliced(module)(torch.randn(SAMPLES, 2, WIDTH))
    assert calls == [] and len(module.linear.weight._backward_hooks) == 1  # type: ignore[arg-type]


def test_a_call_of_another_kind_is_checked_again() -> None:
    class Sometimes(Refused):
        def forward(self, x: Tensor, meet: bool = False) -> Tensor:
            return self.linear(x - x.mean(0) if meet else x)

    call, x = sliced(Sometimes()), torch.randn(SAMPLES, 2, WIDTH)
    call(x)
    with pytest.raises(ConfigError, match="depend on the other samples"):
        call(x, meet=True)
