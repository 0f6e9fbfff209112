"""Small modules for the tests with several ranks; some do something else on one rank than on the others.

Blocks are of different sizes, each more than 4096 parameters, so that each becomes a unit, and none is a multiple of a
stripe of two or three pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 97
WIDTH = 64
HIDDEN = (256, 640, 320)


class Block(nn.Module):
    """Pre-norm residual MLP; `bonus` is a parameter that a call may leave out."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.bonus = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor, with_bonus: bool = True) -> Tensor:
        inner = self.up(self.norm(x))
        if with_bonus:
            x = x + self.bonus
        return x + self.down(functional.gelu(inner))


class Tower(L.LightningModule):
    """Embedding, blocks, head; next-token loss. Subclasses say what a rank does at a step (counted from 0)."""

    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: ClassVar[dict[str, Any]] = {"lr": 1e-2, "fused": True}

    def __init__(self, width: int = WIDTH, hidden: Sequence[int] = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, size) for size in hidden)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.losses: list[Tensor] = []
        self.validation_losses: list[Tensor] = []
        self.step = 0

    def order(self, rank: int, step: int) -> Iterable[int]:
        """Indices of the blocks in the order in which they are called."""
        return range(len(self.blocks))

    def with_bonus(self, rank: int, step: int) -> bool:
        return True

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        x = self.embedding(batch[:, :-1])
        for index in self.order(rank, step):
            x = self.blocks[index](x, self.with_bonus(rank, step))
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = self.loss(batch, self.trainer.global_rank, self.step)
        self.step += 1
        if loss is not None:
            self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        # Step 0: what a rank does differently belongs to training.
        loss = self.loss(batch, self.trainer.global_rank, 0)
        assert loss is not None
        self.validation_losses.append(loss.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), **self.optimizer_options)


class MomentumTower(Tower):
    """Model with an optimizer that is linear in the gradients, so that their rounding is not amplified."""

    optimizer_class = torch.optim.SGD
    optimizer_options: ClassVar[dict[str, Any]] = {"lr": 0.1, "momentum": 0.9}


class SkipsAnother(Tower):
    """Each rank skips a different block. All use block 0, and rank 0 reaches the end of its backward first."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return (0, 1 + rank % 2)


class Uneven(Tower):
    """Sizes that divide by nothing, a parameter of one element and a scalar."""

    def __init__(self) -> None:
        super().__init__(width=37, hidden=(131, 59, 303))
        self.gain = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(1))

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        loss = super().loss(batch, rank, step)
        assert loss is not None
        return loss * self.gain + self.shift.sum().square()


class SkipsABlock(Tower):
    """Rank 1 leaves block 1 out at every second step."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return (0, 2) if rank == 1 and step % 2 else (0, 1, 2)


class UsesOneBlockEach(Tower):
    """Each rank has a block of its own; block 0 is everybody's."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return (0, 1 + (rank + step) % 2)


class NobodyUsesABlock(Tower):
    """Block 1 is called by no rank at step 1, by rank 0 alone at step 2."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return (0, 2) if step == 1 or (step == 2 and rank) else (0, 1, 2)


class Reversed(Tower):
    """Rank 1 goes through the blocks backwards."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return (2, 1, 0) if rank == 1 else (0, 1, 2)


class BonusOnOneRank(Tower):
    """A parameter inside each block gets a gradient on rank 0 only."""

    def with_bonus(self, rank: int, step: int) -> bool:
        return rank == 0


class ByHand(Tower):
    """Manual optimization; a step without a loss goes without a backward pass.

    With automatic optimization Lightning refuses a step without a loss on several ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, index)
        if loss is not None:
            self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        return None


class NothingOnOneRank(ByHand):
    """Rank 1 has no loss at step 1."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        return None if rank == 1 and step == 1 else super().loss(batch, rank, step)


class NothingOnAnyRank(ByHand):
    """No rank has a loss at step 1."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        return None if step == 1 else super().loss(batch, rank, step)


class StepsAtEverySecond(ByHand):
    """Accumulates by hand; rank 1 has no loss, and so no backward pass, at the steps between."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        return None if rank == 1 and step % 2 == 0 else super().loss(batch, rank, step)

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        optimizer = self.optimizers()
        loss = Tower.training_step(self, batch, index)
        if loss is not None:
            self.manual_backward(loss / 2)
        if self.step % 2 == 0:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        return None
