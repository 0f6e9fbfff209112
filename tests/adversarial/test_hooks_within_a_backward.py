"""Hooks of gradients that do something with the model in the middle of a backward pass in which units are updated: as with a
plain Trainer, which updates nothing before the pass is over, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import WIDTH, Twin, compare, trained
from torch import Tensor, nn

from lightning_ptm.errors import UsageError


class Hooked(Twin):
    """Does something when the gradient of the first block comes: those behind it have theirs."""

    def on_fit_start(self) -> None:
        self.blocks[0].weight.register_hook(lambda _: self.act())

    def gathered(self, module: nn.Module) -> Any:
        gather = getattr(self.trainer.strategy, "gathered", None)
        return nullcontext() if gather is None else gather(module)

    def note(self, value: Tensor) -> None:
        self.losses.append(value.detach().sum())

    def act(self) -> None:
        raise NotImplementedError


class Reads(Hooked):
    def act(self) -> None:
        for value in self.state_dict().values():
            self.note(value)


class Edits(Hooked):
    def act(self) -> None:
        with self.gathered(self.blocks[2]), torch.no_grad():
            self.blocks[2].weight.mul_(0.9)


class Calls(Hooked):
    @torch.no_grad()
    def act(self) -> None:
        self.note(self.blocks[2](torch.ones(2, WIDTH)))


class Clears(Hooked):
    def act(self) -> None:
        if len(self.losses) == 2:
            self.optimizers().zero_grad()


PROGRAMS = [Reads, Edits, Calls, Clears]


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["masters_on_disk", "tight", "tight_recomputed", "all_on_disk"])
@pytest.mark.parametrize("build", PROGRAMS)
def test_what_a_hook_does_behind_an_update_is_refused(
    strategy_at: MakeStrategy, build: type[Hooked], place: str
) -> None:
    with pytest.raises(UsageError, match=r"hook in the backward pass .* has been updated .* on_before_optimizer_step"):
        trained(build, strategy_at(place))


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["masters_on_disk", "tight", "ram", "tight_recomputed"])
@pytest.mark.parametrize("build", PROGRAMS)
def test_where_updates_wait_for_all_gradients_it_is_as_a_plain_trainer(
    strategy_at: MakeStrategy, build: type[Hooked], place: str
) -> None:
    class Waits(build):  # type: ignore[misc, valid-type]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """Makes updates wait."""

    memory = {"spare_pages": 2} if place.startswith("tight") else {}  # no plan counts the call
    compare(Waits, strategy_at(place, **memory))


class ReadsGradients(Hooked):
    def act(self) -> None:
        self.note(self.blocks[2].weight.grad.square())


class ClearsBlock(Hooked):
    def act(self) -> None:
        if len(self.losses) == 2:
            self.blocks[2].zero_grad()


class ZeroesBlock(Hooked):
    def act(self) -> None:
        if len(self.losses) == 2:
            self.blocks[2].zero_grad(set_to_none=False)


GRADIENTS = [ReadsGradients, ClearsBlock, ZeroesBlock]


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["masters_on_disk", "tight", "tight_recomputed", "all_on_disk"])
@pytest.mark.parametrize("build", GRADIENTS)
def test_gradients_that_were_applied_are_not_shown_as_none_to_a_hook(
    strategy_at: MakeStrategy, build: type[Hooked], place: str
) -> None:
    """`.grad` was None there, and `module.zero_grad()` left the update as it was."""
    with pytest.raises(UsageError, match=r"in the backward pass in which it was applied, .*on_before_optimizer_step"):
        trained(build, strategy_at(place))


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["masters_on_disk", "tight", "ram", "tight_recomputed"])
@pytest.mark.parametrize("build", GRADIENTS)
def test_where_updates_wait_a_hook_sees_gradients(strategy_at: MakeStrategy, build: type[Hooked], place: str) -> None:
    """In pages, where they were not shown before the end of the pass, and could not be cleared."""

    class Waits(build):  # type: ignore[misc, valid-type]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """Makes updates wait."""

    compare(Waits, strategy_at(place))


class OwnCheckpoint(torch.autograd.Function):
    """Computes a block again in the backward pass, and asks torch.autograd.grad for the gradients of leaves."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.block, ctx.x, ctx.weights = block, x, weights
        with torch.no_grad():
            return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.weights), gradient)


class Again(Twin):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(OwnCheckpoint.apply(block, x, *block.parameters()))
        return self.head(x)


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["ram", "masters_on_disk", "tight", "tight_recomputed"])
def test_a_checkpoint_of_the_users_own_asks_for_gradients_of_leaves(strategy_at: MakeStrategy, place: str) -> None:
    compare(Again, strategy_at(place))


class Joint(nn.Module):
    """A block of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.left(x) + self.right(y))


class OwnCheckpointOfTwo(torch.autograd.Function):
    """`OwnCheckpoint` for a block of two inputs, of which one may be no part of the loss."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, both: bool, x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        ctx.block, ctx.both, ctx.x, ctx.y, ctx.weights = block, both, x, y, weights
        with torch.no_grad():
            return block(x, y)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.x.detach().requires_grad_(), ctx.y.detach().requires_grad_()
        with torch.enable_grad():
            z = ctx.block(x, y)
        leaves = (x, y) if ctx.both else (x,)
        found = torch.autograd.grad(z, (*leaves, *ctx.weights), gradient)
        return None, None, *found[: len(leaves)], *([None] * (2 - len(leaves))), *found[len(leaves) :]


class AgainOfTwo(Twin):
    both = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = nn.ModuleList(Joint() for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = 2 * x
        for block in self.blocks:
            x = x + OwnCheckpointOfTwo.apply(block, self.both, x, y, *block.parameters())
        return self.head(x)


class AgainOfOneOfTwo(AgainOfTwo):
    both = False


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["ram", "masters_on_disk", "tight", "tight_recomputed"])
@pytest.mark.parametrize("build", [AgainOfTwo, AgainOfOneOfTwo])
def test_a_checkpoint_of_the_users_own_asks_for_gradients_of_several_leaves(
    strategy_at: MakeStrategy, build: type[AgainOfTwo], place: str
) -> None:
    """torch cannot say whether autograd.grad reaches a leaf."""
    compare(build, strategy_at(place))
