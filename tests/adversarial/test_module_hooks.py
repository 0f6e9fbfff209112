"""Hooks of the user's that read or make weights: they run while the weights are there, and are those of this step.

Wherever they are (a unit, a part of one, the LightningModule, global) and whenever they were registered, `prepend=True`
included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import Twin, compare
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

HOMES = ("ram", "all_on_disk", "three_tiers", "lock_free")


class OldWeightNorm(Twin):
    """torch's first weight_norm computes the weight in a forward pre-hook."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            weight_norm(block)
        weight_norm(self.stem, dim=None)


class OldSpectralNorm(Twin):
    """Power iteration in a pre-hook, in place on buffers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            spectral_norm(block)


class Parametrized(Twin):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.blocks[0])
        parametrizations.spectral_norm(self.blocks[1])
        parametrizations.weight_norm(self.head)


class Pruned(Twin):
    """Masks times weights, in a pre-hook."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            prune.l1_unstructured(block, "weight", amount=0.3)
        prune.random_unstructured(self.blocks[0], "bias", amount=0.5)


class NormInsideUnits(Twin):
    """Module whose hook is on a part of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(weight_norm(nn.Linear(66, 66)), nn.Tanh()) for _ in range(3))


class TwiceAStep(OldWeightNorm):
    """Each unit is called twice: the weight of its second call is made anew."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            for block in self.blocks:
                x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", [OldWeightNorm, OldSpectralNorm, Parametrized, Pruned, NormInsideUnits, TwiceAStep])
@pytest.mark.parametrize("home", HOMES)
def test_weights_that_hooks_make_are_those_of_this_step(kind: type[Twin], home: str, strategy_at: MakeStrategy) -> None:
    compare(kind, strategy_at(home))


@pytest.mark.parametrize("kind", [OldWeightNorm, Pruned, Parametrized])
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
def test_they_are_when_units_are_recomputed_too(kind: type[Twin], home: str, strategy_at: MakeStrategy) -> None:
    compare(kind, strategy_at(home, recompute="all"))


class RunningStatistics(Twin):
    """BatchNorm: statistics move once a step, and the recomputed forward has those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(66, 66), nn.BatchNorm1d(66, momentum=0.3)) for _ in range(3)
        )

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:  # the mean of all batches so far, and then none at all
            self.blocks[0][1].momentum = None  # type: ignore[index, union-attr]
        if index == 2:
            self.blocks[1].eval()


@pytest.mark.parametrize("home", ["ram", "three_tiers"])
def test_recomputed_units_move_running_statistics_once(home: str, strategy_at: MakeStrategy) -> None:
    compare(RunningStatistics, strategy_at(home, recompute="all"))


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
@pytest.mark.parametrize("home", ["all_on_disk", "lock_free"])
def test_they_are_with_accumulation_and_clipping(options: dict[str, Any], home: str, strategy_at: MakeStrategy) -> None:
    compare(OldWeightNorm, strategy_at(home), **options)


class Watched(Twin):
    """Notes what hooks read of weights. `watch` registers them."""

    def note(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            self.losses.append(parameter.detach().double().sum())

    def before(self, module: nn.Module, args: Any) -> None:
        self.note(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.note(module)

    def watch(self, *modules: nn.Module, prepend: bool = True) -> None:
        for module in modules:
            module.register_forward_pre_hook(self.before, prepend=prepend)
            module.register_forward_hook(self.after, prepend=prepend)

    @contextmanager
    def watched_globally(self) -> Iterator[None]:
        handles = [
            global_hooks.register_module_forward_pre_hook(self.before),
            global_hooks.register_module_forward_hook(self.after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class InTheConstructor(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.watch(*self.blocks, self.stem, self)


class AppendedInTheConstructor(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.watch(*self.blocks, self.stem, self, prepend=False)


class AtTheStart(Watched):
    """Registered when the pages are there already."""

    def on_train_start(self) -> None:
        self.watch(*self.blocks, self.head)


class InTheMiddle(Watched):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:
            self.watch(*self.blocks, self.head)


class OnPartsOfUnits(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(66, 66), nn.Tanh()) for _ in range(3))
        self.watch(*(block[0] for block in self.blocks))  # type: ignore[index]

    def on_train_start(self) -> None:
        self.watch(*(block[0] for block in self.blocks))  # type: ignore[index]


class Globally(Watched):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        with self.watched_globally():
            return super().training_step(batch, index)


class PartsCalledFromOutside(Watched):
    """The parts of units are called without the unit: each is a call of its unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(66, 66), nn.Tanh()) for _ in range(3))

    def on_train_start(self) -> None:
        self.watch(*(block[0] for block in self.blocks))  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with self.watched_globally():
            for block in self.blocks:
                x = x + block[0](x)  # type: ignore[index]
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "kind",
    [
        InTheConstructor,
        AppendedInTheConstructor,
        AtTheStart,
        InTheMiddle,
        OnPartsOfUnits,
        Globally,
        PartsCalledFromOutside,
    ],
)
@pytest.mark.parametrize("home", HOMES)
def test_hooks_read_the_weights_of_this_step(kind: type[Twin], home: str, strategy_at: MakeStrategy) -> None:
    compare(kind, strategy_at(home))


class WithALossOfWeights(Twin):
    """A pre-hook and a hook whose results autograd follows: a penalty of the weights, and a second use of them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0] * module.bias.square().mean().add(1),))
            block.register_forward_hook(lambda module, args, output: output + output @ module.weight * 1e-2)


class HooksOfTheBackward(Watched):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_pre_hook(lambda module, gradients: self.note(module))
            block.register_full_backward_hook(lambda module, gradients, outputs: self.note(module))


class HooksThatReplace(Twin):
    """Keyword arguments, replaced inputs and outputs, removal in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.handles = [
            block.register_forward_pre_hook(
                lambda module, args, kwargs: ((args[0] + module.bias,), kwargs), with_kwargs=True, prepend=True
            )
            for block in self.blocks
        ]

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            self.handles.pop().remove()


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", [WithALossOfWeights, HooksOfTheBackward, HooksThatReplace])
@pytest.mark.parametrize("home", HOMES)
def test_hooks_take_part_in_the_computation(kind: type[Twin], home: str, strategy_at: MakeStrategy) -> None:
    compare(kind, strategy_at(home))


class Compiled(OldWeightNorm):
    """Compiled in place: its hooks run inside of what is compiled."""

    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend="eager")


def test_hooks_of_units_that_are_compiled_in_place(strategy_at: MakeStrategy) -> None:
    torch._dynamo.reset()
    compare(Compiled, strategy_at("all_on_disk"))
    torch._dynamo.reset()


class Raising(Twin):
    """A hook raises once and the user goes on without that batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(self.refuse)
        self.calls = 0

    def refuse(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("not this one")

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        try:
            return super().training_step(batch, index)
        except ValueError:
            return None


@pytest.mark.parametrize("home", HOMES)
def test_a_hook_that_raises_leaves_its_unit_in_order(home: str, strategy_at: MakeStrategy) -> None:
    compare(Raising, strategy_at(home))


def test_calls_are_the_modules_own_again_after_a_run(strategy_at: MakeStrategy) -> None:
    ours = compare(OldWeightNorm, strategy_at("all_on_disk"))
    assert [name for module in ours.modules() for name in ("_call_impl", "forward") if name in vars(module)] == []
    assert [module for module in ours.modules() if module._compiled_call_impl is not None] == []
