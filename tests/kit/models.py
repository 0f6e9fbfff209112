"""Small modules that most tests can train: a residual block, and a LightningModule of linear blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Residual MLP of one hidden layer; a unit where it has more than 4096 parameters.

    Args:
        hidden: width of the hidden layer (default: twice `width`).
        norm: LayerNorm before it.
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        activation: Activation = torch.tanh,
        *,
        norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = 2 * width if hidden is None else hidden
        self.norm = nn.LayerNorm(width) if norm else None
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        inner = x if self.norm is None else self.norm(x)
        inner = self.down(self.activation(self.up(inner)))
        return x + (inner if self.dropout is None else self.dropout(inner))


class Linears(L.LightningModule):
    """Residual linear layers, each a unit, between a layer before (`stem`) and one behind (`head`); learns to give zeros.

    Args:
        stem: width of what comes in (default: no such layer); head: of what goes out (0: no such layer).
        seed: of the weights (default: the caller seeds).
    """

    def __init__(
        self,
        width: int = 64,
        count: int = 3,
        *,
        stem: int = 0,
        head: int = 8,
        activation: Activation = torch.tanh,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.stem = nn.Linear(stem, width) if stem else None
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, head) if head else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.stem is None else self.stem(x)
        for block in self.blocks:
            x = x + self.activation(block(x))
        return x if self.head is None else self.head(x)

    def training_step(self, batch: Any, index: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class GAN(nn.Module):
    """A generator and a discriminator, each of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(Block(64), Block(64))
        self.discriminator = nn.Sequential(Block(64), Block(64), nn.Linear(64, 1))

    def forward(self, part: str, x: Tensor) -> Tensor:
        return getattr(self, part)(x)  # type: ignore[no-any-return]
