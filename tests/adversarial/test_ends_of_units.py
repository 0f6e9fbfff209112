"""When a unit's backward has ended, its weights may change or go: never before the gradients of its inputs are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import WIDTH, Twin, assert_alike, compare, quietly, trained, trainer, vectors
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import UsageError


class Late(nn.Module):
    """Module whose weight gets its gradient by another path than the input does, and reads the weight later."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ones = x.new_ones(1, WIDTH)
        return (functional.linear(x, self.a.weight.detach()) + self.a(ones)).view(-1, WIDTH)


class Adapter(nn.Module):
    """A frozen weight and a trained adapter; the output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(x) + self.up(self.down(x))).view(-1, WIDTH)


@dataclasses.dataclass(eq=False)
class Named:
    value: Tensor


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.inside = [Named(value)]


class InObjects(Late):
    def forward(self, x: Plain) -> Plain:  # type: ignore[override]
        return Plain(super().forward(x.inside[0].value))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class InClosures(Late):
    def forward(self, x: Callable[[], Tensor]) -> Callable[[], Tensor]:  # type: ignore[override]
        output = super().forward(x())
        return lambda: output


class InSlots(Late):
    def forward(self, x: Slotted) -> Tensor:  # type: ignore[override]
        return super().forward(x.value)


class InAttributes(Late):
    def forward(self, x: None) -> Tensor:  # type: ignore[override]
        return super().forward(self.side)  # type: ignore[arg-type]


@dataclasses.dataclass(eq=False)
class Cyclic:
    value: Tensor
    itself: Any = None

    def __post_init__(self) -> None:
        self.itself = self


class InCycles(Late):
    def forward(self, x: Cyclic) -> Cyclic:  # type: ignore[override]
        return Cyclic(super().forward(x.value))


class CheckpointsInside(Late):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


class Program(Twin):
    """`kind` of block; a subclass says how a step goes through them."""

    kind: type[nn.Module] = Late

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(3))

    def call(self, block: Any, value: Tensor) -> Tensor:
        return block(value).tanh_()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.call(block, x)
        return self.head(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


class Adapters(Program):
    kind = Adapter


class Objects(Program):
    kind = InObjects

    def call(self, block: Any, value: Tensor) -> Tensor:
        return block(Plain(value)).inside[0].value  # type: ignore[no-any-return]


class Closures(Program):
    kind = InClosures

    def call(self, block: Any, value: Tensor) -> Tensor:
        return block(lambda: value)()  # type: ignore[no-any-return]


class Slots(Program):
    kind = InSlots

    def call(self, block: Any, value: Tensor) -> Tensor:
        return block(Slotted(value))  # type: ignore[no-any-return]


class Attributes(Program):
    kind = InAttributes

    def call(self, block: Any, value: Tensor) -> Tensor:
        block.side = value
        return block(None)  # type: ignore[no-any-return]


class Cycles(Program):
    kind = InCycles

    def call(self, block: Any, value: Tensor) -> Tensor:
        return block(Cyclic(value)).value  # type: ignore[no-any-return]


class RegionsInside(Program):
    kind = CheckpointsInside

    def call(self, block: Any, value: Tensor) -> Tensor:
        return block(value).tanh()  # type: ignore[no-any-return]


class Mapped(Program):
    def call(self, block: Any, value: Tensor) -> Tensor:
        return torch.vmap(lambda row: block(row).view(-1))(value[:, None]).tanh()  # type: ignore[no-any-return]


class ByHand(Program):
    kind = Adapter

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.passes(batch[0])
        optimizer.step()

    def loss_of(self, batch: Tensor) -> Tensor:
        loss = self(batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss  # type: ignore[no-any-return]


class Survives(ByHand):
    """A hook of the user's raises in the midst of a backward pass; the step goes on with another one."""

    raw = False

    def call(self, block: Any, value: Tensor) -> Tensor:
        output = block(value)
        if self.raises and block is self.blocks[0]:
            output.register_hook(_raise)
        return output  # type: ignore[no-any-return]

    def passes(self, batch: Tensor) -> None:
        self.raises = True
        loss = self.loss_of(batch)
        with pytest.raises(ArithmeticError):
            loss.backward() if self.raw else self.manual_backward(loss)
        self.raises = False
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss_of(batch))


class SurvivesRaw(Survives):
    raw = True


def _raise(gradient: Tensor) -> None:
    raise ArithmeticError


class Attacked(ByHand):
    """autograd.grad for a leaf that a unit was called with."""

    def passes(self, batch: Tensor) -> None:
        hidden = self.stem(batch).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.blocks[0](hidden).square().mean(), hidden)
        self.losses.append(gradient.detach().clone())
        self.manual_backward(self.loss_of(batch))


class ThreeRegions(ByHand):
    """One unit in three regions of a reentrant checkpoint, and a graph that is gone through twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.head(x)  # type: ignore[no-any-return]

    def passes(self, batch: Tensor) -> None:
        loss = self.loss_of(batch)
        self.manual_backward(loss, retain_graph=True)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)


class AddedUp(ByHand):
    """Passes that add up, each with several gradients of a weight: of regions of a reentrant checkpoint and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for index in range(3):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
            x = checkpoint(self._scaled, x, use_reentrant=True)
            x = checkpoint(self.blocks[1], self.blocks[1](x) if index else x, use_reentrant=True)
        return self.head(x * self.scale)  # type: ignore[no-any-return]

    def _scaled(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)

    def passes(self, batch: Tensor) -> None:
        for part in (batch, batch.flip(0) / 3, batch / 7):
            self.manual_backward(self.loss_of(part))


class AddedUpRaw(AddedUp):
    def passes(self, batch: Tensor) -> None:
        for part in (batch, batch.flip(0) / 3, batch / 7):
            self.loss_of(part).backward()


class BackwardFirst(Twin):
    """A pass of the step's own, which adds to what the last step has used, until Lightning forgets both."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        loss.backward(retain_graph=True)
        return loss


KINDS: list[Callable[[], LightningModule]] = [Program, Adapters, Survives, SurvivesRaw, Attacked, ThreeRegions]
KINDS += [Objects, Closures, Slots, Attributes, Cycles, RegionsInside, Mapped, AddedUp, AddedUpRaw, BackwardFirst]


@pytest.mark.slow_unless(
    "Program-none-masters_on_disk",
    "Survives-none-ram",
    "SurvivesRaw-none-all_on_disk",
    "ThreeRegions-none-all_on_disk",
    "Slots-none-all_on_disk",
    "Cycles-none-ram",
    "RegionsInside-none-ram",
    "AddedUpRaw-none-ram",
)
@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk"])
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_one_device(kind: type[Twin], recompute: str, home: str, strategy_at: MakeStrategy) -> None:
    def trained(strategy: Any) -> Twin:
        torch.manual_seed(0)
        module = kind()
        with quietly():
            trainer(strategy, max_epochs=2).fit(module, vectors())
        return module

    assert_alike(trained(strategy_at(home, recompute=recompute)), trained(None))


class UsedUp(Late):
    def forward(self, x: Iterator[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(next(x))


class Iterators(Program):
    kind = UsedUp

    def call(self, block: Any, value: Tensor) -> Tensor:
        return block(iter([value]))  # type: ignore[no-any-return]


def test_an_iterator_cannot_be_recomputed_from(strategy_at: MakeStrategy) -> None:
    """Lightning's loop would take the StopIteration for the end of the epoch."""
    compare(Iterators, strategy_at("all_on_disk"))
    with pytest.raises(UsageError, match="an iterator or a counter"):
        trained(Iterators, strategy_at("all_on_disk", recompute="all"))
