"""Small modules for the runtime's tests: residual blocks between an embedding and a head, and variations of it.

Every block has more than 4096 parameters, so that each becomes a unit; a block's masters take several pages of 64 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kit import models
from kit.plain_loop import TrainModule

VOCABULARY = 97
WIDTH = 64


class Block(models.Block):
    """Pre-norm residual MLP, four times as wide inside."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__(width, 4 * width, functional.gelu, norm=True, dropout=dropout)


class Stack(TrainModule):
    """Embedding, blocks, head; next-token loss. `make_block` builds each block."""

    def __init__(self, depth: int = 4, make_block: Callable[[], nn.Module] = Block, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(make_block() for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def middle(self, x: Tensor, index: int) -> Tensor:
        """From the embedding's output to the last norm's input."""
        for block in self.blocks:
            x = block(x)
        return x

    def score(self, batch: Tensor, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def loss(self, batch: Any, index: int) -> Tensor | None:
        return self.score(batch, self.middle(self.embedding(batch[:, :-1]), index))


class ScheduledStack(Stack):
    """Model with a learning rate that falls at every step, and two parameter groups (decay on matrices only)."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
