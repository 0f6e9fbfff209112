"""Replacement of a unit's forward: what is recomputed, with which buffers, and which parts are notified."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.autograd.recompute import (
    ForwardWrapper,
    Recompute,
    RecomputedForwardWrapper,
    once,
    recomputed_around,
    recomputed_units,
    replace,
    stand_in,
)
from lightning_ptm.runtime.units.discovery import Unit


class Counts(nn.Module):
    """Counts its calls; its buffer has as many as were not forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.total))
        self.total += 1
        return (x * self.weight).exp()


def unit_of(module: nn.Module, index: int = 1, name: str = "block") -> Unit:
    return Unit(index, name, module, (), ())


def made(module: nn.Module) -> tuple[Recompute, Any, list[int]]:
    """A call of the module that is recomputed, and which units were told to start again."""
    started: list[int] = []
    recompute = Recompute(module, started.append, lambda module: dict)
    return recompute, recompute.of(unit_of(module), module.forward), started


def test_a_forward_is_computed_again_in_the_backward_with_the_buffers_of_the_first() -> None:
    module = Counts()
    recompute, call, started = made(module)
    x = torch.full((3,), 0.5, requires_grad=True)
    loss = call(x).sum()
    assert (module.calls, started) == (1, [])
    module.total += 10  # by another call, say
    with recompute.checked():
        loss.backward()
    assert (module.calls, started, module.seen) == (1, [1], [0.0])  # I3: changed once
    assert module.total.item() == 11
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())


