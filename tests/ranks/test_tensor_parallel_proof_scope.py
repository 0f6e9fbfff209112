"""Scope of the proof of a block: blocks equal in more than shapes, and whatever a block leaves or draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.parallel import ColwiseParallel, Partial, RowwiseParallel, Rule
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import RankGroup

PLAN: dict[str, Rule] = {"blocks.*.expand": ColwiseParallel(), "blocks.*.project": RowwiseParallel()}


class Gated(nn.Module):
    """Module whose flag decides whether halves of what it expands to are packed, which a plan has to say."""

    def __init__(self, gated: bool = False, index: int = 0) -> None:
        super().__init__()
        self.gated, self.index = gated, index
        self.expand, self.project = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        if self.gated:
            first, second = hidden.chunk(2, -1)
            hidden = torch.cat([first * second, first], -1)
        return x + self.project(torch.tanh(hidden))


class Configured(Gated):
    """Module whose flag is in an object."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated=gated, width=8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        if self.config.gated:
            first, second = hidden.chunk(2, -1)
            hidden = torch.cat([first * second, first], -1)
        return x + self.project(torch.tanh(hidden))


class Noisy(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Checked(Gated):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        assert hidden.shape[-1] == 32, "a width that it knows"
        return self.project(hidden)


class Told(Gated):
    """Needs what the model around it tells it before each call."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Penalised(Gated):
    """Keeps a loss of its own, of what ranks have parts of."""

    penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        self.penalty = hidden.square().mean()
        return self.project(hidden)


class Scaled(Gated):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.project(self.expand(x) * scale)


class LaterTrained(nn.Module):
    """Module whose scale has a gradient from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled()])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return self.blocks[0](self.blocks[0](x, self.scale.detach()), self.scale)


class Normed(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(self.expand(x).unflatten(-1, (-1, 4))).flatten(-2))


class Activated(Gated):
    """Computes a function that it was given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = self.sharpened if function is None else function

    def sharpened(self, x: Tensor) -> Tensor:
        return x.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.function(self.expand(x)))


class InConfiguration(Gated):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(function=function)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.config.function(self.expand(x)))


class Called:
    """An object that is called as a function."""

    def __init__(self, over: tuple[int, ...]) -> None:
        self.over = over

    def __call__(self, x: Tensor) -> Tensor:
        return x.softmax(-1) if self.over else x.tanh()


@dataclasses.dataclass(frozen=True)
class Hidden:
    value: Tensor
    around: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.around.append(self)


class Wrapped(Gated):
    """Takes and gives objects around tensors.

    Args:
        kind: of objects, made of a tensor.
    """

    def __init__(self, kind: Callable[[Tensor], Any], gated: bool) -> None:
        super().__init__(gated)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        return self.kind(super().forward(x.value))


class OfObjects(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any], *, gated: bool) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Wrapped(kind, gated), Wrapped(kind, gated)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.kind(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.value if hidden is not None else x


class Empty(Gated):
    def forward(self, x: Tensor) -> None:
        super().forward(x)


class Asked(Gated):
    def forward(self, x: Tensor, gated: bool = False) -> Tensor:
        self.gated = gated
        return super().forward(x)


class Asking(nn.Module):
    """Module whose last block is called with another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asked() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for at, block in enumerate(self.blocks):
            x = block(x, gated=at == 2)
        return x


