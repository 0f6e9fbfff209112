"""Forwards that do something unusual and are computed again in the backward: with the plain numbers, or refused by name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from kinds import WIDTH, Block, Odd, assert_refused, assert_same
from torch import Tensor, nn
from torch.nn import functional as F


class Generated(Odd):
    """Weights that a small network makes are put into blocks for a call."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Linear(4, 2 * WIDTH * WIDTH)

    def through(self, x: Tensor) -> Tensor:
        x, weight = self.stem(x), self.hyper(torch.ones(4)).view(2 * WIDTH, WIDTH) * 0.01
        for block in self.blocks:
            x = torch.func.functional_call(block, {"up.weight": weight}, (x,))
        return self.head(x)  # type: ignore[no-any-return]


class GeneratedForEach(Generated):
    """Others for each block."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            weight = self.hyper(torch.full((4,), number + 1.0)).view(2 * WIDTH, WIDTH) * 0.01
            x = torch.func.functional_call(block, {"up.weight": weight}, (x,))
        return self.head(x)  # type: ignore[no-any-return]


class Stepped(Odd):
    """Weights of a block and a step of gradient descent on, as in meta-learning of the first order."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            names, weights = zip(*block.named_parameters(), strict=True)
            gradients = torch.autograd.grad(block(x).square().mean(), weights)
            fast = {name: w - 0.1 * g for name, w, g in zip(names, weights, gradients, strict=True)}
            x = torch.func.functional_call(block, fast, (x,))
        return self.head(x)  # type: ignore[no-any-return]


class Scaled(Odd):
    """An attribute of a block is set between two calls of it."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            scale: Any = 1.0

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * self.scale

        return OfBlock()

    def scale(self, number: int) -> Any:
        return 0.5 + number

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in (0, 1):
            for block in self.blocks:
                block.scale = self.scale(number)
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class ScaledByATensor(Scaled):
    """To a tensor."""

    def scale(self, number: int) -> Any:
        return torch.full((), 0.5 + number)


class ScaledByABuffer(Scaled):
    """To another buffer."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.ones(()))

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * self.scale

        return OfBlock()

    def scale(self, number: int) -> Any:
        return torch.full((), 0.5 + number)


class ScaledInPlace(Odd):
    """A forward adds to a tensor that is an attribute, and computes with a copy of it."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.ones(())

            def forward(self, x: Tensor) -> Tensor:
                self.scale.add_(0.1)
                return super().forward(x) * self.scale.clone()

        return OfBlock()


class ScaledByItself(Odd):
    """A forward counts its calls, and computes with the count."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x) * (1 + 0.1 * self.calls)

        return OfBlock()


class Logged(Odd):
    """A forward adds to a list of its module's, and computes with its length."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def __init__(self) -> None:
                super().__init__()
                self.seen: list[float] = []

            def forward(self, x: Tensor) -> Tensor:
                self.seen.append(float(x.detach().mean()))
                return super().forward(x) * (1 + 0.1 * len(self.seen))

        return OfBlock()


class Nested(Scaled):
    """The attribute is one of a module inside of the block."""

    def block(self) -> nn.Module:
        class Inner(nn.Module):
            scale = 1.0

            def forward(self, x: Tensor) -> Tensor:
                return x * self.scale

        class OfBlock(Block):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Inner()

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(super().forward(x))  # type: ignore[no-any-return]

        return OfBlock()

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in (0, 1):
            for block in self.blocks:
                block.inner.scale = self.scale(number)  # type: ignore[union-attr]
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Exchanged(Nested):
    """A module inside of the block is replaced between two calls."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner in (nn.Tanh(), nn.Sigmoid()):
            for block in self.blocks:
                block.inner = inner
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Hooked(Nested):
    """A hook on a module inside of the block is there for one of two calls."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            handle = block.norm.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[union-attr]
            x = block(x)
            handle.remove()
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Mode(Odd):
    """A block is called in evaluation mode, and then put back."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * (1.0 if self.training else 0.5)

        return OfBlock()

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            block.eval()
            x = block(x)
            block.train()
        return self.head(x)  # type: ignore[no-any-return]