def test_nothing_is_kept_where_nothing_is_recomputed() -> None:
    module = Counts()
    _, call, started = made(module)
    with torch.no_grad():
        call(torch.ones(3))
    assert (module.calls, started) == (1, [])
    torch.func.vmap(call)(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert (module.calls, started) == (2, [])
    checkpoint(call, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert (module.calls, started) == (4, [])  # I1: by the user's alone, once


class Differs(nn.Module):
    """By what is outside of the module: each call gets the next number."""

    def __init__(self) -> None:
        super().__init__()
        numbers = iter(range(9))
        self.number = lambda: next(numbers)

    def forward(self, x: Tensor) -> Tensor:
        return x[self.number() :].exp()


class Ends(Differs):
    def forward(self, x: Tensor) -> Tensor:
        if self.number():
            raise StopIteration
        return x.exp()


class DiffersInNumbers(Differs):
    def forward(self, x: Tensor) -> Tensor:
        return (x + self.number()).exp()


class DiffersInOneNumber(Differs):
    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.arange(x.numel()) * 1e-6 * self.number()).sin().exp()


@pytest.mark.parametrize("build", [Differs, Ends, DiffersInNumbers, DiffersInOneNumber])
def test_a_forward_that_does_not_repeat_itself_is_refused_by_name(build: type[nn.Module]) -> None:
    recompute, call, _ = made(build())
    loss = call(torch.ones(3, requires_grad=True)).sum()
    says = rf"block \({build.__name__}\) did something else when it was recomputed"  # I2
    with pytest.raises(UsageError, match=says), recompute.checked():
        loss.backward()


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_replaced_attributes_are_taken_back_in_any_order(order: tuple[int, ...]) -> None:
    """A unit that is recomputed by choice is wrapped after what divides sequences, and ends after it."""
    module = nn.Linear(1, 1)
    module.calls = 5  # type: ignore[assignment]
    undo = [replace(module, calls=number, forward=number) for number in range(3)]
    left = [0, 1, 2]
    for at in order:
        undo[at]()
        left.remove(at)
        assert module.calls == (left[-1] if left else 5)
    assert "forward" not in vars(module) and "__getstate__" not in vars(module)


def test_attributes_are_given_back() -> None:
    module = Counts()
    module.calls = 5
    undo = replace(module, calls=7, mine=1)
    assert (module.calls, module.mine) == (7, 1)
    undo()
    assert module.calls == 5 and not hasattr(module, "mine")


class GradientCheckpointingLayer(Counts):
    """Stand-in of transformers' class."""

    gradient_checkpointing = False


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = GradientCheckpointingLayer()
        self.gradient_checkpointing = False


def test_models_around_layers_that_checkpoint_themselves_are_told_and_told_back() -> None:
    model = Around()
    recompute = Recompute(model, lambda unit: None, lambda module: dict)
    call: Any = recompute.of(unit_of(model.layer), model.layer.forward)
    assert model.gradient_checkpointing
    model.layer.gradient_checkpointing = True  # the user's, which recomputes it already
    call(torch.ones(3, requires_grad=True)).sum().backward()
    assert model.layer.calls == 1  # I1
    recompute.close()
    assert model.gradient_checkpointing is False


@pytest.mark.parametrize(("every", "expected"), [(0, set()), (1, {1, 2, 3, 4}), (2, {1, 3}), (9, {1})])
def test_which_units_are_recomputed(every: int, expected: set[int]) -> None:
    assert recomputed_units(5, every) == expected


def test_units_inside_of_recomputed_ones_go_with_the_outermost() -> None:
    names = ["", "a", "a.x", "a.x.y", "ab", "b", "b.x"]
    units = [unit_of(nn.Identity(), index, name) for index, name in enumerate(names)]
    assert recomputed_around(units, {1, 2, 6}) == {2: 1, 3: 1}
    assert recomputed_around(units, {5}) == {6: 5}


def test_what_was_exchanged_is_not_exchanged_again() -> None:
    exchanged: list[int] = []

    class Exchanges(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def exchange() -> torch.Tensor:
                exchanged.append(1)
                return torch.full((3,), float(len(exchanged)))

            return (x * once(exchange)).sin() + once(exchange)

    _, call, _ = made(Exchanges())
    x = torch.ones(3, requires_grad=True)
    call(x).sum().backward()
    assert len(exchanged) == 2
    assert torch.allclose(x.grad, torch.ones(3).cos())  # type: ignore[arg-type]
    once(lambda: exchanged.append(1) or torch.zeros(()))  # type: ignore[func-returns-value]
    assert len(exchanged) == 3  # outside of such a call


def test_what_was_written_to_since_is_exchanged_again() -> None:
    exchanged: list[int] = []

    class Exchanges(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def exchange() -> torch.Tensor:
                exchanged.append(1)
                return torch.ones(3)

            return (x * once(exchange).add_(1)).sin()

    _, call, _ = made(Exchanges())
    x = torch.ones(3, requires_grad=True)
    call(x).sum().backward()
    assert len(exchanged) == 2
    assert torch.allclose(x.grad, 2 * torch.full((3,), 2.0).cos())  # type: ignore[arg-type]


def plus_one(inside: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: inside(x) + 1


def test_it_computes_around_what_is_inside_and_has_its_name() -> None:
    module = nn.Identity()
    around = ForwardWrapper(plus_one, module.forward)
    assert around(torch.tensor(2.0)) == 3
    assert around.__name__ == "forward" and around.inside == module.forward


def test_the_same_around_another() -> None:
    for kind in (ForwardWrapper, RecomputedForwardWrapper):
        other = kind(plus_one, nn.Identity().forward).with_inside(lambda x: 10 * x)
        assert type(other) is kind and other(torch.tensor(2.0)) == 21


def test_what_stands_in_comes_inside_and_is_taken_back() -> None:
    module = nn.Identity()
    module.forward = ForwardWrapper(plus_one, module.forward)  # type: ignore[method-assign, assignment]
    back = stand_in(module, lambda x: 10 * x)
    assert module(torch.tensor(2.0)) == 21
    back()
    assert module(torch.tensor(2.0)) == 3


def test_what_stands_in_for_a_plain_module_leaves_nothing_behind() -> None:
    plain = nn.Identity()
    back = stand_in(plain, lambda x: 10 * x)
    assert plain(torch.tensor(2.0)) == 20
    back()
    assert plain(torch.tensor(2.0)) == 2 and "forward" not in vars(plain)
