"""Programs that do one unusual thing each, run by a plain Trainer and in several placements: as the plain one, or refused.

A program is a subclass of `Odd`, whose docstring says what is odd about it. `verdict` runs it with a strategy and compares
losses and weights to the last bit with the plain Trainer's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kit import models
from kit.twins import quietly, trainer, vectors
from lightning_ptm.errors import AngelPTMError

WIDTH = 64


class Block(models.Block):
    """The block of all programs: with a LayerNorm and GELU."""

    def __init__(self) -> None:
        super().__init__(WIDTH, activation=F.gelu, norm=True)


class Odd(nn.Module):
    """Four blocks between two layers of the root, AdamW with torch's fused kernel."""

    manual = False

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def block(self) -> nn.Module:
        return Block()

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, x: Tensor) -> Tensor:
        return self.through(x).square().mean()

    def optimizers_of(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def before_batch(self, index: int, run: Any) -> None:
        """Before each training batch; `run` is the LightningModule."""

    def step(self, run: Any, x: Tensor) -> Any:
        """The training step."""
        loss = self.loss(x)
        run.losses.append(loss.detach().clone())
        return loss


def lightning_module(program: type[Odd]) -> Any:
    """The LightningModule around a program, freshly built."""
    import lightning as L

    class Run(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []
            self.odd = program()
            self.automatic_optimization = not program.manual

        def training_step(self, batch: list[Tensor], index: int) -> Any:
            return self.odd.step(self, batch[0])

        def on_train_batch_start(self, batch: list[Tensor], index: int) -> None:
            self.odd.before_batch(index, self)

        def configure_optimizers(self) -> Any:
            return self.odd.optimizers_of()

    torch.manual_seed(1)
    return Run()


Outcome = tuple[dict[str, Tensor], list[Tensor]] | Exception


def outcome(program: type[Odd], strategy: Any = None) -> Outcome:
    """Weights and losses of a fit, or the error that ended it."""
    with quietly():
        module = lightning_module(program)
        try:
            trainer(strategy).fit(module, vectors(8, count=4))
        except Exception as error:
            return error
    return {name: value.clone() for name, value in module.state_dict().items()}, module.losses


@functools.cache
def plain_outcome(program: type[Odd]) -> Outcome:
    return outcome(program)


def assert_same(program: type[Odd], strategy: Any) -> None:
    """The numbers of a plain Trainer, bit by bit."""
    plain, ours = plain_outcome(program), outcome(program, strategy)
    assert not isinstance(plain, Exception), f"a plain Trainer raises {plain!r}"
    if isinstance(ours, Exception):
        raise ours
    off = [name for name, value in plain[0].items() if not torch.equal(value, ours[0][name])]
    assert not off, f"{len(off)} of {len(plain[0])} weights differ: {off[:3]}"
    assert len(plain[1]) == len(ours[1]) and all(map(torch.equal, plain[1], ours[1]))


def assert_refused(program: type[Odd], strategy: Any, *words: str) -> None:
    """An error of ours that has these words."""
    ours = outcome(program, strategy)
    assert isinstance(ours, AngelPTMError), f"not refused: {ours!r:.300}"
    missing = [word for word in words if word not in str(ours)]
    assert not missing, f"{missing} not in: {ours}"
