"""Nested units, the user's own hooks on saved tensors, and what autograd is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.plain_loop import PlainLoop, fit, make_trainer, tokens
from kit.stacks import WIDTH, Block, Stack
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_ptm import ConfigError, UsageError

BATCHES = tokens(5)


class Inner(Block):
    pass


class Outer(nn.Module):
    """Parameters of its own before, between and after two inner units; hands one of them to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.between = nn.Linear(WIDTH, WIDTH)
        self.second = Inner()
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.between(self.first(x * self.last.weight)))
        return self.last(x)  # type: ignore[no-any-return]


class Nested(Stack):
    def __init__(self) -> None:
        super().__init__(depth=2, make_block=Outer)


class PassesAWeight(Stack):
    """A unit computes with a weight of the unit around it, which autograd saves inside of it."""

    def __init__(self) -> None:
        super().__init__(depth=3, make_block=_Around)


class _Taking(Inner):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(nn.functional.linear(x, weight))


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mine = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = _Taking()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, self.mine.weight)  # type: ignore[no-any-return]


class PassesTheEmbedding(Stack):
    """Blocks compute with a weight of the root."""

    def __init__(self) -> None:
        super().__init__(make_block=_Taking)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x, self.mix.weight)
        return x


@pytest.mark.slow_unless(
    "masters_on_disk-Nested-units0-all",
    "masters_on_disk-PassesAWeight-units1-none",
    "masters_on_disk-PassesTheEmbedding-auto-every 2nd",
    "lock_free-PassesAWeight-units1-every 2nd",
    "tight_recomputed-PassesTheEmbedding-auto-none",
)
@pytest.mark.parametrize("recompute", ["none", "all", "every 2nd"])
@pytest.mark.parametrize(
    ("build", "units"),
    [(Nested, ["Outer", "Inner"]), (PassesAWeight, ["_Around", "_Taking"]), (PassesTheEmbedding, "auto")],
)
def test_nested_units(strategy_at, tier, build, units, recompute) -> None:
    settings: dict[str, Any] = {"device_memory": "2MiB"} if tier == "three_tiers" else {}
    # Units inside of others leave holes, for which no plan has room.
    settings |= {"spare_pages": 2} if tier.startswith("tight") else {}
    ours = fit(build, BATCHES, strategy_at(tier, units=units, recompute=recompute, **settings))
    ours.assert_equal(PlainLoop(build).run(BATCHES))


def test_a_unit_class_that_the_model_lacks_is_refused(strategy_at) -> None:
    with pytest.raises(ConfigError, match=r"no module of the model has the class Blok"):
        fit(Stack, BATCHES, strategy_at("ram", units=["Blok"]))


class CountingStack(Stack):
    """The user's checkpoint around every block; counts the blocks' forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        for block in self.blocks:
            block.up.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.slow_unless("ram-none", "three_tiers-all", "tight-all")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_users_checkpoint_goes_on_to_save_activations(strategy_at, tier, recompute) -> None:
    """Each block runs forward twice a step: once to compute, once to compute again; neither once nor three times."""
    made: list[CountingStack] = []

    def build() -> CountingStack:
        made.append(CountingStack())
        return made[-1]

    fit(build, BATCHES, strategy_at(tier, recompute=recompute))
    assert made[0].calls == 2 * len(made[0].blocks) * len(BATCHES)


@pytest.mark.slow_unless("ram-all", "three_tiers-none", "tight-all")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_users_hooks_on_saved_tensors_keep_their_effect(strategy_at, tier, recompute) -> None:
    """Activations that the user moves elsewhere are moved, inside of units too, and weights are right all the same."""
    kept: list[int] = []
    batches = tokens(4, shape=(3, 17))  # no parameter has as many elements as a block's activation
    hidden = 3 * 16 * 4 * WIDTH

    class Moving(Stack):
        def loss(self, batch: Any, index: int) -> Tensor | None:
            def pack(tensor: Tensor) -> Tensor:
                kept.append(tensor.numel())
                return tensor.clone() if tensor.numel() == hidden else tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().loss(batch, index)

    expected = PlainLoop(Moving).run(batches)
    moved = kept.count(hidden)
    kept.clear()
    fit(Moving, batches, strategy_at(tier, recompute=recompute)).assert_equal(expected)
    if recompute == "none":
        assert kept.count(hidden) == moved > 0


class DoubleBackward(Stack):
    def loss(self, batch: Any, index: int) -> Tensor | None:
        x = self.embedding(batch[:, :-1])
        loss = self.score(batch, self.middle(x, index))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.float().pow(2).sum()


@pytest.mark.slow_unless("all_on_disk-all", "lock_free_three_tiers-none")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_double_backward_is_refused(strategy_at, tier, recompute) -> None:
    with pytest.raises(UsageError, match=r"create_graph=True .*refused, since"):
        fit(DoubleBackward, BATCHES, strategy_at(tier, recompute=recompute))


class GradientOfTheInput(Stack):
    """A gradient with respect to an activation, taken in the middle of the step, becomes part of the loss as a number."""

    def loss(self, batch: Any, index: int) -> Tensor | None:
        x = self.embedding(batch[:, :-1])
        loss = self.score(batch, self.middle(x, index))
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss * (1 + gradient.detach().float().abs().sum())


@pytest.mark.slow_unless("masters_on_disk-all", "lock_free-none", "tight_recomputed-none")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_gradient_of_an_activation_inside_the_step(strategy_at, tier, recompute) -> None:
    # A recomputed unit that a pass of the user's leaves without gradients stays to the end of the pass.
    settings = {"spare_pages": 4} if tier.startswith("tight") and recompute == "all" else {}
    ours = fit(GradientOfTheInput, BATCHES, strategy_at(tier, recompute=recompute, **settings))
    ours.assert_equal(PlainLoop(GradientOfTheInput).run(BATCHES))


class Failing(Stack):
    """Fails in the middle of a block's forward, or of its backward."""

    where = "forward"

    def middle(self, x: Tensor, index: int) -> Tensor:
        if index == 2:
            if self.where == "forward":
                self.blocks[1].up.register_forward_hook(_fail)
            else:
                x.register_hook(_fail)
        return super().middle(x, index)


