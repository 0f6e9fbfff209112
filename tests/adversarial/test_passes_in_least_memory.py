"""Steps of several passes, and products of weights that are used twice, with the least device memory that a plan takes: the
numbers of a plain Trainer, or the error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.odd import WIDTH, Block, Odd, assert_refused, assert_same
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Cached(Odd):
    """parametrize.cached() around the whole forward."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def __init__(self) -> None:
                super().__init__()
                self.square = nn.Linear(WIDTH, WIDTH)
                parametrize.register_parametrization(self.square, "weight", Symmetric())

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x + self.square(x))

        return OfBlock()

    def loss(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().loss(x)


class CachedInAUnit(Cached):
    """A layer is used twice within its unit, under parametrize.cached()."""

    def block(self) -> nn.Module:
        inner: Any = type(super().block())

        class OfBlock(inner):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Tensor:
                with parametrize.cached():
                    return super().forward(x) + self.square(x)  # type: ignore[no-any-return]

        return OfBlock()

    def loss(self, x: Tensor) -> Tensor:
        return self.through(x).square().mean()


class CachedTwice(Cached):
    """Each unit is called twice under parametrize.cached()."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class Normed(Cached):
    """Weight norm, under parametrize.cached()."""

    def block(self) -> nn.Module:
        block = Block()
        weight_norm(block.up)
        return block


class Product(Odd):
    """A unit keeps a product of its weights from its first call for its second."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            product: Tensor | None = None

            def forward(self, x: Tensor) -> Tensor:
                if self.product is None:
                    self.product = self.down.weight @ self.up.weight
                else:
                    x = x + x @ self.product.T
                return super().forward(x)

        return OfBlock()

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            block.product = None  # type: ignore[assignment]
            x = block(block(x))
            block.product = None  # type: ignore[assignment]
        return self.head(x)  # type: ignore[no-any-return]


class ProductHandedIn(Odd):
    """The caller hands the product of the first call to the second."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor, product: Tensor | None = None) -> Any:
                if product is not None:
                    return super().forward(x + x @ product.T)
                return super().forward(x), self.down.weight @ self.up.weight

        return OfBlock()

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x, product = block(x)
            x = block(x, product)
        return self.head(x)  # type: ignore[no-any-return]


class Policy(Odd):
    """Three steps on one batch, as PPO takes them."""

    manual = True

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x, x, x)

    def step(self, run: Any, x: Tensor) -> None:
        optimizer = run.optimizers()
        with torch.no_grad():
            old = self.through(x).log_softmax(-1)
        for part in self.parts(x):
            new = self.through(part).log_softmax(-1)
            before = old[: len(part)]
            loss = ((new - before).exp().clamp(0.8, 1.2) * before).mean() + new.square().mean()
            optimizer.zero_grad()
            run.manual_backward(loss)
            optimizer.step()
            run.losses.append(loss.detach().clone())


class PolicyInParts(Policy):
    """On parts of the batch, and on all of it."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x[:1], x[1:], x)


class OfWeights(Odd):
    """autograd.grad for all weights, which gets into `.grad`."""

    manual = True

    def step(self, run: Any, x: Tensor) -> None:
        optimizer, loss, weights = run.optimizers(), self.loss(x), [*self.parameters()]
        optimizer.zero_grad()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        optimizer.step()
        run.losses.append(loss.detach().clone())


class OfTheInput(Odd):
    """autograd.grad for the input, before the backward through the same graph."""

    def step(self, run: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().step(run, x)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        run.losses.append(gradient.clone())
        return loss  # type: ignore[no-any-return]


class Perturbed(Odd):
    """Trains on inputs that autograd.grad has moved (adversarial training)."""

    def step(self, run: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(x), x)
        return super().step(run, x.detach() + 0.1 * gradient.sign())  # type: ignore[no-any-return]


class OfTheMiddle(Odd):
    """autograd.grad for what is between two blocks."""

    def step(self, run: Any, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks[:2]:
            x = block(x)
        middle = x
        for block in self.blocks[2:]:
            x = block(x)
        loss = self.head(x).square().mean()
        run.losses.append(torch.autograd.grad(loss, middle, retain_graph=True)[0].norm())
        return loss


class Balanced(Odd):
    """Two losses, weighed by the norms of their gradients of one weight (VQGAN)."""

    def step(self, run: Any, x: Tensor) -> Tensor:
        one, two, weight = self.loss(x), self.through(x).abs().mean(), self.blocks[-1].down.weight
        norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in (one, two)]  # type: ignore[arg-type]
        run.losses.append(norms[0] / norms[1])
        return one + (norms[0] / norms[1]).detach() * two


ANYWHERE = [Cached, CachedInAUnit, CachedTwice, Normed, Product, ProductHandedIn, Policy, PolicyInParts]
GRADIENTS = [OfWeights, OfTheInput, Perturbed, OfTheMiddle]


@pytest.mark.parametrize("place", ["tight", "tight_recomputed"])
@pytest.mark.parametrize("program", ANYWHERE, ids=lambda program: program.__name__)
def test_as_a_plain_trainer(strategy_at, program: type[Odd], place: str) -> None:
    assert_same(program, strategy_at(place))


@pytest.mark.parametrize("program", [*GRADIENTS, Balanced], ids=lambda program: program.__name__)
def test_gradients_of_users(strategy_at, program: type[Odd]) -> None:
    assert_same(program, strategy_at("all_on_disk" if program is Balanced else "tight"))
    assert_same(program, strategy_at("three_tiers", recompute="all"))


@pytest.mark.parametrize("program", [*GRADIENTS, Balanced], ids=lambda program: program.__name__)
def test_gradients_of_users_in_recomputed_units_may_need_more_memory(strategy_at, program: type[Odd]) -> None:
    assert_refused(
        program, strategy_at("tight_recomputed"), "no other unit there can be evicted", "raise device_memory"
    )