class _Other(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x - self.down(F.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class ClassChanges(Odd):
    """The class of a block changes between two batches."""

    def before_batch(self, index: int, run: Any) -> None:
        if index == 2:
            self.blocks[1].__class__ = _Other


class ClassChangesInAStep(Odd):
    """It changes between two calls."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for kind in (_Other, Block):
            for block in self.blocks:
                block.__class__ = kind
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Patched(Odd):
    """The forward of the blocks' class is patched between two batches."""

    def block(self) -> nn.Module:
        if not hasattr(self, "kind"):

            class OfBlock(Block):
                pass

            self.kind = OfBlock
        return self.kind()

    def before_batch(self, index: int, run: Any) -> None:
        if index == 2:
            self.kind.forward = _Other.forward  # type: ignore[method-assign]


class Caching(Odd):
    """The caller hands in a list, to which each block adds what the next one computes with."""

    def new(self) -> Any:
        return []

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor, cache: Any) -> Tensor:
                known = sum(cache) if isinstance(cache, list) else sum(cache.get("keys", ()))
                if isinstance(cache, list):
                    cache.append(x * 0.1)
                else:
                    cache["keys"] = (*cache.get("keys", ()), x * 0.1)
                return super().forward(x) + known

        return OfBlock()

    def through(self, x: Tensor) -> Tensor:
        x, cache = self.stem(x), self.new()
        for block in self.blocks:
            x = self.call(block, x, cache)
        return self.head(x)  # type: ignore[no-any-return]

    def call(self, block: nn.Module, x: Tensor, cache: Any) -> Tensor:
        return block(x, cache)  # type: ignore[no-any-return]


class CachingInADict(Caching):
    """A dict, by name."""

    def new(self) -> Any:
        return {}

    def call(self, block: nn.Module, x: Tensor, cache: Any) -> Tensor:
        return block(x, cache=cache)  # type: ignore[no-any-return]


ONE_CALL = [Stepped, ScaledByItself, ScaledInPlace, Logged, Mode, ClassChanges, Patched]
MORE = [
    Generated,
    GeneratedForEach,
    Scaled,
    ScaledByATensor,
    ScaledByABuffer,
    Nested,
    Exchanged,
    Hooked,
    ClassChangesInAStep,
    Caching,
    CachingInADict,
]
"""Units that are called more than once in a step, of which a weight gets no gradient, or whose inputs others use, too: they
stay to the end of the backward, for which the least device memory is too little."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["ram", "three_tiers", "tight", "tight_recomputed"])
@pytest.mark.parametrize("program", ONE_CALL + MORE, ids=lambda program: program.__name__)
def test_as_a_plain_trainer(strategy_at, program: type[Odd], place: str) -> None:
    if program in MORE and place.startswith("tight"):
        place = "all_on_disk"
    assert_same(program, strategy_at(place, recompute="all"))


class _Drawing(Odd):
    """A forward draws numbers that torch's generators know nothing of."""

    def draw(self) -> float:
        return random.random()

    def block(self) -> nn.Module:
        draw = self.draw

        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x * (1 + draw()))

        return OfBlock()


class DrawsFromNumpy(_Drawing):
    """From NumPy's."""

    def draw(self) -> float:
        return float(np.random.rand())


class DrawsFromItsOwn(_Drawing):
    """From a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "generator":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.generator))


class ReadsAClosure(_Drawing):
    """A forward reads a variable that the caller changes between two calls."""

    def __init__(self) -> None:
        object.__setattr__(self, "number", [0])
        super().__init__()

    def draw(self) -> float:
        return float(self.number[0])

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            self.number[0] += 1
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class CachesInAnObject(Caching):
    """What the caller hands in is an object of a class of its own."""

    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    def new(self) -> Any:
        return self.Cache()

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor, cache: Any) -> Tensor:
                known = sum(cache.keys)
                cache.keys.append(x * 0.1)
                return super().forward(x + known)

        return OfBlock()


REFUSED = [_Drawing, DrawsFromNumpy, DrawsFromItsOwn, ReadsAClosure, CachesInAnObject]


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_a_forward_that_cannot_be_repeated_is_refused_by_name(strategy_at, program: type[Odd]) -> None:
    assert_refused(
        program, strategy_at("tight_recomputed"), "odd.blocks.", "(OfBlock) did something else", "recompute='none'"
    )


class WrittenInAList(Odd):
    """A tensor in a list that a block was called with is written to behind the call."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
                return super().forward(x) + more[0]

        return OfBlock()

    def through(self, x: Tensor) -> Tensor:
        x, more = self.stem(x), [torch.zeros(WIDTH)]
        for block in self.blocks:
            x = block(x, more)
            more[0].add_(0.1)
        return self.head(x)  # type: ignore[no-any-return]


def test_an_argument_that_was_written_to_is_refused(strategy_at) -> None:
    assert_refused(
        WrittenInAList, strategy_at("tight_recomputed"), "was changed in place after the forward", "recompute='none'"
    )
    assert_same(WrittenInAList, strategy_at("tight"))
