"""Manual optimization and several optimizers: steps, zeroing and clipping in any order, and which optimizers work.

Optimizers say `fused=True` where they can: pages are updated by the fused kernel in any case, and other kernels round
differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.memory import LEAST, strategy_with
from kit.plain_loop import PlainLoop, TrainModule, fit, tokens, vectors
from kit.stacks import Stack
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lightning_ptm import ConfigError

BATCHES = tokens(6)
NOISE = vectors(5, 8, 16)


def _network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class Adversaries(TrainModule):
    """A generator and a discriminator, trained in turns by optimizers of two classes."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = _network(16, 96, 96, 32)
        self.discriminator = _network(32, 128, 64, 1)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9), fused=True),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-1, momentum=0.9),
        ]

    def _judge(self, value: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(value).float()
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def _turn(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        value = loss()
        self.losses.append(value.detach().clone())
        optimizer.zero_grad()
        self.manual_backward(value)
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        real = torch.cat([batch, batch.sin()], 1)
        self._turn(of_generator, lambda: self._judge(self.generator(batch), True))
        self._turn(
            of_discriminator,
            lambda: self._judge(real, True) + self._judge(self.generator(batch).detach(), False),
        )


class AdversariesWithoutToggle(Adversaries):
    """Gradients of the generator's loss also reach the discriminator, which zero_grad forgets before its turn."""

    toggles = False


class TwoGraphsAtOnce(Adversaries):
    """Both losses are computed before either step; the second backward runs after the first step."""

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        first = self.generator(batch).float().pow(2).mean()
        second = self._judge(torch.cat([batch, batch.sin()], 1), True)
        self.losses += [first.detach().clone(), second.detach().clone()]
        for optimizer, loss in ((of_generator, first), (of_discriminator, second)):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.slow_unless(
    "masters_on_disk-Adversaries-bf16-mixed",
    "lock_free-TwoGraphsAtOnce-32-true",
    "tight_recomputed-AdversariesWithoutToggle-32-true",
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("build", [Adversaries, AdversariesWithoutToggle, TwoGraphsAtOnce])
def test_two_optimizers(strategy_at, tier, build, precision) -> None:
    ours = fit(build, NOISE, strategy_at(tier), precision)
    ours.assert_equal(PlainLoop(build, precision).run(NOISE))


class ByHand(Stack):
    """`moves` says what happens in each step: b(ackward), d(irect backward, past Lightning), s(tep), z(ero), n(orm
    clipping), v(alue clipping), e(rror in a backward pass that the step survives)."""

    def __init__(self, moves: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.moves = moves

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for move in self.moves.split("|")[index % len(self.moves.split("|"))]:
            if move in "bde":
                loss = self.loss(batch, index)
                assert loss is not None
                self.losses.append(loss.detach().clone())
            if move == "b":
                self.manual_backward(loss)
            elif move == "d":
                loss.backward()
            elif move == "e":
                with pytest.raises(ArithmeticError):
                    self.manual_backward(_Exploding.apply(loss))
            elif move == "s":
                optimizer.step()
            elif move == "z":
                optimizer.zero_grad()
            else:
                self.clip_gradients(optimizer, 0.01 if move == "v" else 0.3, "value" if move == "v" else "norm")


class _Exploding(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError


@pytest.mark.slow_unless(
    "ram-zbss",
    "ram-b|bnsz",
    "ram-e|zbs|zbs|zbs",
    "three_tiers-bs",
    "three_tiers-d|b|dsz",
    "tight-zbbs",
    "tight-bzbs",
    "tight-zds",
)
@pytest.mark.parametrize(
    "moves",
    [
        "zbs",  # the usual order
        "bsz",  # zero last
        "b|b|bsz",  # accumulation by hand, over batches
        "zbbs",  # and within one
        "bs",  # never zeroed: gradients go on adding up
        "zbsbs",  # two steps a batch, the second with both gradients
        "zbss",  # the same gradient twice
        "bzbs",  # a gradient that is thrown away
        "zbns",  # clipped by norm
        "zbvs",  # clipped by value
        "b|bnsz",  # clipped after accumulation
        "zb",  # no step at all
        "szbs",  # a step without a gradient
        "zds",  # loss.backward()
        "d|b|dsz",
        "e|zbs|zbs|zbs",
    ],
)
def test_moves(strategy_at, tier, moves) -> None:
    def build() -> ByHand:
        return ByHand(moves)

    fit(build, BATCHES, strategy_at(tier)).assert_equal(PlainLoop(build).run(BATCHES))


class Evaluates(Stack):
    """Computes a loss without gradients before each one that it trains with."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for rows in (batch[:1], batch):
            with torch.set_grad_enabled(rows is batch):
                loss = self.loss(rows, index)
                assert loss is not None
                self.losses.append(loss.detach().clone())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_evaluation_within_a_step_in_the_least_memory() -> None:
    homes = {"offload_parameters": "host", "offload_optimizer": "host", "host_memory": "64MiB"}
    strategy = strategy_with(device_memory=LEAST, page_size="64KiB", recompute="all", **homes)
    fit(Evaluates, BATCHES, strategy).assert_equal(PlainLoop(Evaluates).run(BATCHES))


@pytest.mark.slow_unless("ram-zbbs", "three_tiers-bs", "tight-b|b|bsz")
@pytest.mark.parametrize("moves", ["bs", "b|b|bsz", "zbbs"])
def test_moves_with_recomputation(strategy_at, tier, moves) -> None:
    def build() -> ByHand:
        return ByHand(moves)

    fit(build, BATCHES, strategy_at(tier, recompute="all")).assert_equal(PlainLoop(build).run(BATCHES))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(
        parameters, lr=1e-1, lr_decay=0.1, initial_accumulator_value=0.1, fused=True
    ),
}


@pytest.mark.slow_unless(
    "ram-32-true-adam", "three_tiers-bf16-mixed-sgd", "three_tiers-32-true-adagrad", "tight-32-true-sgd with momentum"
)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_optimizers(strategy_at, tier, name, precision) -> None:
    class Chosen(Stack):
        def make_optimizer(self) -> Optimizer:
            return OPTIMIZERS[name](self.parameters())

    fit(Chosen, BATCHES, strategy_at(tier), precision).assert_equal(PlainLoop(Chosen, precision).run(BATCHES))


class TwoOptimizersInEachBlock(ByHand):
    """Matrices by Adagrad and the rest by AdamW: each unit belongs to both."""

    def __init__(self) -> None:
        super().__init__("zbs")

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        return [torch.optim.Adagrad(matrices, lr=1e-1, fused=True), torch.optim.AdamW(others, lr=1e-2, fused=True)]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        matrices, others = self.optimizers()  # type: ignore[misc]
        loss = self.loss(batch, index)
        assert loss is not None
        self.losses.append(loss.detach().clone())
        matrices.zero_grad()
        others.zero_grad()
        self.manual_backward(loss)
        matrices.step()
        if index % 2:
            self.clip_gradients(others, 0.1, "norm")
            others.step()


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_two_optimizers_share_every_unit(strategy_at, tier) -> None:
    ours = fit(TwoOptimizersInEachBlock, BATCHES, strategy_at(tier))
    ours.assert_equal(PlainLoop(TwoOptimizersInEachBlock).run(BATCHES))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_an_optimizer_that_is_not_elementwise_is_refused(strategy_at, tier) -> None:
    class Quasi(Stack):
        def make_optimizer(self) -> Optimizer:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match="LBFGS"):
        fit(Quasi, BATCHES, strategy_at(tier))


class SharedTrunk(Adversaries):
    """Both optimizers have the generator's first layer, too; each step starts from what the other has left."""

    toggles = False

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.discriminator.parameters(), "momentum": 0.9},
            {"params": self.generator[0].parameters(), "momentum": 0.5},
        ]
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9), fused=True),
            torch.optim.SGD(groups, lr=1e-2, fused=True),
        ]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        real = torch.cat([batch, batch.sin()], 1)
        self._turn(of_generator, lambda: self._judge(self.generator(batch), True))
        self._turn(of_discriminator, lambda: self._judge(real, True) + self._judge(self.generator(batch), False))
        self.clip_gradients(of_generator, 0.01, "norm")
        of_generator.step()  # with the gradients of the step before


@pytest.mark.slow_unless("ram-32-true", "three_tiers-bf16-mixed", "tight-32-true")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_parameter_of_two_optimizers(strategy_at, tier, precision) -> None:
    if tier.startswith("lock_free"):
        pytest.skip("refused: tests/adversarial/test_several_optimizers.py")
    ours = fit(SharedTrunk, NOISE, strategy_at(tier), precision)
    ours.assert_equal(PlainLoop(SharedTrunk, precision).run(NOISE))