class AskingAgain(nn.Module):
    """Module whose only block is called with another argument when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Asked()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[0](x.requires_grad_()), gated=True)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Telling(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale = x.abs().mean()
            x = block(x)
            block.scale = None
        return x


class Unseen(Stack):
    """Model whose blocks compute without being called."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class Pairs(nn.Module):
    """Model whose blocks are pairs of layers that can be called, in containers that cannot."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([Gated(gated), Gated()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.blocks:  # type: ignore[misc]
            x = second(first(x))
        return x


def shares_a_norm() -> nn.Module:
    model = Stack(Normed())
    model.shared = nn.LayerNorm(4)
    model.shared.weight = model.blocks[0].norm.weight  # type: ignore[union-attr, assignment]
    return model


def _powered(x: Tensor, *, of_all: bool) -> Tensor:
    return x / x.square().mean(-1, keepdim=True) if of_all else x.square()


def _in_object(value: Tensor) -> Any:
    return SimpleNamespace(value=value)


FUNCTIONS = [lambda x: x.tanh(), lambda x: x.softmax(-1)]
IN_PAIRS: dict[str, Rule] = {"blocks.*.*.expand": ColwiseParallel(), "blocks.*.*.project": RowwiseParallel()}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Rule], str]] = {
    "a later block with another flag": (lambda: Stack(Gated(), Gated(gated=True)), PLAN, "blocks.1 (Gated) computes"),
    "a later block with another flag in its configuration": (
        lambda: Stack(Configured(), Configured(gated=True)),
        PLAN,
        "blocks.1 (Configured) computes",
    ),
    "a block that is not called": (lambda: Unseen(Gated(gated=True)), PLAN, "blocks.0 (Gated)"),
    "pairs": (lambda: Pairs(gated=False), IN_PAIRS, ""),
    "pairs of which one is gated": (lambda: Pairs(gated=True), IN_PAIRS, "blocks.0.0 (Gated) computes"),
    "a loss in an attribute": (lambda: Stack(Penalised()), PLAN, "sets in attributes"),
    "an input that is trained later": (LaterTrained, PLAN, "the gradients of its inputs"),
    "a later block with another function": (
        lambda: Stack(*map(Activated, FUNCTIONS)),
        PLAN,
        "blocks.1 (Activated) computes",
    ),
    "a later block with another argument of a function": (
        lambda: Stack(*(Activated(partial(_powered, of_all=each)) for each in (False, True))),
        PLAN,
        "blocks.1 (Activated) computes",
    ),
    "a later block with another method": (
        lambda: Stack(Activated(Called(()).__call__), Activated(None)),
        PLAN,
        "blocks.1 (Activated) computes",
    ),
    "a later block with another object that is called": (
        lambda: Stack(Activated(Called(())), Activated(Called((1,)))),
        PLAN,
        "blocks.1 (Activated) computes",
    ),
    "a later call with another flag": (Asking, PLAN, "blocks.2 (Asked) computes"),
    "a later call of the same block with another flag": (AskingAgain, PLAN, "blocks.0 (Asked) computes"),
    "a later block with another function in its configuration": (
        lambda: Stack(*(InConfiguration(each) for each in FUNCTIONS)),
        PLAN,
        "blocks.1 (InConfiguration) computes",
    ),
    "data classes": (lambda: OfObjects(Hidden, gated=False), PLAN, ""),
    "a wrong result in a data class": (lambda: OfObjects(Hidden, gated=True), PLAN, "blocks.0 (Wrapped) computes"),
    "a wrong result in an object": (lambda: OfObjects(_in_object, gated=True), PLAN, "blocks.0 (Wrapped) computes"),
    "no result": (lambda: Stack(Empty()), PLAN, "blocks.0 (Empty) returns no floating-point tensor"),
    "random numbers": (lambda: Stack(Noisy()), PLAN, ""),
    "a width that a block knows": (lambda: Stack(Checked()), PLAN, "blocks.0 (Checked) cannot be computed"),
    "a block that is told something": (lambda: Telling(Told()), PLAN, "blocks.0 (Told)"),
    "a partial norm that is used elsewhere": (
        shares_a_norm,
        {**PLAN, "blocks.*.norm": Partial()},
        "shared.weight is tied to a parameter",
    ),
}


def refusals() -> dict[str, tuple[str, bool]]:
    """By case: the refusal, and whether random numbers are those of a model that is not cut."""
    dist.init_process_group("gloo")
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    found = {}
    for name, (build, plan, _) in CASES.items():
        torch.manual_seed(0)
        module, x, refused = build().eval(), torch.randn(2, 8), ""
        before = torch.get_rng_state()
        module(x)
        expected = torch.get_rng_state()
        torch.set_rng_state(before)
        try:
            CutModule(module, plan, group, strict=True)
            module(x)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        found[name] = refused, bool(refused) or torch.equal(torch.get_rng_state(), expected)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[str, bool]]]:
    return run_ranks(refusals, 2)


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(found: list[dict[str, tuple[str, bool]]], case: str) -> None:
    expected = CASES[case][2]
    for of_rank in found:
        refused, same_numbers = of_rank[case]
        assert same_numbers
        assert (expected in refused and refused.startswith(ConfigError.__name__)) if expected else not refused
