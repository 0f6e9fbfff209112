"""Forwards that do something unusual and are computed again in the backward: with the plain numbers, or refused by name."""

from __future__ import annotations

import collections
import gc
import random
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from kit.odd import WIDTH, Block, Odd, assert_refused, assert_same
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
    """Module whose class changes between two calls."""

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


def _of(forward: Any, prepare: Any = lambda block: None) -> Any:
    """A class of blocks whose forward is `forward(block, x)` around that of `Block`."""

    class OfBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            prepare(self)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, super().forward(x))  # type: ignore[no-any-return]

    return OfBlock


def _average(value: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        value.mul_(0.9).add_(x.mean() + 0.1)


class _Batches(Odd):
    """Two micro-batches in a step, and so many steps that each tensor that a call saves has been compared."""

    manual = True

    def step(self, run: Any, x: Tensor) -> None:
        optimizer = run.optimizers()
        for _ in range(3):
            optimizer.zero_grad()
            losses = [self.loss(x), self.loss(2 * x)]
            for loss in losses:
                run.manual_backward(loss)
            optimizer.step()
        run.losses.append(losses[0].detach())


class Normalized(_Batches):
    """Running statistics, to which batch_norm writes behind having saved them."""

    def block(self) -> nn.Module:
        return _of(lambda b, x: b.batch(x), lambda b: setattr(b, "batch", nn.BatchNorm1d(WIDTH)))()  # type: ignore[no-any-return]


class Recurrent(_Batches):
    """A kernel that saves bytes that nobody has written."""

    def block(self) -> nn.Module:
        return _of(lambda b, x: b.rnn(x[None])[0][0], lambda b: setattr(b, "rnn", nn.LSTM(WIDTH, WIDTH)))()  # type: ignore[no-any-return]


class NormalizedWide(Odd):
    """Statistics that are large."""

    def block(self) -> nn.Module:
        wide = 1 << 15
        return nn.Sequential(
            nn.Linear(WIDTH, 4), nn.Linear(4, wide), nn.BatchNorm1d(wide), nn.Linear(wide, 4), nn.Linear(4, WIDTH)
        )


class NormalizedByAnothers(Odd):
    """A module of the root, which blocks have in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH, affine=False)
        for block in self.blocks:
            block.batch = [self.batch]  # type: ignore[assignment]

    def block(self) -> nn.Module:
        return _of(lambda b, x: b.batch[0](x))()  # type: ignore[no-any-return]


class NormalizedByAnArgument(Odd):
    """A module that blocks are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH, affine=False)

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
                return norm(super().forward(x))  # type: ignore[no-any-return]

        return OfBlock()

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, self.batch)
        return self.head(x)  # type: ignore[no-any-return]