def _fail(*_: Any) -> None:
    raise ArithmeticError("the user's own mistake")


class FailingInBackward(Failing):
    where = "backward"


@pytest.mark.slow_unless("masters_on_disk-Failing", "lock_free-FailingInBackward", "tight_recomputed-FailingInBackward")
@pytest.mark.parametrize("build", [Failing, FailingInBackward])
def test_an_error_of_the_users_comes_through_and_nothing_is_left(strategy_at, tier, build) -> None:
    torch.manual_seed(0)
    module = build()
    with pytest.raises(ArithmeticError, match="the user's own mistake"):
        make_trainer(strategy_at(tier)).fit(module, BATCHES.loader())
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all(not inner._forward_pre_hooks for inner in module.modules())


class _Remembering(Block):
    """Keeps its first result of a step and computes nothing the second time, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.up(self.norm(x))
        return x + self.down(nn.functional.gelu(self.kept))  # type: ignore[no-any-return]


class RemembersWithinAStep(Stack):
    """Model whose blocks drop what they remember between steps."""

    def __init__(self) -> None:
        super().__init__(make_block=_Remembering)

    def loss(self, batch: Any, index: int) -> Tensor | None:
        for block in self.blocks:
            block.kept = None
        return super().loss(batch, index)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_what_a_forward_leaves_in_its_module_is_not_there_when_it_is_recomputed(strategy_at, tier, recompute) -> None:
    expected = PlainLoop(RemembersWithinAStep).run(BATCHES)
    fit(RemembersWithinAStep, BATCHES, strategy_at(tier, recompute=recompute)).assert_equal(expected)


_KEPT: dict[int, Tensor] = {}
"""What blocks remember, by the identity of the block."""


class _RemembersOutside(_Remembering):
    """Remembers values in a global, which recomputation does not set back."""

    def remember(self, compute: Any) -> Tensor:
        if id(self) not in _KEPT:
            _KEPT[id(self)] = compute()
        return _KEPT[id(self)]

    def forget(self) -> None:
        _KEPT.pop(id(self), None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.remember(lambda: self.up(self.norm(x)))))  # type: ignore[no-any-return]


class RemembersOutside(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=_RemembersOutside)

    def loss(self, batch: Any, index: int) -> Tensor | None:
        for block in self.blocks:
            block.forget()
        return super().loss(batch, index)


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_a_forward_that_does_not_repeat_itself_is_not_recomputed(strategy_at, tier) -> None:
    expected = PlainLoop(RemembersOutside).run(BATCHES)
    fit(RemembersOutside, BATCHES, strategy_at(tier, recompute="none")).assert_equal(expected)
    with pytest.raises(UsageError, match=r"blocks\.3 \(_RemembersOutside\) did something else .*recompute='none'"):
        fit(RemembersOutside, BATCHES, strategy_at(tier, recompute="all"))


class RemembersInsideACheckpoint(RemembersWithinAStep):
    def middle(self, x: Tensor, index: int) -> Tensor:
        return checkpoint(super().middle, x, index, use_reentrant=False)  # type: ignore[no-any-return]


def test_an_error_of_a_users_checkpoint_comes_through(strategy_at) -> None:
    with pytest.raises(CheckpointError, match="different number of tensors"):
        fit(RemembersInsideACheckpoint, BATCHES, strategy_at("all_on_disk", recompute="all"))