class _Averaging(Odd):
    """Averages, in a thing that a block holds."""

    def prepare(self, block: Any) -> None:
        """Gives a new block what it holds."""

    def forward(self, block: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def block(self) -> nn.Module:
        return _of(self.forward, self.prepare)()  # type: ignore[no-any-return]


class AveragedInADict(_Averaging):
    """A tensor in a dict in a dict."""

    def prepare(self, block: Any) -> None:
        block.state = {"inner": {"mean": torch.zeros(())}}

    def forward(self, block: Any, x: Tensor) -> Tensor:
        _average(block.state["inner"]["mean"], x)
        return x * (1 + block.state["inner"]["mean"].clone())


class AveragedAndViewed(_Averaging):
    """A buffer, of which another attribute is a view."""

    def prepare(self, block: Any) -> None:
        block.register_buffer("means", torch.zeros(4))
        block.first = block.means[:1]

    def forward(self, block: Any, x: Tensor) -> Tensor:
        _average(block.means, x)
        return x * (1 + block.first.clone())


class AveragedByData(_Averaging):
    """A large buffer, by way of its `data`, which is not counted as a change."""

    def prepare(self, block: Any) -> None:
        block.register_buffer("means", torch.zeros(400, WIDTH))

    def forward(self, block: Any, x: Tensor) -> Tensor:
        x = x * (1 + block.means[0].clone())
        block.means.data.mul_(0.9).add_(x.detach().mean(0))
        return x


class _Counting(_Averaging):
    """Counts calls in a container, and computes otherwise from the fourth on."""

    def forward(self, block: Any, x: Tensor) -> Tensor:
        block.counts["calls"] += 1
        return x * x.sigmoid() * (1 + 0.1 * (block.counts["calls"] > 3))


class CountedByACounter(_Counting):
    def prepare(self, block: Any) -> None:
        block.counts = collections.Counter()


class CountedByDefault(_Counting):
    def prepare(self, block: Any) -> None:
        block.counts = collections.defaultdict(int)


class CountedInOrder(_Counting):
    def prepare(self, block: Any) -> None:
        block.counts = collections.OrderedDict(calls=0)


class CountedInANamespace(_Averaging):
    def prepare(self, block: Any) -> None:
        block.state = types.SimpleNamespace(calls=[0])

    def forward(self, block: Any, x: Tensor) -> Tensor:
        block.state.calls[0] += 1
        return x * x.sigmoid() * (1 + 0.1 * (block.state.calls[0] > 3))


class HookedWithNames(Hooked):
    """The hook is one that gets arguments by name, too."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            norm: Any = block.norm
            handle = norm.register_forward_hook(lambda module, args, named, output: output * 2, with_kwargs=True)
            x = block(x)
            handle.remove()
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Frozen(Odd):
    """A weight is frozen behind the forward (as LoRA's adapters are when another is chosen)."""

    def step(self, run: Any, x: Tensor) -> Any:
        loss = super().step(run, x)
        for block in self.blocks:
            block.up.weight.requires_grad_(False)  # type: ignore[union-attr]
        return loss

    def before_batch(self, index: int, run: Any) -> None:
        for block in self.blocks:
            block.up.weight.requires_grad_(True)  # type: ignore[union-attr]


class Spectral(_Averaging):
    """Complex numbers, and a part of their conjugates."""

    def forward(self, block: Any, x: Tensor) -> Tensor:
        z = torch.fft.rfft(x)
        w = z.conj()
        return x + torch.fft.irfft(z * w.imag * 0.1, n=WIDTH) * w.imag.abs().mean()


OTHERS = [
    Normalized,
    Recurrent,
    NormalizedWide,
    NormalizedByAnothers,
    NormalizedByAnArgument,
    AveragedInADict,
    AveragedAndViewed,
    AveragedByData,
    CountedByACounter,
    CountedByDefault,
    CountedInOrder,
    CountedInANamespace,
    HookedWithNames,
    Frozen,
    Spectral,
]


@pytest.mark.parametrize("program", OTHERS, ids=lambda program: program.__name__)
def test_what_a_forward_changes_it_changes_once(strategy_at, program: type[Odd]) -> None:
    assert_same(program, strategy_at("ram", recompute="all"))


class _Holder:
    """A user's object."""

    scale = 1.0


class _SlottedHolder:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class ScaledByAnObject(Odd):
    """An attribute of an object that all blocks have is set between two calls of a block."""

    kind: type = _Holder

    def __init__(self) -> None:
        super().__init__()
        self.holder: Any = self.kind()
        for block in self.blocks:
            self.attach(block)

    def attach(self, block: Any) -> None:
        block.read = self.holder

    def read(self, block: Any) -> float:
        return block.read.scale  # type: ignore[no-any-return]

    def block(self) -> nn.Module:
        read = type(self).read

        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                gate = torch.sigmoid(x * read(None, self))  # type: ignore[arg-type]
                return super().forward(x) + gate  # what is saved last does not depend on the scale

        return OfBlock()

    def set_scale(self, scale: float) -> None:
        self.holder.scale = scale

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in (0, 1):
            for block in self.blocks:
                self.set_scale(0.5 + number)
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class ScaledByASlot(ScaledByAnObject):
    kind = _SlottedHolder


class ScaledByAnInnerObject(ScaledByAnObject):
    """The object is in a list of another one."""

    def attach(self, block: Any) -> None:
        block.read = _Holder()
        block.read.inner = [self.holder]

    def read(self, block: Any) -> float:
        return block.read.inner[0].scale  # type: ignore[no-any-return]


class ScaledByTheRoot(ScaledByAnObject):
    """The attribute is one of the module around the blocks, which they have in a list."""

    scale = 1.0

    def attach(self, block: Any) -> None:
        block.read = [self]

    def read(self, block: Any) -> float:
        return block.read[0].scale  # type: ignore[no-any-return]

    def set_scale(self, scale: float) -> None:
        self.scale = scale


class ScaledByAMethod(ScaledByTheRoot):
    """They have a method of it."""

    def scale_now(self) -> float:
        return self.scale

    def attach(self, block: Any) -> None:
        block.read = self.scale_now

    def read(self, block: Any) -> float:
        return block.read()  # type: ignore[no-any-return]


class ScaledByAFunction(ScaledByAMethod):
    """They have a function whose closure has it."""

    def attach(self, block: Any) -> None:
        block.read = lambda: self.scale


class ScaledByAReference(ScaledByAMethod):
    """They have a weak reference to it."""

    def attach(self, block: Any) -> None:
        block.read = weakref.ref(self)

    def read(self, block: Any) -> float:
        return block.read().scale  # type: ignore[no-any-return]


class CountedInAnObject(_Averaging):
    """A forward counts its calls in an object."""

    def prepare(self, block: Any) -> None:
        block.holder = _Holder()

    def forward(self, block: Any, x: Tensor) -> Tensor:
        block.holder.scale += 1
        return x * x.sigmoid() * (1 + 0.1 * (block.holder.scale > 3))


OUTSIDE = [
    ScaledByAnObject,
    ScaledByASlot,
    ScaledByAnInnerObject,
    ScaledByTheRoot,
    ScaledByAMethod,
    ScaledByAFunction,
    ScaledByAReference,
    CountedInAnObject,
]


@pytest.mark.parametrize("program", OUTSIDE, ids=lambda program: program.__name__)
def test_what_a_forward_reads_outside_of_its_module_is_as_at_its_call(strategy_at, program: type[Odd]) -> None:
    assert_same(program, strategy_at("ram", recompute="all"))


class AveragedInAParameter(_Averaging):
    """A forward writes to a parameter of its own."""

    def prepare(self, block: Any) -> None:
        block.mean = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, block: Any, x: Tensor) -> Tensor:
        _average(block.mean, x)
        return x * x.sigmoid()


def test_a_forward_that_gives_a_parameter_another_value_each_time_is_refused(strategy_at) -> None:
    assert_refused(
        AveragedInAParameter, strategy_at("ram", recompute="all"), "writes to odd.blocks.", "mean", "register_buffer"
    )


class CatchesAll(Odd):
    """A forward catches whatever is raised in it."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                try:
                    return super().forward(x)
                except Exception:
                    return 2 * super().forward(x)

        return OfBlock()


class Watched(Odd):
    """Blocks show what they have computed last, which the loss does not use."""

    def block(self) -> nn.Module:
        def forward(block: Any, x: Tensor) -> Tensor:
            block.last, block.all = block.norm(x).exp(), [block.norm(x).exp()]
            return x

        return _of(forward)()  # type: ignore[no-any-return]

    def before_batch(self, index: int, run: Any) -> None:
        if index == 0:
            seen.clear()
        for block in self.blocks:
            if index:
                seen.extend(map(weakref.ref, (block.last, block.all[0])))  # type: ignore[arg-type,index,union-attr]


seen: list[Any] = []


def test_a_unit_does_not_hold_what_earlier_forwards_have_left_in_attributes(strategy_at) -> None:
    assert_same(Watched, strategy_at("ram", recompute="all"))
    gc.collect()
    assert len(seen) == 24 and sum(each() is not None for each in seen) <= 8


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


@pytest.mark.diagonal
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
    """Caller that passes in an object of its own class."""

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


class DrawsFromItsBlocks(Odd):
    """From generators of several kinds that blocks hold."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def __init__(self) -> None:
                super().__init__()
                self.torchs = torch.Generator().manual_seed(2)
                self.others = {
                    "python": random.Random(3),
                    "numpy": [np.random.default_rng(4), np.random.RandomState(5)],
                }

            def forward(self, x: Tensor) -> Tensor:
                drawn = torch.rand(x.shape, generator=self.torchs) + self.others["python"].random()
                for each in self.others["numpy"]:
                    drawn = drawn * (1 + each.random())
                return super().forward(x * drawn)

        return OfBlock()


DRAWING = [_Drawing, DrawsFromNumpy, DrawsFromItsBlocks]


def draws_again(program: type[Odd]) -> type[Odd]:
    """The program, whose generators begin anew."""

    def seeded(self: Any) -> None:
        random.seed(1)
        np.random.seed(1)
        program.__init__(self)

    return type(program.__name__, (program,), {"__init__": seeded})


@pytest.mark.parametrize("program", DRAWING, ids=lambda program: program.__name__)
@pytest.mark.parametrize("place", ["ram", "tight_recomputed"])
def test_a_recomputed_forward_draws_the_numbers_of_the_first_one(strategy_at, place: str, program: type[Odd]) -> None:
    """Torch's checkpoint restores the global generators of torch alone."""
    assert_same(draws_again(program), strategy_at(place, recompute="all"))


REFUSED = [CatchesAll, DrawsFromItsOwn, ReadsAClosure, CachesInAnObject]


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
